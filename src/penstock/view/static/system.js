// The timeline, and the pool with its ledger.
import { ask } from "./api.js";
import { bytes, clock, h, number, percent, s, said, table, tile } from "./dom.js";

const LANES = ["engine", "agents", "graders", "trainer", "publications"];
const [ROW, LOW_ROW] = [7, 4];

export async function timelineScreen({ run, params, link }) {
  const span = Number(params.get("span")) || 120;
  const told = await ask("timeline", { run, until: params.get("until") || "", span });
  if (told.start === null) return [h("h1", null, "Timeline"), h("p", { class: "dim" }, "The run has no events.")];
  const to = (until, length) => `${link("run", run, "timeline")}?${new URLSearchParams({ until: until.toFixed(3), span: String(length) })}`;
  const bar = h("div", { class: "bar" }, told.from > told.start ? h("a", { rel: "prev", href: to(told.to - span / 2, span) }, "← earlier") : null, told.to < told.end ? h("a", { rel: "next", href: to(told.to + span / 2, span) }, "later →") : null,
    h("a", { href: to(told.to, span / 2) }, "zoom in"), h("a", { href: to(told.to, span * 2) }, "zoom out"), h("a", { href: link("run", run, "timeline") }, "newest"));
  const busy = h("div", { class: "tiles" }, Object.entries(told.busy).map(([lane, share]) => tile(`${lane} busy`, percent(share), "share of the window in which at least one was at work")));
  return [h("h1", null, "Timeline"), h("p", { class: "dim" }, `${clock(told.from)} to ${clock(told.to)}, ${number(told.to - told.from)} s. Events of the run give agents, graders, trainer and publications; recorded calls give the engine.`, told.cut ? " Only a part of this window is shown; zoom in." : ""), bar, busy,
    h("div", { class: "lanes" }, LANES.map((lane) => laneView(lane, told)))];
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
  return h("div", { class: "lane" }, h("div", null, lane, h("div", { class: "dim" }, `${spans.length}`)), s("svg", { class: "track", viewBox: `0 0 1000 ${height}`, height: Math.max(14, height), preserveAspectRatio: "none", role: "img", "aria-label": `${lane}: ${spans.length} spans` }, marks));
}

export async function poolScreen({ run, params, link }) {
  const told = await ask("pool", { run, before: params.get("before") || "" });
  const check = told.check;
  const names = [["groups", "groups"], ["groups_complete", "complete"], ["groups_leased", "leased"], ["groups_trained", "trained"], ["groups_stale", "stale"], ["groups_short", "short"], ["groups_dropped", "dropped"], ["rollouts", "rollouts"], ["steps", "calls"], ["tokens", "sampled tokens"], ["prompt_tokens", "prompt tokens"]];
  const rows = Object.entries(told.channels).map(([name, stats]) => [h("a", { href: `${link("run", run, "groups")}?channel=${encodeURIComponent(name)}` }, said(name)), number(untrained(stats)), ...names.map(([key]) => number(stats[key]))]);
  return [h("h1", null, "Pool"), h("div", { class: "tiles" }, tile("kind", told.kind), tile("size", bytes(told.bytes)), tile("changes", number(told.position)), tile("open leases", told.leases.length)),
    h("h2", null, "Channels"), table(["channel", ["not trained"], ...names.map(([, label]) => [label])], rows, { label: "channels" }),
    h("h2", null, "Exactly once"), h("p", { class: check.is_exact ? "good" : "bad" }, check.is_exact ? `The ledger has ${number(check.lines)} lines for ${number(check.trained)} trained groups, each group once.` : `The ledger has ${number(check.lines)} lines of ${number(check.groups)} groups, but ${number(check.trained)} count as trained.`), h("p", { class: "dim" }, "Checksums of all rows are compared by ", h("code", null, "penstock pool verify"), "."),
    h("h2", null, "Leases"), told.leases.length ? table(["lease", ["renewals"], ["seconds"], "groups"], told.leases.map((each) => [h("code", null, each.id), each.renewals, number(each.lease_s), each.groups.map((id) => [h("a", { href: link("run", run, "group", id) }, said(id)), " "])]), { label: "leases" }) : h("p", { class: "dim" }, "No trainer holds groups now."),
    h("h2", null, "Ledger"), told.ledger.length ? table([["line"], "group", ["version"], "lease"], told.ledger.map((each) => [each.position, h("a", { href: link("run", run, "group", each.group_id) }, said(each.group_id)), each.version, h("code", null, each.lease_id)]), { label: "ledger" }) : h("p", { class: "dim" }, "Nothing has been trained."),
    told.ledger.length >= 200 ? h("p", null, h("a", { rel: "next", href: `${link("run", run, "pool")}?before=${told.ledger.at(-1).position}` }, "earlier lines →")) : null].filter(Boolean);
}

const untrained = (stats) => stats.groups - stats.groups_trained - stats.groups_stale - stats.groups_dropped;
