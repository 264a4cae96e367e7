// Acceptance by drafter, the spread over requests, and a line for each request, of which only those in sight exist.

const LINE = 26;
const COLUMNS = [
  ["request", (i) => i, (i) => `${i}`],
  ["problem", (i) => problemName(i), (i) => problemName(i)],
  ["tokens", (i) => D.requests.tokens[i], (i) => count(D.requests.tokens[i])],
  ["steps", (i) => D.requests.steps[i], (i) => count(D.requests.steps[i])],
  ["per step", (i) => D.requests.speed[i], (i) => speedText(D.requests.speed[i])],
  ["verified", (i) => D.requests.verified[i], (i) => count(D.requests.verified[i])],
  ["accepted", (i) => D.requests.accepted[i] / (D.requests.verified[i] || Infinity),
    (i) => percent(D.requests.accepted[i], D.requests.verified[i])],
  ["begin", (i) => D.requests.begin[i], (i) => seconds(D.requests.begin[i])],
  ["end", (i) => D.requests.end[i], (i) => seconds(D.requests.end[i])],
  ["status", ending, ending],
];
// who ended last, first
const table = { order: [], by: 8, falls: true };

function element(tag, text, className) {
  const own = document.createElement(tag);
  if (text !== undefined) own.textContent = text;
  if (className) own.className = className;
  return own;
}

function compare(key) {
  return (a, b) => {
    const [left, right] = [key(a), key(b)];
    if (typeof left === "string") return left.localeCompare(right, "en", { numeric: true }) || a - b;
    // what has none stands last
    return (left !== left) - (right !== right) || left - right || a - b;
  };
}

function inView(request) {
  const r = D.requests;
  return r.end[request] >= view.from && r.begin[request] <= view.to;
}

function drawHead() {
  const cells = COLUMNS.map(([title], place) => {
    const button = element("button", title + (table.by === place ? (table.falls ? " \u2193" : " \u2191") : ""));
    button.type = "button";
    if (table.by === place) button.setAttribute("aria-sort", table.falls ? "descending" : "ascending");
    button.addEventListener("click", () => {
      table.falls = table.by === place ? !table.falls : place > 1;
      table.by = place;
      drawTable();
    });
    return button;
  });
  $("head").replaceChildren(...cells, element("span", "why drafts, or none", "soft"));
}

function drawTable() {
  const wanted = $("find").value.trim().toLowerCase();
  const isNamed = (i) => `${i}` === wanted || problemName(i).toLowerCase().includes(wanted);
  const isWanted = (i) => !wanted || (wanted.startsWith("#") ? `#${i}` === wanted : isNamed(i));
  table.order = D.requests.ran.filter((i) => inView(i) && isWanted(i)).sort(compare(COLUMNS[table.by][1]));
  if (table.falls) table.order.reverse();
  $("found").textContent = `${count(table.order.length)} requests`;
  $("lines").style.height = `${table.order.length * LINE}px`;
  drawHead();
  drawLines();
}

function drawLines() {
  const box = $("table");
  const first = Math.max(Math.floor(box.scrollTop / LINE) - 2, 0);
  const shown = table.order.slice(first, first + Math.ceil(box.clientHeight / LINE) + 4);
  const lines = shown.map((request, place) => {
    const line = element("div", undefined, "row");
    line.style.top = `${(first + place) * LINE}px`;
    line.append(...COLUMNS.map(([, , text]) => element("span", text(request))));
    line.children[1].title = problemName(request);
    line.append(element("canvas"));
    line.addEventListener("click", () => openRequest(request));
    return line;
  });
  $("lines").replaceChildren(...lines);
  lines.forEach((line, place) => drawStory(line.lastChild, shown[place]));
}

/** Why a request had its drafts, or none, from its first step to its last. */
function drawStory(own, request) {
  const { context, width, height } = canvas(own);
  const parts = Math.min(D.parts, D.requests.steps[request]);
  for (let part = 0; part < parts; part++) {
    context.fillStyle = view.colours[D.whys[request * D.parts + part]];
    context.fillRect((part / parts) * width, 0, width / parts + 0.5, height);
  }
}

// --- acceptance

/** Of the rollout that is looked at, or of all. */
const chosen = () => (view.rollout < 0 ? D.rollouts : [D.rollouts[view.rollout]]);

function drawDrafters() {
  const all = chosen();
  const head = element("tr");
  head.append(...["drafter", "nodes proposed", "verified", "accepted", "of verified", "of all tokens"]
    .map((title) => element("th", title)));
  const tokens = sum(all.map((one) => one.tokens));
  const isTold = all.every((one) => one.verified_by || !one.verified);
  const rows = D.drafters.map((name, k) => {
    const [proposed, accepted] = [sum(all.map((one) => one.proposed_by[k])), sum(all.map((one) => one.accepted_by[k]))];
    const verified = sum(all.map((one) => (one.verified_by ? one.verified_by[k] : 0)));
    const row = element("tr");
    const title = element("td");
    title.append(dot(drafterColour(k)), name);
    const part = element("td", percent(accepted, tokens));
    const share = element("span", undefined, "share");
    share.style.cssText = `width:${tokens ? (60 * accepted) / tokens : 0}px;background:${drafterColour(k)}`;
    part.append(share);
    row.append(title, ...[count(proposed), isTold ? count(verified) : "-", count(accepted),
      isTold ? percent(accepted, verified) : "-"].map((text) => element("td", text)), part);
    return row;
  });
  const total = element("tr");
  const [verified, accepted] = [sum(all.map((one) => one.verified)), sum(all.map((one) => one.accepted))];
  total.append(...["all", count(sum(all.map((one) => sum(one.proposed_by)))), count(verified), count(accepted),
    percent(accepted, verified), percent(accepted, tokens)].map((text) => element("td", text)));
  $("drafters").replaceChildren(head, ...rows, total);
  $("drafternote").textContent = isTold ? "" : "Which drafter's nodes were verified is not in traces of this age.";
}

/** Where drafts cease to hold: a drafter's own context may be shorter than the target's. */
function drawContexts() {
  const found = new Map();
  for (const [least, ...own] of chosen().flatMap((one) => one.by_context)) {
    const sums = found.get(least) || own.map(() => 0);
    found.set(least, sums.map((value, k) => value + own[k]));
  }
  const head = element("tr");
  head.append(...["context", "tokens per step", "nodes per step", "accepted"].map((title) => element("th", title)));
  const rows = [...found].sort(([a], [b]) => a - b).map(([least, [steps, tokens, verified, accepted]]) => {
    const row = element("tr");
    row.append(...[`${count(least)} to ${count(2 * least - 1)}`, speedText(tokens / steps), (verified / steps).toFixed(1),
      percent(accepted, verified)].map((text) => element("td", text)));
    return row;
  });
  $("contexts").replaceChildren(head, ...rows);
}

function dot(shade) {
  const own = element("i");
  own.style.cssText = `display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:${shade}`;
  return own;
}

function svg(tag, attributes, text) {
  const own = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) own.setAttribute(name, value);
  if (text !== undefined) own.textContent = text;
  return own;
}

function drawHistogram() {
  const speeds = D.requests.ran.filter(inView).map((i) => D.requests.speed[i]).filter((speed) => speed === speed);
  const own = $("histogram");
  const [width, height, bins] = [own.clientWidth || 480, 170, 24];
  own.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const most = Math.max(D.fastest, ...quantiles(speeds, [1]));
  const size = (most - 1) / bins;
  const heights = new Array(bins).fill(0);
  for (const speed of speeds) heights[Math.min(Math.max(Math.floor((speed - 1) / size), 0), bins - 1)]++;
  const tallest = Math.max(1, ...heights);
  const x = (speed) => 8 + ((speed - 1) / (most - 1)) * (width - 30);
  const parts = heights.flatMap((number, k) => {
    const tall = (number / tallest) * (height - 46);
    const bar = svg("rect", {
      x: x(1 + k * size) + 1, width: Math.max(x(1 + size) - x(1) - 2, 1), y: height - 26 - tall, height: tall,
      fill: speedColour(1 + (k + 0.5) * size),
    });
    bar.append(svg("title", {}, `${number} requests with ${(1 + k * size).toFixed(2)} to ${(1 + (k + 1) * size).toFixed(2)}`));
    return [bar];
  });
  const [middle] = quantiles(speeds, [0.5]);
  for (let speed = 1; speed <= most; speed += niceStep(most - 1, 6)) {
    parts.push(svg("text", { x: x(speed), y: height - 8, "text-anchor": "middle" }, `${+speed.toFixed(2)}`));
  }
  if (middle) {
    const line = { x1: x(middle), x2: x(middle), y1: 16, y2: height - 26, stroke: colour("--ink"), "stroke-dasharray": "3 3" };
    parts.push(svg("line", line));
    parts.push(svg("text", { x: x(middle) + 5, y: 14 }, `median ${middle.toFixed(2)}; tallest bar ${count(tallest)} requests`));
  }
  own.replaceChildren(...parts);
}

function quantiles(values, shares) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? shares.map((share) => sorted[Math.floor(share * (sorted.length - 1))]) : [];
}
