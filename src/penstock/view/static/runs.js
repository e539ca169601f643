// The list of runs, and the screen of one run.
import { ask } from "./api.js";
import { chart, spark } from "./charts.js";
import { ago, badge, h, number, percent, said, table, tile, tint } from "./dom.js";

export async function runsScreen({ params, link }) {
  const told = await ask("runs");
  const chosen = new Set((params.get("over") || "").split(",").filter(Boolean));
  const [wanted, status] = [(params.get("find") || "").toLowerCase(), params.get("status") || ""];
  const shown = told.runs.filter((run) => (!status || run.status === status) && `${run.id} ${run.model} ${run.kind}`.toLowerCase().includes(wanted));
  const set = (changes) => { const next = new URLSearchParams(params); for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key); location.hash = `#/runs?${next}`; };
  const toggle = (id, on) => { on ? chosen.add(id) : chosen.delete(id); set({ over: [...chosen].slice(0, 6).join(",") }); };
  const find = h("input", { type: "search", id: "filter", value: params.get("find") || "", placeholder: "filter by name or model", "aria-label": "Filter runs", onchange: (event) => set({ find: event.target.value }) });
  const states = ["", ...new Set(told.runs.map((run) => run.status))];
  const pick = h("select", { id: "status", "aria-label": "Status", onchange: (event) => set({ status: event.target.value }) }, states.map((each) => h("option", { value: each, selected: each === status }, each || "every status")));
  const rows = shown.map((run) => [
    h("input", { type: "checkbox", "aria-label": `lay ${run.id} over others`, checked: chosen.has(run.id), onchange: (event) => toggle(run.id, event.target.checked) }),
    h("a", { href: link("run", run.id) }, said(run.id.endsWith(run.name) ? run.id : run.name)), run.kind, badge(run.status), said(run.model), spark(run.spark),
    run.reward === null ? "–" : run.first_reward === null ? number(run.reward) : `${number(run.first_reward)} → ${number(run.reward)}`,
    run.step === null ? "–" : `${run.step} / ${run.steps ?? "?"}`, run.alarms ? h("span", { class: "warn" }, number(run.alarms)) : "", ago(told.now - run.changed)]);
  const list = rows.length ? table(["", "run", "kind", "status", "model", "reward", ["first → last"], ["step"], ["alarms"], ["changed"]], rows, { label: "runs" })
    : h("p", null, told.runs.length ? "No run matches." : "There is no run here yet. Start one with ", told.runs.length ? null : h("code", null, "penstock train"));
  return [h("h1", null, "Runs"), h("div", { class: "bar" }, find, pick, h("span", { class: "dim" }, `${shown.length} of ${told.runs.length}`, told.runs.length > 1 && !chosen.size ? " · tick runs to lay their curves over each other" : "")), await overlay([...chosen]), list,
    told.unreadable.length ? h("details", null, h("summary", { class: "warn" }, `${told.unreadable.length} cannot be read`), h("pre", { tabindex: "0" }, told.unreadable.join("\n"))) : null].filter(Boolean);
}

async function overlay(ids) {
  if (!ids.length) return null;
  const found = await Promise.all(ids.map((run) => ask("metrics", { run }).catch(() => null)));
  const lines = (name) => found.flatMap((each, at) => (each ? [{ name: ids[at], xs: each.steps, ys: each.columns[name] }] : []));
  return h("div", { class: "charts" }, chart("Mean reward", "of the rollouts of each step", lines("reward"), { least: 0 }), chart("Entropy", "mean over trained tokens, in nats", lines("entropy"), { least: 0 }), chart("Length", "sampled tokens per rollout", lines("length")));
}

export async function runScreen({ run, link }) {
  const [told, curves] = await Promise.all([ask("run", { run }), ask("metrics", { run })]);
  const head = [h("h1", null, said(told.name), " ", badge(told.status)), h("p", { class: "dim" }, `${told.kind} · `, said(told.model), told.step === null ? "" : ` · step ${told.step} of ${told.steps ?? "?"}`, ` · pool ${told.pool}`)];
  const parts = [...head, h("div", { class: "tiles" }, tiles(told))];
  if (told.damaged) parts.push(h("p", { class: "bad" }, `${told.damaged} lines of metrics.jsonl are damaged and left out.`));
  if (told.no_pool) parts.push(h("p", { class: "warn" }, told.no_pool));
  if (curves.steps.length) parts.push(h("h2", null, "Steps"), strip(run, curves, link), charts(told, curves, (step) => { location.hash = link("run", run, "step", step); }));
  else if (told.kind === "train") parts.push(h("p", { class: "dim" }, "No step has been trained yet."));
  parts.push(lost(run, told, link), alarms(run, told, link),
    h("details", null, h("summary", null, "Config and summary"), h("pre", { tabindex: "0" }, JSON.stringify(told.config, null, 2)), h("pre", { tabindex: "0" }, JSON.stringify(told.summary, null, 2))));
  return parts;
}

function tiles(told) {
  const [tokens, stats, held] = [told.tokens, told.stats, told.heldout.filter((each) => each.reward !== null)];
  return [
    tile("reward, first → last", told.reward === null ? "–" : `${told.first_reward === null ? "" : `${number(told.first_reward, 2)} → `}${number(told.reward, 2)}`),
    tile("held-out", held.length ? `${number(held[0].reward, 2)} → ${number(held.at(-1).reward, 2)}` : "–"),
    tile("exact tokens", percent(tokens.sampled_tokens ? tokens.exact_tokens / tokens.sampled_tokens : null), "share of sampled tokens that are trained under the context they were sampled under"),
    tile("rollouts", number(stats.rollouts)), tile("model calls", number(stats.steps)), tile("sampled tokens", number(stats.tokens)),
    tile("groups trained", told.train.groups ? [`${number(told.train.groups_trained)} of ${number(told.train.groups)}`, told.train.groups_leased ? h("span", { class: "dim" }, `${number(told.train.groups_leased)} more wait for a checkpoint`) : null] : "–", "in the ledger, which is written with a checkpoint")];
}

const STRIP = 400;
const PART = "components/";
const ROUNDING = 1e-5; // differences below it are float32 rounding, and are drawn as a flat line
function strip(run, curves, link) {
  const rewards = curves.columns.reward;
  const [low, high] = [Math.min(0, ...rewards.filter((each) => each !== null)), Math.max(1, ...rewards.filter((each) => each !== null))];
  const from = Math.max(0, curves.steps.length - STRIP);
  const cells = curves.steps.slice(from).map((step, at) => h("a", { href: link("run", run, "step", step), style: { background: tint(rewards[from + at], low, high) }, title: `step ${step}: reward ${number(rewards[from + at])}`, "aria-label": `step ${step}, reward ${number(rewards[from + at])}` }, step));
  return h("div", null, h("p", { class: "dim" }, "Each cell is a step, coloured by its mean reward; it opens the groups that it trained.", from ? ` The last ${STRIP} are shown; go to others by number.` : "", curves.stride > 1 ? ` Every ${curves.stride}th step is shown.` : ""), h("div", { class: "strip" }, cells));
}

function charts(told, { steps, columns }, open) {
  const line = (name, label, more) => ({ name: label || name, xs: steps, ys: columns[name], ...more });
  const around = (sign) => columns.reward.map((value, at) => (value === null || columns.margin[at] === null ? null : value + sign * columns.margin[at]));
  const held = told.heldout.filter((each) => each.reward !== null);
  const before = held.find((each) => each.when === "before");
  const reward = [line("reward", "training", { low: around(-1), high: around(1) })];
  if (held.length) reward.push({ name: "held-out", xs: held.map((each) => each.step), ys: held.map((each) => each.reward), points: true });
  if (before && steps.length) reward.push({ name: "control: start policy", xs: [steps[0], steps.at(-1)], ys: [before.reward, before.reward], dash: [6, 4] });
  const parts = Object.keys(columns).filter((name) => name.startsWith(PART));
  const drawn = (title, note, lines, more) => chart(title, note, lines, { open, ...more });
  return h("div", { class: "charts" },
    drawn("Reward", "mean over the step's graded rollouts; band: 1.96 standard errors; rings: held-out; dashed: the start policy on held-out tasks", reward, { least: 0 }),
    ...(parts.length ? [drawn("Parts of the reward", "mean over the step's graded rollouts, by the names that the grader gives", parts.map((name) => line(name, name.slice(PART.length))), { least: 0 })] : []),
    drawn("Entropy", "mean over trained tokens, in nats", [line("entropy")], { least: 0 }),
    drawn("KL", "between the sampling policy and the trained one, in nats; to the start policy where train.kl > 0", [line("kl_behaviour", "to the sampling policy"), ...(told.config.train && told.config.train.kl > 0 ? [line("kl_reference", "to the start policy")] : [])], { least: -ROUNDING, most: ROUNDING }),
    drawn("Length", "sampled tokens per rollout", [line("length", "tokens")]),
    drawn("Log-probability gap", "largest difference between engine and trainer for a trained token, in nats", [line("logprob_gap", "gap")], { least: 0, most: ROUNDING }),
    drawn("Staleness", "versions that trained tokens were behind", [line("staleness", "mean"), line("staleness_max", "most")], { least: 0, most: 1 }),
    drawn("Seconds by phase", "waiting for rollouts, and the update with its publication", [line("rollout_s", "rollouts"), line("train_s", "update")], { least: 0 }),
    drawn("Groups without signal", "groups whose rewards are all the same, of those in the step", [line("groups_equal", "equal"), line("groups", "all")], { least: 0 }),
    drawn("Gradient norm and loss", "norm before clipping", [line("grad_norm", "norm"), line("loss")]));
}

function lost(run, told, link) {
  const names = { ends: "rollouts that did not complete", drops: "groups dropped", masked: "calls not trained", inexact: "tokens not exact", breaks: "breaks: messages rendered anew", notices: "calls not done as asked" };
  const about = (kind, name, count) => (kind === "ends" ? h("a", { href: link("run", run, "ended", name) }, number(count)) : kind === "drops" ? h("a", { href: `${link("run", run, "groups")}?state=${name === "stale" ? "stale" : "dropped"}` }, number(count)) : number(count));
  const rows = Object.entries(told.lost).flatMap(([kind, counts]) => Object.entries(counts).map(([name, count]) => [names[kind], said(name), said(told.reasons[kind][name] || ""), about(kind, name, count)]));
  return h("section", { id: "lost" }, h("h2", null, "What was lost and why"), rows.length ? table(["what", "reason", "meaning", ["count"]], rows, { label: "what was lost" }) : h("p", { class: "dim" }, "Nothing: every rollout completed, and every graded token was trained under its own context."));
}

function alarms(run, told, link) {
  if (!told.alarm_counts.length) return null;
  const about = (alarm) => (typeof alarm.about === "string" && alarm.about ? h("a", { href: link("run", run, alarm.about.split(".").length > 2 ? "rollout" : "group", alarm.about) }, said(alarm.about)) : alarm.about || "");
  return h("section", null, h("h2", null, "Alarms"), table(["what", ["count"]], told.alarm_counts.map((each) => [each.text, each.count]), { label: "alarms" }),
    h("details", null, h("summary", null, "The newest ones"), table(["when", "what", "about", "text"], told.alarm_list.map((each) => [new Date(each.time * 1000).toLocaleString("en-GB"), each.kind, about(each), said(each.text)]), { label: "newest alarms" })));
}
