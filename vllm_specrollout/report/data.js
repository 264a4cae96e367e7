"use strict";
// The page's data: unpacked when they are needed. `D` is the summary; all times are milliseconds.

let D = null;
let N = 0;

const $ = (id) => document.getElementById(id);
/** How a request ended; behind it, if its answer looks like one that repeats itself. */
const ending = (i) => D.requests.statuses[D.requests.status[i]] + (D.requests.looping[i] ? ", looping?" : "");
const sum = (values) => values.reduce((total, value) => total + value, 0);

async function unpack(id) {
  const text = atob($(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function bytesOf(base64) {
  const text = atob(base64);
  return Uint8Array.from({ length: text.length }, (_, i) => text.charCodeAt(i));
}

async function openData() {
  D = await unpack("summary");
  D.words = $("words") ? await unpack("words") : {};
  const r = D.requests;
  N = r.tokens.length;
  D.speed = bytesOf(D.speed);
  D.whys = bytesOf(D.why);
  // the first token comes with the prompt
  r.speed = r.tokens.map((tokens, i) => (r.steps[i] > 1 ? (tokens - 1) / (r.steps[i] - 1) : NaN));
  r.begin = r.first.map((step, i) => (r.steps[i] ? D.steps.begin[step] : NaN));
  r.end = r.last.map((step, i) => (r.steps[i] ? D.steps.end[step] : NaN));
  r.ran = Array.from({ length: N }, (_, i) => i).filter((i) => r.steps[i] > 0);
  // of parts: above it all look alike
  const speeds = r.ran.map((i) => r.speed[i]).filter((speed) => speed === speed).sort((a, b) => a - b);
  D.fastest = Math.max(2, Math.ceil(speeds.length ? speeds[Math.floor(0.95 * (speeds.length - 1))] : 2));
}

// --- single requests: a block of several is unpacked together, and the last few are kept

const blocks = new Map();

function block(id) {
  if (!blocks.has(id)) {
    if (blocks.size > 8) blocks.delete(blocks.keys().next().value);
    blocks.set(id, unpack(id));
  }
  return blocks.get(id);
}

/** The rows of a request; null: they are not in the page. */
async function rowsOf(request) {
  const r = D.requests;
  if (r.block[request] < 0) return null;
  const all = await block(`steps${r.block[request]}`);
  if (!all.at) {
    let last = 0;
    all.at = all.step.map((difference) => (last += difference));
  }
  const from = firstRow(all.ids, request);
  const own = (column) => column.slice(from, from + r.steps[request]);
  const rows = { step: own(all.at), gained: own(all.gained), nodes: own(all.nodes) };
  let position = 0;
  rows.position = rows.gained.map((gained) => (position += gained) - gained);
  return { ...rows, accepted: own(all.accepted), why: own(all.why) };
}

function firstRow(ids, request) {
  return sum(ids.slice(0, ids.indexOf(request)).map((id) => D.requests.steps[id]));
}

/** A request's answer, and the draft of each of its rows (null: none); null: they are not in the page. */
async function treesOf(request) {
  const r = D.requests;
  if (r.trees[request] < 0) return null;
  const all = await block(`trees${r.trees[request]}`);
  if (!all.begin) {
    let node = 0;
    all.begin = all.sizes.map((size) => (node += size) - size);
  }
  const from = firstRow(all.ids, request);
  const place = all.ids.indexOf(request);
  const answer = sum(all.lengths.slice(0, place));
  const trees = [];
  for (let row = from; row < from + r.steps[request]; row++) {
    const own = (column) => column.slice(all.begin[row], all.begin[row] + all.sizes[row]);
    const columns = () => ({
      tokens: own(all.tokens), parents: own(all.parents), percent: own(all.percent), sources: own(all.sources),
    });
    trees.push(all.sizes[row] ? columns() : null);
  }
  return { answer: all.answers.slice(answer, answer + all.lengths[place]), trees };
}

// --- words

const seconds = (ms) => {
  const s = ms / 1000;
  return s >= 100 ? `${s.toFixed(0)} s` : s >= 1 ? `${s.toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
};
const count = (value) => value.toLocaleString("en-US");
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "-");
const speedText = (speed) => (speed === speed ? speed.toFixed(2) : "-");
const problemName = (request) => D.requests.problems[D.requests.problem[request]];

/** A token as its text, with what cannot be seen made visible; its number where the page has no text. */
function wordOf(token, most = Infinity) {
  const text = D.words[token];
  if (text === undefined || text === "") return `${token}`;
  const shown = text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
  return shown.length > most ? `${shown.slice(0, most - 1)}\u2026` : shown;
}

// --- colours

const RAMP = [[154, 163, 178], [79, 134, 198], [38, 157, 150], [108, 191, 75], [242, 193, 46]];
const DRAFTERS = ["#3b7dd8", "#e07b39", "#2ca089", "#b05cc6", "#c9a227", "#d64f6a", "#6b8e23", "#7a7f8c"];
const ASKED = ["#2ca089", "#3b7dd8", "#6cbf4b", "#8f6fd1"];
const PAUSED = ["#d64f6a", "#e07b39", "#b05cc6", "#8c5a3c", "#f2a0a9"];

function mix(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((from, k) => Math.round(from + (RAMP[low + 1][k] - from) * (at - low)));
}

const SHADES = Array.from({ length: 256 }, (_, i) => `rgb(${mix(i / 255)})`);
const speedColour = (speed) => SHADES[Math.round(255 * Math.min(Math.max((speed - 1) / (D.fastest - 1), 0), 1))];
const drafterColour = (drafter) => DRAFTERS[drafter % DRAFTERS.length];

function reasonColours() {
  let asked = 0;
  let paused = 0;
  return D.reasons.map((reason) => {
    if (reason === "prompt") return "#a79be0";
    if (reason === "nothing proposed") return "#9aa3b2";
    if (reason === "left out") return "#e3b448";
    if (/^(drafting paused|not asked|off)/.test(reason)) return PAUSED[paused++ % PAUSED.length];
    return ASKED[asked++ % ASKED.length];
  });
}
