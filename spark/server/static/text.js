// What the page's modules say things with. Text is set as text, never as markup.

export const at = (id) => document.getElementById(id);
export const number = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
export const rate = (value) => (value === null ? "–" : number(value, value > 0 && value < 9.95 ? 1 : 0));
export const percent = (part, whole, digits = 1) => `${number((100 * part) / whole, digits)}%`;
export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

// 12 s, 3 min 5 s, 2 h 3 min.
export function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${number(Math.floor(s / 3600))} h ${Math.floor((s % 3600) / 60)} min`;
}

export function set(element, text) {
  if (element.textContent !== text) element.textContent = text; // or a screen reader would say it again
}

export const say = (id, text) => set(at(id), text);

export function make(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}
