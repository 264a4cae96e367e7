// Pictures over time, which share one range of it: they are drawn anew, as wide as the page, whenever that changes.

const LEFT = 48;
const RIGHT = 10;
const view = { from: 0, to: 1, rollout: -1, order: [], height: 0, colours: [] };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A canvas made as fine as the screen: its context and its size in CSS pixels. */
function canvas(id, height) {
  const own = typeof id === "string" ? $(id) : id;
  const width = own.clientWidth || 600;
  const tall = height || own.clientHeight;
  const scale = window.devicePixelRatio || 1;
  own.width = Math.round(width * scale);
  own.height = Math.round(tall * scale);
  if (height) own.style.height = `${height}px`;
  const context = own.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return { context, width, height: tall };
}

const xOf = (ms, width) => LEFT + ((ms - view.from) / (view.to - view.from)) * (width - LEFT - RIGHT);
const msOf = (x, width) => view.from + ((x - LEFT) / (width - LEFT - RIGHT)) * (view.to - view.from);

/** The first step that ends behind a time. */
function stepAt(ms) {
  const end = D.steps.end;
  let low = 0;
  let high = end.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > ms) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** For each pixel column: the first and the last step that lie in it; null: nobody ran. */
function columnsOf(width) {
  const columns = [];
  for (let x = LEFT; x < width - RIGHT; x++) {
    const [from, to] = [msOf(x, width), msOf(x + 1, width)];
    const first = stepAt(from);
    let last = first;
    while (last + 1 < D.steps.end.length && D.steps.begin[last + 1] < to) last++;
    const lies = D.steps.begin[first] < to && D.steps.end[first] > from;
    columns.push(lies ? [x, first, last] : null);
  }
  return columns.filter(Boolean);
}

function niceStep(most, parts) {
  const rough = most / parts;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
}

function sideAxis(drawing, most, text) {
  const { context, width, height } = drawing;
  const step = niceStep(most, 3);
  context.textAlign = "right";
  for (let value = 0; value <= most; value += step) {
    const y = height - 1 - (value / most) * (height - 8);
    context.fillStyle = colour("--grid");
    context.fillRect(LEFT, y, width - LEFT - RIGHT, 1);
    context.fillStyle = colour("--soft");
    context.fillText(text(value), LEFT - 6, Math.min(Math.max(y + 4, 9), height - 1));
  }
}

function highest(values, first, last) {
  let most = 0;
  for (let i = first; i <= last; i++) most = Math.max(most, values[i]);
  return most;
}

function drawOverTime() {
  const steps = D.steps;
  const running = canvas("running", 110);
  const columns = columnsOf(running.width);
  const tops = columns.map(([x, first, last]) => [x, highest(steps.running, first, last), highest(steps.waiting, first, last)]);
  const most = tops.reduce((best, [, top]) => Math.max(best, top), 1);
  shadeTails(running);
  sideAxis(running, most * 1.05, (value) => `${Math.round(value)}`);
  const y = (value) => running.height - 1 - (value / (most * 1.05)) * (running.height - 8);
  for (const [x, top, waiting] of tops) {
    running.context.fillStyle = colour.area;
    running.context.fillRect(x, y(top), 1.5, running.height - 1 - y(top));
    running.context.fillStyle = colour.wait;
    if (waiting) running.context.fillRect(x, y(Math.min(waiting, most)), 1.5, 2);
  }
  drawSpeed(columns);
  drawWhys(columns);
}

function shadeTails({ context, width, height }) {
  context.fillStyle = colour("--tail");
  for (const one of D.rollouts) {
    const [from, to] = [xOf(Math.max(one.tail, view.from), width), xOf(Math.min(one.end, view.to), width)];
    if (to > from) context.fillRect(from, 0, to - from, height);
  }
}

function drawSpeed(columns) {
  const drawing = canvas("speed", 70);
  const means = columns.map(([x, first, last]) => {
    let [tokens, ran] = [0, 0];
    for (let i = first; i <= last; i++) [tokens, ran] = [tokens + D.steps.tokens[i], ran + D.steps.running[i]];
    return [x, ran ? tokens / ran : 0];
  });
  const most = 1.05 * means.reduce((best, [, mean]) => Math.max(best, mean), 2);
  sideAxis(drawing, most, (value) => `${+value.toFixed(1)}`);
  for (const [x, mean] of means) {
    drawing.context.fillStyle = speedColour(mean);
    const tall = (mean / most) * (drawing.height - 8);
    drawing.context.fillRect(x, drawing.height - 1 - tall, 1.5, tall);
  }
}

function drawWhys(columns) {
  const { context, height } = canvas("why", 16);
  for (const [x, first, last] of columns) {
    const times = new Map();
    for (let i = first; i <= last; i++) {
      times.set(D.steps.why[i], (times.get(D.steps.why[i]) || 0) + D.steps.end[i] - D.steps.begin[i]);
    }
    const [reason] = [...times].reduce((best, one) => (one[1] > best[1] ? one : best));
    context.fillStyle = view.colours[reason];
    context.fillRect(x, 2, 1.5, height - 4);
  }
}

// --- bars

function drawBars() {
  const rows = $("rows");
  const drawing = canvas("bars", rows.clientHeight);
  const { context, width, height } = drawing;
  const tall = view.height || height / Math.max(view.order.length, 1);
  $("spacer").style.height = `${view.height ? Math.max(view.order.length * tall - height, 0) : 0}px`;
  const top = view.height ? rows.scrollTop : 0;
  view.tall = Math.min(tall, 18);
  const each = Math.max(view.tall, 1);
  view.drawn = 0;
  for (let y = view.height ? -(top % view.tall) : 0; y < height; y += each) {
    const place = Math.floor((y + top) / view.tall + 1e-6);
    if (place >= view.order.length) break;
    drawBar(context, view.order[place], y, each, width);
    view.drawn++;
  }
  $("shown").textContent = shownText();
  drawAxis();
}

function drawBar(context, request, y, tall, width) {
  const r = D.requests;
  const [steps, first] = [r.steps[request], r.first[request]];
  const parts = Math.min(D.parts, steps);
  const gap = tall >= 4 ? 1 : 0;
  // its steps, one behind another: it may have been preempted, so these are as good as spread evenly
  const length = r.last[request] - first + 1;
  for (let part = 0; part < parts; part++) {
    const from = D.steps.begin[first + Math.floor((part * length) / parts)];
    const to = D.steps.end[first + Math.max(Math.floor(((part + 1) * length) / parts) - 1, 0)];
    if (to < view.from || from > view.to) continue;
    const [left, right] = [Math.max(xOf(from, width), LEFT), Math.min(xOf(to, width), width - RIGHT)];
    const at = request * D.parts + part;
    context.fillStyle = $("colour").value === "why" ? view.colours[D.whys[at]] : speedColour(D.speed[at] / 10);
    // on whole pixels, or neighbours leave seams
    context.fillRect(Math.round(left), y, Math.max(Math.round(right) - Math.round(left), 1), tall - gap);
  }
  if (tall >= 11) {
    context.fillStyle = colour.soft;
    context.textAlign = "right";
    context.fillText(`${request}`, LEFT - 6, y + tall - 3);
  }
}

function shownText() {
  const all = count(view.order.length);
  const each = view.order.length / Math.max(view.drawn, 1);
  const text = view.height || each < 1.05 ? "" : `; a line of the picture is one of ${each.toFixed(0)}`;
  return `${all} requests${text}. A click on a bar, or on a line of the table below, opens the request.`;
}

function drawAxis() {
  const { context, width } = canvas("axis", 20);
  const step = niceStep(view.to - view.from, Math.max(width / 110, 2));
  context.fillStyle = colour("--soft");
  context.textAlign = "center";
  for (let ms = Math.ceil(view.from / step) * step; ms <= view.to; ms += step) {
    context.fillRect(xOf(ms, width), 0, 1, 4);
    const digits = Math.max(0, Math.ceil(3 - Math.log10(step) - 1e-9));
    context.fillText(`${(ms / 1000).toFixed(digits)} s`, Math.min(xOf(ms, width), width - 22), 15);
  }
}

/** The request whose bar lies there; -1: none. */
function requestAt(event) {
  const box = $("bars").getBoundingClientRect();
  const top = view.height ? $("rows").scrollTop : 0;
  const place = Math.floor((event.clientY - box.top + top) / view.tall);
  const ms = msOf(event.clientX - box.left, box.width);
  const request = view.order[place];
  if (request === undefined || view.height === 0 && view.tall < 1) return request === undefined ? -1 : request;
  return ms >= D.requests.begin[request] && ms <= D.requests.end[request] ? request : -1;
}

// --- looking closer

function dragging(id, click) {
  const own = $(id);
  let from = null;
  own.addEventListener("pointerdown", (event) => (from = event.clientX));
  own.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const box = own.getBoundingClientRect();
    const ends = [from, event.clientX].map((x) => msOf(x - box.left, box.width)).sort((a, b) => a - b);
    const width = Math.abs(event.clientX - from);
    from = null;
    if (width > 4) lookAt(Math.max(ends[0], view.from), Math.min(ends[1], view.to));
    else if (click) click(event);
  });
  own.addEventListener("dblclick", () => lookAtAll());
}

function tipAt(event, text) {
  const tip = $("tip");
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function stepText(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const ms = msOf(event.clientX - box.left, box.width);
  const i = stepAt(ms);
  const steps = D.steps;
  if (ms < steps.begin[i] || ms > steps.end[i]) return "";
  const mean = steps.running[i] ? (steps.tokens[i] / steps.running[i]).toFixed(2) : "-";
  const waits = steps.waiting[i] ? `, ${count(steps.waiting[i])} wait` : "";
  return `step ${count(i)} at ${seconds(steps.begin[i])}, ${seconds(steps.end[i] - steps.begin[i])}\n`
    + `${count(steps.running[i])} run${waits}; ${mean} tokens each\n`
    + `${count(steps.nodes[i])} nodes verified, ${count(steps.accepted[i])} accepted\n${D.reasons[steps.why[i]]}`;
}

function requestText(request) {
  const r = D.requests;
  if (request < 0) return "";
  return `request ${request}${problemName(request) ? `, problem ${problemName(request)}` : ""}\n`
    + `${count(r.tokens[request])} tokens in ${count(r.steps[request])} steps: ${speedText(r.speed[request])} per step\n`
    + `${percent(r.accepted[request], r.verified[request])} of ${count(r.verified[request])} nodes accepted\n`
    + `from ${seconds(r.begin[request])} to ${seconds(r.end[request])}, ${ending(request)}`;
}
