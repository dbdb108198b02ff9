// The list of requests: those that are open, and how the last ones ended. Rows stay where they are while their text
// changes, so that whoever reads them with a screen reader keeps his place.

import { Counters } from "./rates.js";
import { at, duration, make, number, percent, rate, say, set } from "./text.js";

const RATE_S = 3;
const ENDS = {
  stop: "done",
  tool_calls: "done: calls a tool",
  length: "cut off at its limit",
  left: "its client left",
  cancelled: "cut off by the server's end",
  context_overflow: "refused: too long for the context",
  bad_request: "refused",
  capacity: "failed: too little memory",
  numerical: "failed: a result was not finite",
  device_lost: "failed: the GPU was lost",
  daemon: "failed: the daemon died",
  deadline: "failed: a deadline passed",
};

const written = new Map(); // Counters of the open ones, by their number
const rows = new Map(); // their lines, and those of the ended ones

export function forgetRequests() {
  written.clear();
}

function speed(row, time_s) {
  if (row.state === "ended") {
    written.delete(row.number);
    return row.written > 1 && row.writing_s > 0 ? (row.written - 1) / row.writing_s : null;
  }
  if (row.state !== "writing") return null;
  if (!written.has(row.number)) written.set(row.number, new Counters(RATE_S));
  const counters = written.get(row.number);
  counters.take(time_s, { tokens: row.written });
  return counters.rate(RATE_S, ({ tokens }) => tokens);
}

function state(row) {
  if (row.state === "reading") return `reading ${percent(row.read, Math.max(1, row.prompt), 0)}`;
  if (row.state !== "ended") return row.state;
  return `${ENDS[row.end] ?? "failed"}, ${duration(row.ended_s)} ago`;
}

function fill(row, time_s) {
  let tr = rows.get(row.number);
  if (!tr) {
    tr = make("tr");
    const name = make("th");
    name.scope = "row";
    tr.append(name, ...Array.from({ length: 7 }, () => make("td")));
    rows.set(row.number, tr);
  }
  const api = row.choices > 1 ? `${row.api}, ${row.choices} choices` : row.api;
  const known = row.prompt === null ? "–" : number(row.prompt);
  const texts = [
    String(row.number), api, duration(row.age_s), known, number(row.reused), number(row.written),
    rate(speed(row, time_s)), state(row),
  ];
  texts.forEach((text, i) => set(tr.cells[i], text));
  return tr;
}

// Have a part of the table hold these lines in this order, moving none that is there already.
function arrange(body, lines) {
  const wanted = new Set(lines);
  for (const tr of [...body.rows]) if (!wanted.has(tr)) tr.remove();
  lines.forEach((tr, i) => {
    if (body.rows[i] !== tr) body.insertBefore(tr, body.rows[i] ?? null);
  });
}

export function showRequests(given, time_s) {
  const open = given.open.map((row) => fill(row, time_s));
  const ended = given.ended.map((row) => fill(row, time_s));
  arrange(at("open-requests"), open);
  arrange(at("ended-requests"), ended);
  const shown = new Set([...given.open, ...given.ended].map((row) => row.number));
  for (const known of [rows, written]) for (const key of known.keys()) if (!shown.has(key)) known.delete(key);
  at("requests-table").hidden = shown.size === 0;
  say("requests-more", given.more ? `and ${number(given.more)} more waiting` : "");
  const of = (state) => given.open.filter((row) => row.state === state).length + (state === "waiting" ? given.more : 0);
  const states = ["writing", "reading", "waiting"].filter(of).map((state) => `${number(of(state))} ${state}`);
  const all = given.open.length + given.more;
  if (all) say("requests-summary", `${number(all)} open: ${states.join(", ")}.`);
  else say("requests-summary", shown.size ? "None is open." : "None yet.");
}
