// What happens when: the page is opened, a choice is made, a key is pressed.

function lookAt(from, to) {
  const margin = Math.max(to - from, 0.1);
  [view.from, view.to] = [from, from + margin];
  $("all").hidden = view.from <= whole()[0] && view.to >= whole()[1];
  sortBars();
  drawAll();
}

function whole() {
  const all = chosen();
  return all.length ? [all[0].begin, Math.max(all[all.length - 1].end, all[0].begin + 0.1)] : [0, 1];
}

function lookAtAll() {
  lookAt(...whole());
}

function sortBars() {
  const r = D.requests;
  const keys = { first: (i) => r.first[i], last: (i) => r.last[i], tokens: (i) => r.tokens[i], speed: (i) => r.speed[i], problem: problemName };
  view.order = r.ran.filter(inView).sort(compare(keys[$("sort").value]));
}

function drawAll() {
  for (const name of ["area", "wait", "soft"]) colour[name] = colour(`--${name}`);
  drawOverTime();
  drawBars();
  drawDrafters();
  drawContexts();
  drawHistogram();
  drawTable();
  if (open.request >= 0 && open.rows) drawRequest();
}

function drawCards() {
  const all = chosen();
  const total = (key) => sum(all.map((one) => one[key]));
  const [begin, end] = whole();
  const busy = sum(all.map((one) => one.end - one.begin));
  const tail = sum(all.map((one) => one.end - one.tail));
  const idle = end - begin - busy;
  const steps = sum(all.map((one) => one.behind - one.first));
  const cards = [
    [count(total("requests")), "requests", `${count(total("tokens"))} tokens`],
    [seconds(busy), "makespan", idle > 0.01 * busy ? `and ${seconds(idle)} in which nobody ran` : `${count(steps)} steps`],
    [speedText(total("decoded") / total("decoding")), "tokens per step", "of a running request; plain decoding: 1"],
    [percent(total("accepted"), total("verified")), "of verified nodes accepted",
      `${count(total("accepted"))} of ${count(total("verified"))}`],
    [percent(steps - total("steps_off"), steps), "of steps had drafts", `${count(steps - total("steps_off"))} of ${count(steps)}`],
    [seconds(tail), "tail", `${percent(tail, busy)} of the makespan`],
    [count(Math.max(0, ...all.map((one) => one.most_running))), "peak running", `limit ${count(D.header.max_num_seqs)}`],
  ];
  $("cards").replaceChildren(...cards.map(([value, title, more]) => {
    const own = element("div", undefined, "card");
    own.append(element("b", value), title, element("p", more, "soft"));
    return own;
  }));
}

function drawLegends() {
  const used = [...new Set([...D.steps.why, ...D.whys])].filter((why) => D.reasons[why] !== undefined);
  $("whys").replaceChildren(...used.map((why) => {
    const own = element("span");
    own.append(dot(view.colours[why]), D.reasons[why]);
    return own;
  }));
  const ramp = element("span", undefined, "ramp");
  ramp.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${mix(share)})`).join(",")})`;
  $("ramp").replaceChildren("1", ramp, `${D.fastest} tokens per step, or more`);
}

function tellHeader() {
  const h = D.header;
  const drafters = D.drafters.join(", ") || "no drafters";
  $("engine").textContent = `${h.model || "a model without a name"}; ${drafters}; budget ${h.budget}; at most `
    + `${h.max_draft_tokens} nodes, ${h.max_depth} deep, ${h.shape}; ${h.max_num_seqs} requests at once; runner ${h.runner}`;
  const lost = D.requests.status.filter((status) => /^(no end|open)$/.test(D.requests.statuses[status])).length;
  const told = [];
  if (D.is_cut) told.push("The trace stops in the middle: its engine still writes, or was killed.");
  if (lost) told.push(`${count(lost)} requests had not ended.`);
  if (N > D.requests.ran.length) told.push(`${count(N - D.requests.ran.length)} requests have no step in it.`);
  $("warning").textContent = told.join(" ");
  $("warning").hidden = !told.length;
}

function offerRollouts() {
  const several = D.rollouts.length > 1;
  $("rollouts").hidden = !several;
  if (!several) return;
  const option = (value, text) => Object.assign(element("option", text), { value });
  $("rollout").replaceChildren(option(-1, `all ${D.rollouts.length}`), ...D.rollouts.map((one, k) => option(k,
    `${k + 1}: ${count(one.requests)} requests, ${seconds(one.end - one.begin)}, ${speedText(one.decoded / one.decoding)} per step`)));
  $("rollout").addEventListener("change", (event) => {
    view.rollout = Number(event.target.value);
    drawCards();
    lookAtAll();
  });
}

function listen() {
  for (const id of ["running", "speed", "why"]) {
    dragging(id);
    $(id).addEventListener("pointermove", (event) => tipAt(event, stepText(event)));
  }
  dragging("bars", (event) => {
    const request = requestAt(event);
    if (request >= 0) openRequest(request);
  });
  $("bars").addEventListener("pointermove", (event) => tipAt(event, requestText(requestAt(event))));
  for (const id of ["running", "speed", "why", "bars"]) $(id).addEventListener("pointerleave", (event) => tipAt(event, ""));
  $("rows").addEventListener("scroll", drawBars);
  $("table").addEventListener("scroll", drawLines);
  $("find").addEventListener("input", drawTable);
  $("all").addEventListener("click", lookAtAll);
  $("close").addEventListener("click", closeRequest);
  $("sort").addEventListener("change", () => (sortBars(), drawBars()));
  $("colour").addEventListener("change", drawBars);
  $("height").addEventListener("change", (event) => {
    view.height = Number(event.target.value);
    drawBars();
  });
  $("theme").addEventListener("click", () => {
    const root = document.documentElement.dataset;
    root.theme = root.theme === "dark" ? "light" : "dark";
    drawAll();
  });
  window.addEventListener("resize", drawAll);
  window.addEventListener("hashchange", openNamed);
  window.addEventListener("keydown", (event) => {
    if (open.request < 0 || event.target.matches("input, select")) return;
    if (event.key === "Escape") closeRequest();
    else if (open.rows && event.key === "ArrowRight") choose(open.at + 1);
    else if (open.rows && event.key === "ArrowLeft") choose(open.at - 1);
    else return;
    event.preventDefault();
  });
}

/** `#request=17` in the address opens that request. */
function openNamed() {
  const request = Number((location.hash.match(/^#request=(\d+)$/) || [])[1]);
  if (D.requests.steps[request] > 0) openRequest(request);
}

async function begin() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: it cannot unpack gzip");
  await openData();
  view.colours = reasonColours();
  tellHeader();
  offerRollouts();
  drawCards();
  drawLegends();
  listen();
  lookAtAll();
  openNamed();
  document.body.dataset.opened = `${Math.round(performance.now())}`;
}

begin().catch((error) => {
  $("warning").hidden = false;
  $("warning").textContent = `The page cannot be shown: ${error.message}`;
  throw error;
});
