// The page at /: follows /events and shows what they say. Counters are totals, so rates are differences of samples.
// The events are read with fetch, since EventSource cannot send the key, which is kept in this module alone.

const HISTORY_S = 120;
const RATE_S = { written: 3, read: 10 }; // rates are means of that long; what was read is counted more coarsely
const HITS_S = 10;
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
  ["chunk_tokens", "prefill step"],
  ["kv_type", "KV cache"],
];

const at = (id) => document.getElementById(id);
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const rate = (value) => number(value, value > 0 && value < 10 ? 1 : 0);
const percent = (part, whole, digits = 1) => `${number((100 * part) / whole, digits)}%`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

function say(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text; // or a screen reader would say it again
}

function make(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

// --- what is known ------------------------------------------------------------------------------

let model = null;
let samples = []; // the counters of the last HISTORY_S
let engine = null; // its counters, when it last said them
let brought = new Set(); // experts that were missed and brought in since its answer before, layer * width + expert
let missedNow = []; // misses a second of each layer since then
let engineTime = 0;

function onModel(given) {
  model = given;
  samples = [];
  engine = null;
  brought = new Set();
  missedNow = [];
  at("main").hidden = false;
  say("name", model.name);
  document.title = `${model.name} · Spark`;
  showSettings();
}

function onSample(sample) {
  if (sample.engine) {
    const { hits, misses, tokens } = sample.engine;
    samples.push({ time_s: sample.time_s, hits, misses, tokens });
    while (samples[0].time_s < sample.time_s - HISTORY_S) samples.shift();
    follow(sample.engine, sample.time_s);
  }
  showState(sample);
  showFigures(sample);
  if (!engine) return;
  showExperts();
  showMemory(engine.plan ?? {});
}

function follow(now, time) {
  const last = engine;
  engine = now;
  const map = now.map ?? [];
  if (last && map.length === (last.map ?? []).length) {
    const seconds = Math.max(0.001, time - engineTime);
    missedNow = now.misses_by_layer.map((misses, layer) => Math.max(0, misses - last.misses_by_layer[layer]) / seconds);
    brought.clear();
    map.forEach((row, layer) => {
      if (row === last.map[layer]) return;
      for (let expert = 0; expert < row.length; expert++) {
        if (row[expert] === "c" && last.map[layer][expert] === ".") brought.add(layer * row.length + expert);
      }
    });
  }
  engineTime = time;
}

// The sample that lies so many seconds before another, or the first.
function before(end, seconds) {
  let start = end;
  while (start > 0 && samples[end].time_s - samples[start].time_s < seconds) start--;
  return samples[start];
}

// Tokens a second of a kind, at a sample.
function growth(kind, end) {
  const last = samples[end], first = before(end, RATE_S[kind]);
  return last === first ? 0 : (last.tokens[kind] - first.tokens[kind]) / (last.time_s - first.time_s);
}

// --- figures ------------------------------------------------------------------------------------

function showState(sample) {
  let text = "idle";
  if (!sample.up) text = "the daemon is down; the next request starts it";
  else if (!sample.engine) text = "in a long step";
  else if (sample.replies) text = "working";
  if (sample.restarts) text += `, restarted ${count(sample.restarts, "time")}`;
  say("state", text);
}

function graph(id, values) {
  const top = Math.max(1e-9, ...values);
  const step = 120 / Math.max(30, values.length - 1);
  const points = values.map((value, i) => `${(120 - step * (values.length - 1 - i)).toFixed(1)},${(28 - (26 * value) / top).toFixed(1)}`);
  at(id).firstElementChild.setAttribute("points", points.join(" "));
}

function showFigures(sample) {
  say("replies", number(sample.replies));
  if (!engine) return;
  if (engine.tokens) {
    for (const kind of ["written", "read"]) {
      say(kind, rate(growth(kind, samples.length - 1)));
      graph(`${kind}-graph`, samples.map((_, i) => growth(kind, i)));
    }
    say("written-more", `${number(engine.tokens.written)} since the start`);
    say("read-more", `${number(engine.tokens.read)} computed, ${number(engine.tokens.reused)} reused`);
  }
  say("queue", `${number(engine.running ?? 0)} at work, ${number(engine.queued ?? 0)} waiting`);
  const blocks = engine.kv_blocks;
  if (blocks?.total) {
    const used = blocks.total - blocks.free;
    say("kv", percent(used, blocks.total, 0));
    say("kv-more", `${number(used)} of ${count(blocks.total, "block")}, prefixes included`);
    const meter = at("kv-meter");
    meter.setAttribute("aria-valuenow", String(Math.round((100 * used) / blocks.total)));
    meter.firstElementChild.style.width = percent(used, blocks.total, 1);
  }
  const prefix = engine.prefixes;
  at("prefix-figure").hidden = !prefix;
  if (prefix) {
    say("prefix", number((prefix.device_chunks + prefix.host_chunks) * prefix.chunk_tokens));
    const parts = [`${number(prefix.host_bytes / MIB)} MiB of host memory`, `${count(prefix.snapshots, "snapshot")}`];
    if (prefix.file_bytes) parts.push(`${number(prefix.file_bytes / MIB)} MiB of files`);
    say("prefix-more", parts.join(", "));
  }
}

function showHits() {
  const rates = samples.map((last, i) => {
    const first = before(i, HITS_S);
    const hits = last.hits - first.hits, all = hits + last.misses - first.misses;
    return all > 0 ? hits / all : null;
  });
  const known = rates.filter((value) => value !== null);
  graph("hits-graph", known);
  const now = rates.at(-1) ?? null;
  const all = engine.hits + engine.misses;
  say("hits", now !== null ? `${number(100 * now, 1)}%` : all ? percent(engine.hits, all) : "–");
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
  const map = engine.map ?? [];
  const some = map.length > 0 && map[0].length > 0;
  at("hits-figure").hidden = !some;
  at("by-layer").hidden = at("map-frame").hidden = at("cell").hidden = !some;
  document.querySelector(".legend").hidden = !some;
  if (!some) {
    say("map-summary", "This model has no experts: all of it is resident.");
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
