// Rates, from totals that are told about once a second. A rate is a mean over a window that ends now: where nothing is
// counted, or nothing is told, for as long as the window, it is 0. Where nothing is known of a time it is null.

const GAP_S = 5; // a longer time between two samples was not watched: the computer slept, say

export class Counters {
  constructor(longest_s) {
    this.longest_s = longest_s;
    this.forget();
  }

  // Begin again: what is told next has nothing before it.
  forget() {
    this.told = []; // totals, each with its time_s
    this.now_s = null;
  }

  // What a sample says; totals: null where it says nothing of them, whose time counts all the same.
  take(time_s, totals) {
    if (this.now_s !== null && !(time_s >= this.now_s && time_s - this.now_s <= GAP_S)) this.forget();
    this.now_s = time_s;
    if (totals === null) return;
    this.told.push({ time_s, ...totals });
    while (this.told.length > 1 && this.told[1].time_s <= time_s - this.longest_s) this.told.shift();
  }

  // What was counted within the window, and the seconds in which it was; null where that is not known.
  over(window_s, total) {
    const last = this.told.at(-1);
    if (!last) return null;
    let i = this.told.length - 1;
    while (i > 0 && this.told[i].time_s > this.now_s - window_s) i--;
    const first = this.told[i], seconds = this.now_s - first.time_s;
    return seconds > 0 ? { counted: Math.max(0, total(last) - total(first)), seconds } : null;
  }

  // A second, over a window.
  rate(window_s, total) {
    const found = this.over(window_s, total);
    return found && found.counted / found.seconds;
  }
}

// Draw a line through values, {time_s, value}; the last is at the right edge. It breaks where a value is null.
export function line(path, values, shortest_s) {
  const known = values.filter(({ value }) => value !== null);
  const top = Math.max(1e-9, ...known.map(({ value }) => value));
  const end = values.at(-1)?.time_s ?? 0;
  const seconds = Math.max(shortest_s, end - (values[0]?.time_s ?? 0));
  let pen = "M", drawn = "";
  for (const { time_s, value } of values) {
    if (value === null) {
      pen = "M";
      continue;
    }
    drawn += `${pen}${(120 - (120 * (end - time_s)) / seconds).toFixed(1)},${(28 - (26 * value) / top).toFixed(1)}`;
    pen = "L";
  }
  path.setAttribute("d", drawn);
}
