// One request: its stretches with their reasons, its steps, and the tree of a step with the branch that was taken.

const MOST_LINES = 14;
const BAR = 7;
const open = { request: -1, rows: null, drafts: null, at: 0 };

async function openRequest(request) {
  open.request = request;
  history.replaceState(null, "", `#request=${request}`);
  const r = D.requests;
  $("drawer").hidden = false;
  $("name").textContent = `Request ${request}`;
  const told = [
    ["problem", problemName(request) || "-"], ["prompt", `${count(r.prompt[request])} tokens`],
    ["answer", `${count(r.tokens[request])} tokens`], ["steps", count(r.steps[request])],
    ["tokens per step", speedText(r.speed[request])],
    ["accepted", `${count(r.accepted[request])} of ${count(r.verified[request])} nodes`
      + ` (${percent(r.accepted[request], r.verified[request])})`],
    ["time", `${seconds(r.begin[request])} to ${seconds(r.end[request])}`],
    ["status", ending(request)],
  ];
  const [weights, last] = [r.weights[request], r.last_weights[request]];
  if (last) told.push(["weights", weights === last ? `version ${last}` : `versions ${weights} to ${last}`]);
  $("facts").replaceChildren(...told.map(([name, text]) => {
    const own = element("span", `${name} `);
    own.append(element("b", text));
    return own;
  }));
  $("detail").replaceChildren(element("p", "unpacking ...", "soft"));
  const [rows, drafts] = await Promise.all([rowsOf(request), treesOf(request)]);
  if (open.request !== request) return;
  [open.rows, open.drafts] = [rows, drafts];
  if (rows) drawRequest();
  else $("detail").replaceChildren(element("p", "Its steps were left out, to keep the page small: see --most-mb.", "soft"));
}

function closeRequest() {
  open.request = -1;
  $("drawer").hidden = true;
  history.replaceState(null, "", location.pathname + location.search);
}

function drawRequest() {
  const strip = element("div", undefined, "strip");
  strip.id = "strip";
  strip.tabIndex = 0;
  strip.setAttribute("aria-label", "Steps; the arrow keys go from one to the next");
  strip.append(element("canvas"), element("div"));
  strip.addEventListener("scroll", drawStrip);
  strip.firstChild.addEventListener("click", (event) => {
    const box = strip.getBoundingClientRect();
    choose(Math.floor((event.clientX - box.left + strip.scrollLeft) / stripBar()));
  });
  const step = element("div");
  step.id = "step";
  const note = "height: nodes verified, and of these accepted in full colour; below, why. Click a step, or use the arrow keys.";
  $("detail").replaceChildren(
    element("h3", "Stretches, and why"), stretchTable(), element("h3", "Steps"), strip, element("p", note, "soft"), step,
  );
  // where most was accepted is most to see
  const best = open.rows.accepted.reduce((most, value, i, all) => (value > all[most] ? i : most), 0);
  choose(best);
}

// --- stretches

/** Steps in a row with the same reason; then those most alike are joined, as `observe/timeline.py` does (Ward, 1963). */
function stretches() {
  const rows = open.rows;
  let found = [];
  rows.why.forEach((why, i) => {
    const last = found[found.length - 1];
    if (last && last.whys.has(why) && last.whys.size === 1) join(last, stretchOf(i));
    else found.push(stretchOf(i));
  });
  while (found.length > 256) {
    found = found.filter((one, i) => i % 2 === 0 || (join(found[i - 1], one), false));
  }
  while (found.length > MOST_LINES) {
    let best = 0;
    for (let i = 1; i + 1 < found.length; i++) if (loss(found, i) < loss(found, best)) best = i;
    join(found[best], found.splice(best + 1, 1)[0]);
  }
  return found;
}

function stretchOf(i) {
  const rows = open.rows;
  return {
    first: i, last: i, steps: 1, whys: new Map([[rows.why[i], 1]]),
    nodes: rows.nodes[i], accepted: rows.accepted[i], gained: rows.gained[i],
  };
}

function join(one, later) {
  one.last = later.last;
  for (const key of ["steps", "nodes", "accepted", "gained"]) one[key] += later[key];
  for (const [why, steps] of later.whys) one.whys.set(why, (one.whys.get(why) || 0) + steps);
}

function loss(found, i) {
  const [a, b] = [found[i], found[i + 1]];
  const whys = new Set([...a.whys.keys(), ...b.whys.keys()]);
  const apart = sum([...whys].map((why) => ((a.whys.get(why) || 0) / a.steps - (b.whys.get(why) || 0) / b.steps) ** 2));
  return ((a.steps * b.steps) / (a.steps + b.steps)) * apart;
}

function stretchTable() {
  const own = element("table");
  const head = element("tr");
  const titles = ["tokens", "from", "steps", "why", "tokens / step", "nodes / step", "accepted / step", "ms / step", "running"];
  head.append(...titles.map((title) => element("th", title, title === "why" ? "text" : "")));
  own.append(head, ...stretches().map(stretchRow));
  return own;
}

function stretchRow(one) {
  const rows = open.rows;
  const [first, last] = [rows.step[one.first], rows.step[one.last]];
  const begin = D.steps.begin[first];
  const whys = [...one.whys].sort((a, b) => b[1] - a[1]);
  const named = whys.slice(0, 3).map(([why, steps]) => D.reasons[why] + (whys.length > 1 ? ` ${percent(steps, one.steps)}` : ""));
  const each = (value, digits = 1) => (value / one.steps).toFixed(digits);
  const running = sum(D.steps.running.slice(first, last + 1)) / (last - first + 1);
  const end = rows.position[one.last] + rows.gained[one.last];
  const texts = [
    `${rows.position[one.first]}-${end}`, seconds(begin), count(one.steps), named.join(", ") + (whys.length > 3 ? ", ..." : ""),
    each(one.gained, 2), each(one.nodes), each(one.accepted), each(D.steps.end[last] - begin), running.toFixed(0),
  ];
  const row = element("tr");
  row.append(...texts.map((text, k) => element("td", text, k === 3 ? "text" : "")));
  row.children[3].prepend(dot(view.colours[whys[0][0]]));
  row.style.cursor = "pointer";
  row.addEventListener("click", () => choose(one.first));
  return row;
}

// --- steps

const stripBar = () => Math.max(BAR, Math.min(24, ($("strip").clientWidth || 700) / open.rows.step.length));

function drawStrip() {
  const strip = $("strip");
  const { context, width, height } = canvas(strip.firstChild, 84);
  const bar = stripBar();
  strip.lastChild.style.width = `${bar * open.rows.step.length}px`;
  const rows = open.rows;
  const most = highest(rows.nodes, 0, rows.nodes.length - 1) || 1;
  const first = Math.floor(strip.scrollLeft / bar);
  const base = height - 12;
  for (let i = first; i < Math.min(rows.step.length, first + width / bar + 1); i++) {
    const x = i * bar - strip.scrollLeft;
    if (i === open.at) {
      context.fillStyle = colour("--faint");
      context.fillRect(x, 0, bar, height);
    }
    context.fillStyle = colour.area;
    context.fillRect(x, base - (rows.nodes[i] / most) * (base - 6), bar - 1, (rows.nodes[i] / most) * (base - 6));
    context.fillStyle = colour("--accent");
    context.fillRect(x, base - (rows.accepted[i] / most) * (base - 6), bar - 1, (rows.accepted[i] / most) * (base - 6));
    context.fillStyle = view.colours[rows.why[i]];
    context.fillRect(x, base + 3, bar - 1, 7);
  }
}

function choose(i) {
  open.at = Math.min(Math.max(i, 0), open.rows.step.length - 1);
  const [strip, bar] = [$("strip"), stripBar()];
  if (open.at * bar < strip.scrollLeft || (open.at + 1) * bar > strip.scrollLeft + strip.clientWidth) {
    strip.scrollLeft = open.at * bar - strip.clientWidth / 2;
  }
  drawStrip();
  drawStep();
}

function drawStep() {
  const [rows, i, step] = [open.rows, open.at, open.rows.step[open.at]];
  const tree = open.drafts && open.drafts.trees[i];
  const parts = [element("h3", `Step ${count(i + 1)} of ${count(rows.step.length)}: tokens ${rows.position[i]} to `
    + `${rows.position[i] + rows.gained[i]}, at ${seconds(D.steps.begin[step])}`)];
  const proposed = tree ? `${tree.tokens.length} nodes proposed, ` : "";
  parts.push(element("p", `${D.reasons[rows.why[i]]}: ${proposed}${rows.nodes[i]} verified, ${rows.accepted[i]} accepted; `
    + `${rows.gained[i]} tokens gained`));
  if (open.drafts && $("words")) {
    const gained = open.drafts.answer.slice(rows.position[i], rows.position[i] + rows.gained[i]);
    parts.push(element("p", `gained: ${gained.map((token) => wordOf(token)).join("")}`));
  }
  if (tree) parts.push(...treeParts(tree, i));
  else if (rows.nodes[i] > 0 || !open.drafts) {
    const why = open.drafts ? "The trace does not hold this draft."
      : "The trees of this request were left out, to keep the page small: see --most-mb.";
    parts.push(element("p", why, "soft"));
  }
  $("step").replaceChildren(...parts);
}

// --- the tree

/** The nodes that the target accepted: as many as it says, along the answer. */
function taken(tree, i) {
  const [position, path] = [open.rows.position[i], []];
  let node = -1;
  for (let depth = 0; depth < open.rows.accepted[i]; depth++) {
    const token = open.drafts.answer[position + depth];
    const next = tree.tokens.findIndex((own, k) => tree.parents[k] === node && own === token);
    if (next < 0) break;
    path.push(next);
    node = next;
  }
  return path;
}

function treeParts(tree, i) {
  const path = taken(tree, i);
  const answer = open.drafts.answer;
  const after = answer[open.rows.position[i] + path.length];
  const nodes = tree.tokens.map((token, k) => ({
    token, parent: tree.parents[k], percent: tree.percent[k], source: tree.sources[k], isTaken: path.includes(k),
  }));
  // what the target sampled where it left the tree
  if (after !== undefined) nodes.push({ token: after, parent: path.length ? path[path.length - 1] : -1, isSampled: true });
  const rows = placed(nodes);
  const [wide, tall] = [57, 25];
  const width = 60 + wide * Math.max(...nodes.map((one) => one.depth)) + 20;
  const own = svg("svg", { width, height: rows * tall + 8, role: "img", "aria-label": "The draft tree of the step" });
  const at = (one) => [8 + wide * one.depth, 6 + tall * one.row];
  const root = { depth: 0, row: nodes.length ? Math.min(...nodes.filter((one) => one.parent < 0).map((one) => one.row)) : 0 };
  for (const one of nodes) {
    const [from, to] = [at(one.parent < 0 ? root : nodes[one.parent]), at(one)];
    const line = `M${from[0] + 50} ${from[1] + 9} C${from[0] + 55} ${from[1] + 9} ${to[0] - 5} ${to[1] + 9} ${to[0]} ${to[1] + 9}`;
    const isStrong = one.isTaken || one.isSampled;
    own.append(svg("path", { d: line, fill: "none", stroke: isStrong ? colour("--ink") : colour("--faint"), "stroke-width": isStrong ? 2 : 1 }));
  }
  own.append(box(at(root), { token: answer[open.rows.position[i] - 1], isRoot: true }));
  own.append(...nodes.map((one) => box(at(one), one)));
  const hold = element("div", undefined, "tree");
  hold.append(own);
  return [hold, treeLegend(nodes)];
}

/** Gives each node its depth and its row, children in the drafter's order; returns the number of rows. */
function placed(nodes) {
  const children = new Map();
  nodes.forEach((one, k) => {
    one.depth = one.parent < 0 ? 1 : nodes[one.parent].depth + 1;
    children.set(one.parent, [...(children.get(one.parent) || []), k]);
  });
  let rows = 0;
  const place = (node) => {
    const below = children.get(node) || [];
    if (node >= 0) nodes[node].row = rows;
    below.forEach((child, k) => {
      if (k) rows++;
      place(child);
    });
  };
  place(-1);
  return rows + 1;
}

function box([x, y], one) {
  const group = svg("g", {});
  const shade = one.isRoot || one.isSampled ? colour("--panel") : drafterColour(one.source);
  const isSure = one.isTaken || one.isRoot || one.isSampled;
  const look = { x, y, width: 50, height: 18, rx: 4, fill: shade, "fill-opacity": isSure ? 1 : 0.28 };
  if (one.isRoot || one.isSampled) Object.assign(look, { stroke: colour("--ink"), "stroke-dasharray": one.isSampled ? "3 2" : "none" });
  group.append(svg("rect", look));
  const ink = one.isTaken ? "#ffffff" : colour("--ink");
  const text = svg("text", { x: x + 25, y: y + 13, "text-anchor": "middle", style: `fill:${ink}` }, one.token === undefined ? "prompt" : wordOf(one.token, 7));
  const said = one.isRoot ? "the last token before the step" : one.isSampled ? "sampled by the target, behind what it accepted"
    : `${D.drafters[one.source]} gave it ${one.percent} %${one.isTaken ? ", accepted" : ""}`;
  const named = one.token === undefined ? "" : `token ${one.token}${D.words[one.token] ? ` "${D.words[one.token]}"` : ""}: `;
  group.append(text, svg("title", {}, named + said));
  return group;
}

function treeLegend(nodes) {
  const own = element("div", undefined, "legend");
  for (const source of new Set(nodes.map((one) => one.source).filter((source) => source !== undefined))) {
    const item = element("span");
    item.append(dot(drafterColour(source)), D.drafters[source]);
    own.append(item);
  }
  own.append(element("span", `${$("words") ? "" : "numbers are token ids; "}full colour: accepted; dashed: sampled by the target itself`));
  return own;
}
