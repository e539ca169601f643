// Curves with uPlot. Each chart says what it shows and how it is computed.
import { h, number, s, said } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LINES = ["--accent", "--accent2", "--good", "--bad", "--warn", "--dim"];
const WHOLE = [1, 2, 5].flatMap((each) => Array.from({ length: 9 }, (_, power) => each * 10 ** power)).sort((a, b) => a - b);
const sync = () => window.uPlot.sync("steps");
const recorded = (value) => value !== null && value !== undefined;
const last = (values) => values.findLast(recorded);
const AXIS_FONT = "11px system-ui, sans-serif";

// `lines`: [{name, xs, ys, low, high, points, dash}]; `low` and `high` are an interval around the curve.
// The axis reaches from `least` to `most` at least. `open` is told the step that was clicked.
export function chart(title, note, lines, { unit = "step", height = 190, least = Infinity, most = -Infinity, open = null } = {}) {
  const [holder, legend] = [h("div", { class: "plot" }), h("p", { class: "legend" })];
  const known = lines.filter((line) => line.ys && line.ys.some(recorded));
  const box = h("div", { class: "chart" }, h("h3", null, title), h("p", { class: "dim" }, note), legend, holder);
  if (!known.length) { holder.append(h("p", { class: "dim" }, "Nothing recorded yet.")); return box; }
  const xs = [...new Set(known.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, at) => [x, at]));
  const spread = (line, values) => { const out = new Array(xs.length).fill(null); line.xs.forEach((x, at) => { out[place.get(x)] = values[at] ?? null; }); return out; };
  const columns = known.map((line) => spread(line, line.ys));
  const bounds = known.map((line) => line.low && [spread(line, line.low), spread(line, line.high)]);
  // The values under the cursor, or the last ones.
  const tell = (at) => legend.replaceChildren(h("span", { class: "dim" }, `${unit} ${number(xs[at ?? xs.length - 1])}`), ...known.map((line, n) => {
    const value = at === null ? last(columns[n]) : columns[n][at];
    const [low, high] = bounds[n] && at !== null ? [bounds[n][0][at], bounds[n][1][at]] : [];
    return h("span", null, h("i", { class: line.points ? "ring" : line.dash ? "dash" : null, style: { color: `var(${LINES[n % LINES.length]})` } }), said(line.name), " ", h("b", null, number(value)), recorded(low) ? h("span", { class: "dim" }, ` ${number(low)} to ${number(high)}`) : null);
  }));
  tell(null);
  requestAnimationFrame(() => { if (holder.isConnected) draw({ title, height, least, most, open, holder, known, xs, columns, bounds, tell }); });
  return box;
}

function draw({ title, height, least, most, open, holder, known, xs, columns, bounds, tell }) {
  const data = [xs], series = [{}], bands = [];
  known.forEach((line, at) => {
    const stroke = colour(LINES[at % LINES.length]);
    data.push(columns[at]);
    series.push({ stroke, width: line.points ? 0 : 2, dash: line.dash, spanGaps: true, points: { show: Boolean(line.points) || (line.xs.length < 40 && !line.dash), size: line.points ? 9 : 5, stroke, fill: line.points ? colour("--raised") : stroke } });
    if (!bounds[at]) return;
    data.push(bounds[at][1], bounds[at][0]);
    series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
    bands.push({ series: [data.length - 2, data.length - 1], fill: `${stroke}33` });
  });
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: AXIS_FONT, gap: 6 };
  const told = (tick) => (tick === 0 ? "0" : Math.abs(tick) < 1e-3 ? Number(tick.toPrecision(3)).toExponential() : number(tick));
  const plot = new window.uPlot({ width: Math.max(240, holder.clientWidth || 360), height, series, bands,
    scales: { x: { time: false }, y: { range: (_, low, high) => window.uPlot.rangeNum(Math.min(low, least), Math.max(high, most), 0.1, true) } },
    axes: [{ ...axis, grid: { show: false }, incrs: WHOLE, space: 40, size: 28 },
      { ...axis, space: 32, values: (_, ticks) => ticks.map(told), size: (_, texts) => 14 + 6.5 * Math.max(3, ...(texts || []).map((text) => text.length)) }],
    padding: [10, 14, 0, 0], cursor: { sync: { key: sync().key }, y: false }, legend: { show: false }, hooks: { setCursor: [(self) => tell(self.cursor.idx ?? null)] } }, data, holder);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", `${title}: ${known.map((line) => `${line.name} from ${number(line.ys.find(recorded))} to ${number(last(line.ys))}`).join(", ")}`);
  if (open) opens(plot, xs, open);
}

// A click opens the step below it; a drag zooms in.
function opens(plot, xs, open) {
  let from = 0;
  plot.over.addEventListener("mousedown", (event) => { from = event.clientX; });
  plot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - from) < 4 && recorded(plot.cursor.idx)) open(xs[plot.cursor.idx]); });
}

export function spark(values) {
  if (!values || values.length < 2) return h("span", { class: "dim" }, "–");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${(at / (values.length - 1)) * 114 + 2},${22 - (high > low ? (value - low) / (high - low) : 0.5) * 19}`);
  const [x, y] = points.at(-1).split(",");
  return s("svg", { class: "spark", viewBox: "0 0 120 26", role: "img", "aria-label": `reward from ${number(values[0])} to ${number(values.at(-1))}` },
    s("polygon", { points: `2,25 ${points.join(" ")} 116,25` }), s("polyline", { points: points.join(" ") }), s("circle", { cx: x, cy: y, r: 2.5 }));
}
