// The page at /: follows /events and shows what they say. Counters are totals, so rates are differences of samples
// (rates.js); the list of requests is in requests.js.
// The events are read with fetch, since EventSource cannot send the key, which is kept in this module alone.

import { Counters, line } from "./rates.js";
import { forgetRequests, showRequests } from "./requests.js";
import { at, count, make, number, percent, rate, say, sum } from "./text.js";

const HISTORY_S = 120; // of the graphs, which begin with SHORTEST_S
const SHORTEST_S = 30;
const RATE_S = { written: 3, read: 10 }; // rates are means of that long; what was read is counted more coarsely
const SHARES_S = 10; // of hits, misses, drafts and blocks that are read
const SHARES = ["hits", "met", "drafts", "recall"];
const UNKNOWN = { written: null, read: null, ...Object.fromEntries(SHARES.map((kind) => [kind, null])) };
const MISSED_S = 3;
const STALE_MS = 4000; // so long after the last event nothing is known of now
const SILENCE_MS = 15000; // more than that between two events is a dead connection
const MIB = 2 ** 20;
const GIB = 2 ** 30;
const MEMORY = [
  ["slots_bytes", "slots of experts"],
  ["dense_bytes", "weights beside experts"],
  ["kv_bytes", "KV cache"],
  ["buffers_bytes", "buffers"],
  ["context_bytes", "GPU context"],
  ["staging_bytes", "staging"],
];
const SETTINGS = [
  ["architecture", "architecture"],
  ["device", "device"],
  ["isa", "compiled for"],
  ["threads", "threads"],
  ["policy", "policy"],
  ["residency_pct", "experts in slots"],
  ["ctx_tokens", "context"],
  ["parallel", "requests at once"],
  ["chunk_tokens", "prefill step"],
  ["kv_type", "KV cache"],
  ["draft", "drafts"],
  ["kv_recall", "share left out of the cache"],
  ["kv_recall_blocks", "blocks read of the cache"],
  ["kv_recall_from", "tokens of contexts that are read whole"],
];

// --- what is known ------------------------------------------------------------------------------

let model = null;
let engine = null; // the daemon's counters, when it last said them
let engineTime = 0;
let restarts = 0; // of the daemon that said them
const counters = new Counters(Math.max(SHARES_S, MISSED_S, ...Object.values(RATE_S)));
let history = []; // rates of the last HISTORY_S, for the graphs
let brought = new Set(); // experts that were missed and brought in since its answer before, layer * width + expert
let missedNow = []; // misses a second of each layer

function onModel(given) {
  model = given;
  engine = null;
  forget();
  at("main").hidden = false;
  say("name", model.name);
  document.title = `${model.name} · Spark`;
  showSettings();
}

// Nothing is known of the time until now: what is told next is no change of what was told before.
function forget() {
  counters.forget();
  forgetRequests();
  brought.clear();
  missedNow = [];
}

// Nothing was told for a while.
function onSilence() {
  forget();
  showRates(UNKNOWN);
}

function onSample(sample) {
  if (sample.restarts !== restarts || !sample.up) {
    counters.forget();
    brought.clear();
    restarts = sample.restarts;
  }
  if (!sample.up) engine = null;
  counters.take(sample.time_s, sample.engine ? totals(sample.engine) : null);
  if (sample.engine) follow(sample.engine, sample.time_s);
  else if (sample.time_s - engineTime >= MISSED_S) brought.clear();
  missedNow = (engine?.map ?? []).map((_, layer) => counters.rate(MISSED_S, (told) => told.byLayer[layer]) ?? 0);
  showState(sample);
  showRequests(sample.requests, sample.time_s);
  const rates = { ...UNKNOWN, written: 0, read: 0 };
  if (sample.up) {
    for (const kind of ["written", "read"]) rates[kind] = counters.rate(RATE_S[kind], (told) => told[kind]);
    rates.hits = share((told) => told.hits, (told) => told.hits + told.misses);
    rates.met = share((told) => Math.min(told.met, told.misses), (told) => told.misses);
    rates.drafts = share((told) => told.accepted, (told) => told.drafted);
    rates.recall = share((told) => told.readBlocks, (told) => told.blocks);
  }
  remember(sample.time_s, rates);
  showRates(rates);
  showFigures(sample);
  showExperts();
  showMemory(engine?.plan ?? {});
}

function totals({ tokens, hits, misses, misses_by_layer, met, drafts, recall }) {
  const { written, read } = tokens ?? { written: 0, read: 0 };
  const { blocks, read: readBlocks } = recall ?? { blocks: 0, read: 0 };
  const elsewhere = (met?.computed ?? 0) + (met?.divided ?? 0) + (met?.useful ?? 0);
  const counts = { written, read, hits: hits ?? 0, misses: misses ?? 0, met: elsewhere, blocks, readBlocks };
  return { ...counts, byLayer: misses_by_layer ?? [], ...draftsOf(drafts) };
}

// Tokens that were drafted, and accepted of them, whoever drafted them.
function draftsOf(drafts) {
  const sources = Object.values(drafts ?? {});
  return { drafted: sum(sources.map((n) => n.drafted)), accepted: sum(sources.map((n) => n.accepted)) };
}

function follow(now, time) {
  const last = engine, map = now.map ?? [];
  engine = now;
  engineTime = time;
  brought.clear();
  if (!last || counters.told.length < 2 || map.length !== (last.map ?? []).length) return;
  map.forEach((row, layer) => {
    if (row === last.map[layer]) return;
    for (let expert = 0; expert < row.length; expert++) {
      if (row[expert] === "c" && last.map[layer][expert] === ".") brought.add(layer * row.length + expert);
    }
  });
}

// The share of what was counted within the window, null where nothing was.
function share(part, whole) {
  const all = counters.over(SHARES_S, whole)?.counted;
  return all ? counters.over(SHARES_S, part).counted / all : null;
}

function remember(time_s, rates) {
  if (history.length && time_s < history.at(-1).time_s) history = []; // of another server
  const gap = history.length && time_s - history.at(-1).time_s > STALE_MS / 1000;
  if (gap) history.push({ time_s: history.at(-1).time_s, ...UNKNOWN });
  history.push({ time_s, ...rates });
  while (history[0].time_s < time_s - HISTORY_S) history.shift();
}

// --- figures ------------------------------------------------------------------------------------

const DAEMON = {
  stopped: "the daemon is stopped (SIGSTOP)",
  stuck: "the daemon does not answer",
};

function showState(sample) {
  let text = "idle";
  if (!sample.up && sample.replies) text = "the daemon is down and being started";
  else if (!sample.up) text = "the daemon is down; the next request starts it";
  else if (DAEMON[sample.daemon]) text = DAEMON[sample.daemon];
  else if (!sample.engine) text = sample.replies ? "in a long step" : "waiting for the daemon";
  else if (sample.replies) text = "working";
  if (sample.restarts) text += `, restarted ${count(sample.restarts, "time")}`;
  say("state", text);
}

function showRates(rates) {
  for (const kind of ["written", "read"]) say(kind, rate(rates[kind]));
  for (const kind of SHARES) say(kind, rates[kind] === null ? "–" : percent(rates[kind], 1));
  for (const kind of Object.keys(UNKNOWN)) {
    const values = history.map((then) => ({ time_s: then.time_s, value: then[kind] }));
    line(at(`${kind}-graph`).firstElementChild, values, SHORTEST_S);
  }
}

function showFigures(sample) {
  say("replies", number(sample.replies));
  const tokens = engine?.tokens;
  say("written-more", tokens ? `${number(tokens.written)} since the start` : "");
  say("read-more", tokens ? `${number(tokens.read)} computed, ${number(tokens.reused)} reused` : "");
  say("queue", engine ? `${number(engine.running ?? 0)} at work, ${number(engine.queued ?? 0)} waiting` : "");
  showMet(engine?.met);
  showDrafts(draftsOf(engine?.drafts));
  showRecall(engine?.recall);
  showCache(engine?.kv_blocks);
  const prefix = engine?.prefixes;
  at("prefix-figure").hidden = !prefix;
  if (prefix) {
    say("prefix", number((prefix.device_chunks + prefix.host_chunks) * prefix.chunk_tokens));
    const parts = [`${number(prefix.host_bytes / MIB)} MiB of host memory`, `${count(prefix.snapshots, "snapshot")}`];
    if (prefix.file_bytes) parts.push(`${number(prefix.file_bytes / MIB)} MiB of files`);
    say("prefix-more", parts.join(", "));
  }
}

// Blocks that requests hold are in use; prefixes that nobody uses make room when it is needed.
function showCache(blocks) {
  const meter = at("kv-meter"), known = Boolean(blocks?.total);
  meter.hidden = at("kv-parts").hidden = !known;
  say("kv", known ? percent(blocks.total - blocks.free - (blocks.reclaimable ?? 0), blocks.total, 0) : "–");
  if (!known) return;
  const { total, free, reclaimable: spare = 0 } = blocks;
  const held = total - free - spare;
  meter.setAttribute("aria-valuenow", String(held));
  meter.setAttribute("aria-valuemax", String(total));
  const parts = [`${number(held)} held by requests`, `${number(spare)} by prefixes, given up when needed`, `${number(free)} free`];
  meter.setAttribute("aria-valuetext", `Of ${count(total, "block")} ${parts.join(", ")}`);
  [held, spare].forEach((n, i) => { meter.children[i].style.width = percent(n, total, 2); });
  ["kv-held", "kv-spare", "kv-free"].forEach((id, i) => say(id, parts[i]));
}

// Misses that did not wait for the link when their layer asked: the CPU's, and those that were guessed.
function showMet(met) {
  at("met-figure").hidden = !met;
  if (!met) return;
  const { computed, divided, taken_back: back, waited_s: waited, useful, wasted } = met, parts = [];
  if (computed !== undefined) {
    parts.push(`${number(computed)} by the CPU, ${number(divided)} in part, ${number(back)} taken back, ${waited.toFixed(1)} s waited`);
  }
  if (useful !== undefined) parts.push(`${number(useful)} guessed, ${number(wasted)} in vain`);
  say("met-more", `${parts.join("; ")} since the start`);
}

// What drafts gave is told when a step ends, what is written when it is sent: the share may be beyond 1 for a moment.
function showDrafts({ drafted, accepted }) {
  at("drafts-figure").hidden = !drafted;
  if (!drafted) return;
  const given = share((told) => told.accepted, (told) => told.written);
  const parts = [`${number(accepted)} of ${number(drafted)} since the start`];
  if (given !== null) parts.unshift(`${percent(Math.min(1, given), 1, 0)} of what is written`);
  say("drafts-more", parts.join("; "));
}

// Blocks that tokens had before them, where a part may be read, and what that left out, as the engine estimates it.
function showRecall(recall) {
  at("recall-figure").hidden = !recall?.blocks;
  if (!recall?.blocks) return;
  const { tokens, blocks, read, left_out_sum: sum, left_out_max: most } = recall;
  const left = `about ${percent(sum, tokens)} of attention left out, ${percent(most, 1)} at most`;
  say("recall-more", `${percent(read, blocks)} of ${count(blocks, "block")} since the start; ${left}`);
}

function showHits() {
  const all = engine.hits + engine.misses;
  say("hits-more", all ? `${percent(engine.hits, all)} since the start` : "nothing decoded yet");
}

// --- the map ------------------------------------------------------------------------------------

const canvas = at("map");
const pen = canvas.getContext("2d");
let cursor = null; // [layer, expert] that is pointed at
let grid = null; // where cells are, in CSS pixels

function layout(layers, experts) {
  const left = 30, right = 64, top = 18;
  const room = at("map-frame").clientWidth - left - right;
  const width = Math.min(18, Math.max(2, Math.floor((2 * room) / experts) / 2));
  const height = Math.min(18, Math.max(6, Math.round(width)));
  return { left, right, top, width, height, layers, experts };
}

function showExperts() {
  const map = engine?.map ?? [];
  const some = map.length > 0 && map[0].length > 0;
  at("hits-figure").hidden = !some;
  at("by-layer").hidden = at("map-frame").hidden = at("cell").hidden = !some;
  document.querySelector(".legend").hidden = !some;
  if (!some) {
    canvas.removeAttribute("aria-label");
    say("map-summary", engine ? "This model has no experts: all of it is resident." : "What is resident is not known now.");
    return;
  }
  showHits();
  const all = map.join("");
  const of = (mark) => all.split(mark).length - 1;
  const summary = `${map.length} layers of ${map[0].length} experts: ${number(of("p"))} pinned, ${number(of("c"))} cached, ` +
    `${number(of("."))} not resident.`;
  say("map-summary", summary);
  canvas.setAttribute("aria-label", `Where experts are. ${summary} ${number(sum(missedNow))} misses a second.`);
  draw(map);
  if (at("by-layer").open) showLayers(map);
}

function draw(map) {
  grid = layout(map.length, map[0].length);
  const { left, right, top, width, height } = grid;
  const w = left + width * grid.experts + right, h = top + height * grid.layers;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(w * scale) || canvas.height !== Math.round(h * scale)) {
    canvas.width = Math.round(w * scale);
    canvas.height = Math.round(h * scale);
    canvas.style.width = `${w}px`;
    canvas.style.height = `${h}px`;
  }
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const colors = { p: color("pinned"), c: color("cached"), ".": color(width >= 6 ? "dot" : "absent"), m: color("missed") };
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, w, h);
  // Marks differ in size as well as in color, where there is room for it.
  const gap = width >= 4 ? 1 : 0;
  const inset = width >= 6 ? { p: 0, m: 0, c: Math.floor(width / 6), ".": Math.floor(width / 3) } : { p: 0, m: 0, c: 0, ".": 0 };
  map.forEach((row, layer) => {
    for (let expert = 0; expert < row.length; expert++) {
      const mark = row[expert] === "c" && brought.has(layer * row.length + expert) ? "m" : row[expert];
      const i = inset[mark];
      pen.fillStyle = colors[mark];
      pen.fillRect(left + expert * width + i, top + layer * height + i, width - gap - 2 * i, height - 1 - 2 * i);
    }
  });
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = color("soft");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.ceil(13 / height);
  for (let layer = 0; layer < grid.layers; layer += every) {
    pen.fillText(String(model.layers[layer] ?? layer), left - 6, top + layer * height + height / 2);
  }
  const end = left + width * grid.experts;
  pen.textAlign = "left";
  pen.fillText("0", left, top / 2);
  pen.fillText("missed/s", end + 6, top / 2);
  pen.textAlign = "right";
  pen.fillText(String(grid.experts - 1), end, top / 2);
  const most = Math.max(1, ...missedNow);
  pen.fillStyle = colors.m;
  missedNow.forEach((misses, layer) => {
    if (misses > 0) pen.fillRect(end + 6, top + layer * height, Math.max(1, ((right - 8) * misses) / most), height - 1);
  });
  if (cursor) {
    pen.strokeStyle = color("text");
    pen.lineWidth = 2;
    pen.strokeRect(left + cursor[1] * width - 1, top + cursor[0] * height - 1, width + 1, height + 1);
    showCell(map);
  }
}

function showCell(map) {
  const [layer, expert] = cursor;
  const mark = map[layer]?.[expert];
  if (!mark) return;
  const where = { p: "pinned", c: "cached", ".": "not resident" }[mark];
  const missed = brought.has(layer * map[layer].length + expert) ? ", missed and brought in just now" : "";
  say("cell", `Layer ${model.layers[layer] ?? layer}, expert ${expert}: ${where}${missed}.`);
}

function showLayers(map) {
  at("layers").replaceChildren(...map.map((row, layer) => {
    const line = make("tr");
    const name = make("th", String(model.layers[layer] ?? layer));
    name.scope = "row";
    const of = (mark) => number(row.split(mark).length - 1);
    const hits = engine.hits_by_layer[layer], misses = engine.misses_by_layer[layer];
    const cells = [of("p"), of("c"), of("."), hits + misses ? percent(hits, hits + misses) : "–", number(misses), rate(missedNow[layer] ?? 0)];
    line.append(name, ...cells.map((text) => make("td", text)));
    return line;
  }));
}

function point(layer, expert) {
  if (!grid || !engine) return;
  cursor = [Math.min(grid.layers - 1, Math.max(0, layer)), Math.min(grid.experts - 1, Math.max(0, expert))];
  draw(engine.map);
}

function pointAt(event) {
  if (!grid) return;
  const layer = Math.floor((event.offsetY - grid.top) / grid.height), expert = Math.floor((event.offsetX - grid.left) / grid.width);
  if (layer >= 0 && layer < grid.layers && expert >= 0 && expert < grid.experts) point(layer, expert);
}

canvas.addEventListener("pointermove", pointAt);
canvas.addEventListener("pointerdown", pointAt);
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  const [layer, expert] = cursor ?? [0, -step[1]];
  point(layer + (cursor ? step[0] : 0), expert + step[1]);
});
at("by-layer").addEventListener("toggle", () => engine && showExperts());
window.addEventListener("resize", () => engine && showExperts());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine && showExperts());

// --- memory and settings ------------------------------------------------------------------------

let memoryShown = "";

function showMemory(plan) {
  at("memory-section").hidden = !plan.device_bytes;
  if (!plan.device_bytes || JSON.stringify(plan) === memoryShown) return;
  memoryShown = JSON.stringify(plan);
  const [unit, size] = plan.device_bytes < GIB ? ["MiB", MIB] : ["GiB", GIB];
  const show = (bytes) => number(bytes / size, 2);
  const where = plan.cap_bytes ? `of the ${show(plan.cap_bytes)} ${unit} that it may take` : "of fast memory";
  const experts = plan.experts_bytes ? `; all experts together would be ${show(plan.experts_bytes)} ${unit}` : "";
  say("memory-summary", `${show(plan.device_bytes)} ${unit} ${where}${experts}.`);
  say("memory-unit", unit);
  const parts = MEMORY.map(([key, name], i) => [name, plan[key] ?? 0, `m${i}`]).filter(([, bytes]) => bytes > 0);
  const free = Math.max(0, (plan.cap_bytes ?? 0) - plan.device_bytes);
  at("memory-bar").replaceChildren(...[...parts, ["", free, ""]].map(([, bytes, className]) => {
    const span = make("span", "", className);
    span.style.flexGrow = String(bytes / plan.device_bytes);
    return span;
  }));
  const rows = [...parts, ["together", plan.device_bytes, ""]];
  if (plan.host_bytes) rows.push(["page-locked host memory, beside it", plan.host_bytes, ""]);
  at("memory-table").tBodies[0].replaceChildren(...rows.map(([name, bytes, className]) => {
    const line = make("tr", "", name === "together" ? "sum" : "");
    const label = make("td");
    if (className) label.append(make("i", "", className));
    label.append(name);
    line.append(label, make("td", show(bytes)));
    return line;
  }));
}

function showSettings() {
  const shown = SETTINGS.filter(([key]) => model[key] !== undefined && model[key] !== null);
  at("settings-list").replaceChildren(...shown.map(([key, name]) => {
    const value = model[key];
    let text = typeof value === "number" ? number(value) : String(value);
    if (key === "residency_pct") text = `${number(value, 1)}%`;
    if (key.endsWith("_tokens")) text += " tokens";
    const pair = make("div");
    pair.append(make("dt", name), make("dd", text));
    return pair;
  }));
  at("reasons").replaceChildren(...[...(model.reasons ?? []), ...(model.warnings ?? [])].map((text) => make("li", text)));
}

// --- the connection -----------------------------------------------------------------------------

let key = "";

function askForKey(wrong) {
  const form = at("key-form");
  form.hidden = false;
  say("state", wrong ? "that key is not the right one" : "this server wants a key");
  at("key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key = at("key").value;
      at("key").value = "";
      form.hidden = true;
      say("state", "connecting");
      resolve();
    }, { once: true });
  });
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const shown = () => new Promise((resolve) => {
  if (!document.hidden) return resolve();
  document.addEventListener("visibilitychange", () => resolve(shown()), { once: true });
});

function onEvent(text) {
  let name = "", data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name === "model") onModel(JSON.parse(data));
  if (name === "sample" && model) onSample(JSON.parse(data));
}

// Follow the events until they end; whether the key was refused.
async function listen() {
  const controller = new AbortController();
  const hide = () => document.hidden && controller.abort();
  document.addEventListener("visibilitychange", hide);
  let silence = setTimeout(() => controller.abort(), SILENCE_MS), stale;
  try {
    const bytes = String.fromCharCode(...new TextEncoder().encode(key)); // a header holds bytes
    const headers = key ? { authorization: `Bearer ${bytes}` } : {};
    const response = await fetch("events", { headers, signal: controller.signal, cache: "no-store" });
    if (response.status === 401) return true;
    if (!response.ok) throw new Error(`status ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      clearTimeout(silence);
      clearTimeout(stale);
      silence = setTimeout(() => controller.abort(), SILENCE_MS);
      stale = setTimeout(() => {
        onSilence();
        say("state", "no word from the server");
      }, STALE_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      events.forEach(onEvent);
    }
  } finally {
    clearTimeout(silence);
    clearTimeout(stale);
    onSilence();
    document.removeEventListener("visibilitychange", hide);
    controller.abort();
  }
}

for (;;) {
  await shown();
  let refused = false;
  try {
    refused = await listen();
  } catch (error) {
    if (error.name !== "AbortError") console.warn(error);
  }
  if (refused) await askForKey(key !== "");
  else if (!document.hidden) {
    say("state", "no connection; trying again");
    await pause(2000);
  }
}
