// The timeline, and the pool with its ledger.
import { ask } from "./api.js";
import { chart } from "./charts.js";
import { bytes, clock, h, number, s, said, table, tile } from "./dom.js";

const LANES = { engine: "calls", agents: "rollouts", graders: "rollouts", trainer: "spans", publications: "events", idle: "gaps" };
const [ROW, LOW_ROW] = [7, 4];
const TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

export async function timelineScreen({ run, params, link }) {
  const span = Number(params.get("span")) || 120;
  const told = await ask("timeline", { run, until: params.get("until") || "", span });
  if (told.start === null) return [h("h1", null, "Timeline"), h("p", { class: "dim" }, "The run has no events.")];
  const to = (until, length) => `${link("run", run, "timeline")}?${new URLSearchParams({ until: until.toFixed(3), span: String(length) })}`;
  const bar = h("div", { class: "bar" }, told.from > told.start ? h("a", { rel: "prev", href: to(told.to - span / 2, span) }, "← earlier") : null, told.to < told.end ? h("a", { rel: "next", href: to(told.to + span / 2, span) }, "later →") : null,
    h("a", { href: to(told.to, span / 2) }, "zoom in"), h("a", { href: to(told.to, span * 2) }, "zoom out"), h("a", { href: link("run", run, "timeline") }, "newest"));
  const busy = h("div", { class: "tiles" }, Object.entries(told.busy).map(([lane, share]) => tile(BUSY[lane] || `${lane} busy`, share === null ? "–" : `${told.cut && lane !== "idle" ? "≥ " : ""}${Math.round(share * 100)} %`, "share of the window in which at least one was at work")));
  return [h("h1", null, "Timeline"), h("p", { class: "dim" }, `${clock(told.from)} to ${clock(told.to)}, ${number(told.to - told.from)} s. Events of the run give agents, graders, trainer and publications; recorded calls give the engine.`, told.cut ? " Only a part of this window is shown; zoom in." : ""), bar, busy,
    h("div", { class: "lanes" }, Object.keys(LANES).map((lane) => laneView(lane, told)), axis(told)),
    h("p", { class: "legend" }, KEYS.map(([name, text]) => h("span", null, h("i", { class: `box ${name}` }), text)))];
}

const BUSY = { idle: "engine, trainer idle" };
const KEYS = [["engine", "at work"], ["graders", "grading"], ["trainer", "update"], ["waits", "waits for groups"], ["failed", "ended without completing"], ["publications", "weights published or saved"], ["idle", "neither engine nor trainer at work"]];

// Seconds since the run began, at round places.
function axis(told) {
  const width = Math.max(1e-6, told.to - told.from);
  const each = TICKS.find((size) => width / size <= 8) || TICKS.at(-1);
  const first = Math.ceil((told.from - told.start) / each);
  const places = Array.from({ length: Math.min(20, Math.floor((told.to - told.start) / each) - first + 1) }, (_, at) => (first + at) * each);
  return h("div", { class: "lane axis" }, h("div", { class: "dim" }, "since the start"), h("div", { class: "ticks" }, places.map((place) => h("span", { class: "dim", style: { left: `${(100 * (place + told.start - told.from)) / width}%` } }, length(place, each)))));
}

function length(seconds, each) {
  const two = (value) => String(value).padStart(2, "0");
  const whole = Math.round(seconds);
  if (each < 1 || whole < 60) return `${each < 1 ? seconds.toFixed(1) : whole} s`;
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))}:${two(whole % 60)}`;
}

function laneView(lane, told) {
  const spans = told.spans.filter((span) => span.lane === lane);
  const [from, width] = [told.from, Math.max(1e-6, told.to - told.from)];
  const free = [];
  const placed = spans.map((span) => { // the first row that is free again
    const start = (Math.max(span.start, from) - from) / width, end = (Math.min(span.end ?? told.to, told.to) - from) / width;
    let row = free.findIndex((until) => until <= start);
    if (row < 0) row = free.length < 60 ? free.push(0) - 1 : 59;
    free[row] = end;
    return { span, start, end, row };
  });
  const tall = free.length > 12 ? LOW_ROW : ROW;
  const height = Math.max(1, free.length) * tall;
  const marks = placed.map(({ span, start, end, row }) => s("rect", { x: start * 1000, y: row * tall, width: Math.max(1.5, (end - start) * 1000), height: tall - 1,
    class: `span ${lane}${span.name.startsWith("waits") ? " waits" : ""}${lane === "agents" && !["agent", "completed", "null"].includes(span.name) ? " failed" : ""}` }, s("title", {}, `${span.name} ${span.about} ${number((span.end ?? told.to) - span.start)} s`)));
  return h("div", { class: "lane" }, h("div", null, lane, h("div", { class: "dim" }, `${number(spans.length)} ${LANES[lane]}`)), s("svg", { class: "track", viewBox: `0 0 1000 ${height}`, height: Math.max(14, height), preserveAspectRatio: "none", role: "img", "aria-label": `${lane}: ${spans.length} spans` }, marks));
}

export async function poolScreen({ run, params, link }) {
  const [told, curves] = await Promise.all([ask("pool", { run, before: params.get("before") || "" }), ask("metrics", { run })]);
  const check = told.check;
  const all = Object.values(told.channels);
  const sum = (key) => all.reduce((total, stats) => total + stats[key], 0);
  const train = told.channels.train;
  const names = [["groups", "groups"], ["groups_complete", "complete"], ["groups_leased", "leased"], ["groups_trained", "trained"], ["groups_stale", "stale"], ["groups_short", "short"], ["groups_dropped", "dropped"], ["rollouts", "rollouts"], ["steps", "calls"], ["tokens", "sampled tokens"], ["prompt_tokens", "prompt tokens"]];
  const rows = Object.entries(told.channels).map(([name, stats]) => [h("a", { href: `${link("run", run, "groups")}?channel=${encodeURIComponent(name)}` }, said(name)), number(untrained(stats)), ...names.map(([key]) => number(stats[key]))]);
  return [h("h1", null, "Pool"), h("div", { class: "tiles" }, tile("kind", told.kind), tile("size", bytes(told.bytes)), tile("size per call", sum("steps") ? bytes(Math.round(told.bytes / sum("steps"))) : "–"), tile("changes", number(told.position)),
      tile("wait to be trained", train ? number(waiting(train)) : "–", "complete groups of the channel train that no trainer holds"), tile("open leases", told.leases.length)),
    h("h2", null, "Channels"), table(["channel", ["not trained"], ...names.map(([, label]) => [label])], rows, { label: "channels" }),
    curves.steps.length ? [h("h2", null, "Growth"), h("div", { class: "charts" }, growth("Rollouts trained", "of all steps so far", "total_rollouts", "rollouts", curves), growth("Tokens sampled for them", "of all steps so far", "total_tokens", "tokens", curves))] : null,
    h("h2", null, "Exactly once"), h("p", { class: check.is_exact ? "good" : "bad" }, check.is_exact ? `The ledger has ${number(check.lines)} lines for ${number(check.trained)} trained groups, each group once.` : `The ledger has ${number(check.lines)} lines of ${number(check.groups)} groups, but ${number(check.trained)} count as trained.`), h("p", { class: "dim" }, "Checksums of all rows are compared by ", h("code", null, "penstock pool verify"), "."),
    h("h2", null, "Leases"), told.leases.length ? table(["lease", ["renewals"], ["seconds"], "groups"], told.leases.map((each) => [h("code", null, each.id), number(each.renewals), number(each.lease_s), each.groups.map((id) => [h("a", { href: link("run", run, "group", id) }, said(id)), " "])]), { label: "leases" }) : h("p", { class: "dim" }, "No trainer holds groups now."),
    h("h2", null, "Ledger"), told.ledger.length ? table([["line"], "group", ["version"], "lease"], told.ledger.map((each) => [each.position, h("a", { href: link("run", run, "group", each.group_id) }, said(each.group_id)), each.version, h("code", null, each.lease_id)]), { label: "ledger", slim: true }) : h("p", { class: "dim" }, "Nothing has been trained."),
    told.ledger.length >= 200 ? h("p", null, h("a", { rel: "next", href: `${link("run", run, "pool")}?before=${told.ledger.at(-1).position}` }, "earlier lines →")) : null].filter(Boolean);
}

const growth = (title, note, name, unit, { steps, columns }) => chart(title, note, [{ name: unit, xs: steps, ys: columns[name] }], { least: 0 });
const waiting = (stats) => Math.max(0, stats.groups_complete - stats.groups_leased - stats.groups_trained - stats.groups_stale - stats.groups_short - stats.groups_dropped);
const untrained = (stats) => stats.groups - stats.groups_trained - stats.groups_stale - stats.groups_dropped;
