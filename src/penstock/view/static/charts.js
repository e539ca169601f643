// Curves with uPlot. Each chart says what it shows and how it is computed.
import { h, number, s } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LINES = ["--accent", "--accent2", "--good", "--bad", "--warn", "--dim"];
const sync = () => window.uPlot.sync("steps");

// `lines`: [{name, xs, ys, low, high, points, dash}]; `low` and `high` are an interval around the curve.
export function chart(title, note, lines, { unit = "step", height = 180 } = {}) {
  const holder = h("div", { class: "plot" });
  const known = lines.filter((line) => line.ys.some((value) => value !== null && value !== undefined));
  const box = h("div", { class: "chart" }, h("h3", null, title), h("p", { class: "dim" }, note), holder);
  if (!known.length) { holder.append(h("p", { class: "dim" }, "Nothing recorded yet.")); return box; }
  const xs = [...new Set(known.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, at) => [x, at]));
  const spread = (line, values) => { const out = new Array(xs.length).fill(null); line.xs.forEach((x, at) => { out[place.get(x)] = values[at] ?? null; }); return out; };
  const data = [xs], series = [{ label: unit }], bands = [];
  known.forEach((line, at) => {
    const stroke = colour(LINES[at % LINES.length]);
    data.push(spread(line, line.ys));
    series.push({ label: line.name, stroke, width: line.points ? 0 : 2, dash: line.dash, spanGaps: true,
      points: { show: Boolean(line.points) || line.xs.length < 40, size: line.points ? 9 : 5, stroke, fill: line.points ? colour("--back") : stroke }, value: (_, value) => number(value) });
    if (line.low) {
      data.push(spread(line, line.high), spread(line, line.low));
      series.push({ label: "high", stroke: "transparent", value: (_, value) => number(value), points: { show: false } },
        { label: "low", stroke: "transparent", value: (_, value) => number(value), points: { show: false } });
      bands.push({ series: [data.length - 2, data.length - 1], fill: stroke.startsWith("#") ? `${stroke}33` : stroke });
    }
  });
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "11px system-ui" };
  const draw = () => {
    holder.replaceChildren();
    const plot = new window.uPlot({ width: Math.max(240, holder.clientWidth || 360), height, series, bands, scales: { x: { time: false } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "0" : Math.abs(tick) < 1e-3 ? tick.toExponential(0) : number(tick))) }],
      cursor: { sync: { key: sync().key } }, legend: { live: true, markers: { width: 0, fill: (_, at) => series[at].stroke || "transparent" } } }, data, holder);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", `${title}: ${known.map((line) => `${line.name} from ${number(first(line.ys))} to ${number(first([...line.ys].reverse()))}`).join(", ")}`);
  };
  requestAnimationFrame(() => { if (holder.isConnected) draw(); });
  return box;
}

const first = (values) => values.find((value) => value !== null && value !== undefined);

export function spark(values) {
  if (!values || values.length < 2) return h("span", { class: "dim" }, "–");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${(at / (values.length - 1)) * 118 + 1},${24 - (high > low ? (value - low) / (high - low) : 0.5) * 22}`);
  return s("svg", { class: "spark", viewBox: "0 0 120 26", role: "img", "aria-label": `reward from ${number(values[0])} to ${number(values.at(-1))}` }, s("polyline", { points: points.join(" ") }));
}
