// Builds elements. Text only ever becomes text: nothing here parses HTML.
export function h(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) made.style.setProperty(key, item);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

export function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(shown(String(child))));
  }
}

// Marks that turn the direction of what follows are shown as escapes: a text could end the isolation that CSS gives it.
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;
const shown = (text) => text.replace(TURNS, (mark) => `\\u${mark.charCodeAt(0).toString(16)}`);

const SVG = "http://www.w3.org/2000/svg";
export function s(tag, props, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props || {})) made.setAttribute(name, String(value));
  append(made, children);
  return made;
}

// A text that somebody else wrote: isolated, so that its direction marks reach nothing around it.
export const said = (text, props) => h("span", { class: "text", ...props }, text ?? "");

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) < 1e-3) return value.toExponential(digits - 1);
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.floor(share * 10000) / 100} %`);

export function age(seconds) {
  if (!(seconds >= 0)) return "–";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

export const ago = (seconds) => (seconds >= 0 ? `${age(seconds)} ago` : "–");

export const signed = (value, digits) => `${value > 0 ? "+" : ""}${number(value, digits)}`;

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return `${count} B`;
}

export function table(names, rows, props) {
  const head = names.map((name) => (typeof name === "string" ? h("th", { scope: "col" }, name) : h("th", { scope: "col", class: "num" }, name[0])));
  const numeric = names.map((name) => typeof name !== "string");
  const body = rows.map((row) => h("tr", { class: "pick" }, row.map((cell, at) => h("td", { class: numeric[at] ? "num" : null }, cell))));
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": (props && props.label) || "table" },
    h("table", { class: props && props.slim ? "slim" : null }, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

export const tile = (name, value, title) => h("div", { class: "tile", title }, h("span", { class: "dim" }, name), h("b", null, value));

export const badge = (status) => h("span", { class: `badge ${status}` }, status || "unknown");

// A reward as a colour: orange for low, blue for high, which colour-blind people can tell apart. The number stands beside it.
export function tint(value, low, high) {
  if (value === null || value === undefined || !(high > low)) return "transparent";
  const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
  const [strength, hue] = [Math.abs(share - 0.5) * 2, share >= 0.5 ? "11 92 173" : "214 100 20"];
  return `rgb(${hue} / ${(0.06 + 0.4 * strength).toFixed(3)})`;
}

// The same for a quantity with one notable end: nothing at `low`, orange at `high`.
export function heat(value, low, high) {
  if (value === null || value === undefined) return "transparent";
  const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
  return `rgb(214 100 20 / ${(0.55 * share).toFixed(3)})`;
}
