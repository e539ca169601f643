// Groups, one group, one rollout with its conversation, and the exact request of a call.
import { ask } from "./api.js";
import { badge, clock, h, number, said, table, tile, tint } from "./dom.js";

const MOST_CREDITS = 12;
const PREVIEW = 100; // characters of a folded text
// The advantage of a call: one number, or the mean of its tokens' with the least and the largest.
const range = (each) => (each.low === each.high ? number(each.mean) : `${number(each.mean)} (${number(each.low)} to ${number(each.high)})`);
const REWARD_TITLE = "reward; opens the rollout";

export function rewardCells(run, rollouts, link) {
  const known = rollouts.map((each) => each.reward).filter((each) => each !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(1, ...known)];
  return h("div", { class: "rewards" }, rollouts.map((each) => h("a", { href: link("run", run, "rollout", each.id), title: `${each.id}: ${each.end || "running"}; ${REWARD_TITLE}`, style: { background: tint(each.reward, low, high) }, class: each.end && each.end !== "completed" ? "bad" : null },
    each.reward === null ? each.end || "…" : number(each.reward))));
}

function groupsTable(run, groups, link) {
  const rows = groups.map((group) => [h("a", { href: link("run", run, "group", group.id) }, said(group.id)), group.state, said(group.prompt), rewardCells(run, group.rollouts, link),
    Object.keys(group.damaged).length ? h("span", { class: "bad" }, `${Object.keys(group.damaged).length} damaged`) : number(group.rollouts.reduce((sum, each) => sum + each.tokens, 0))]);
  return table(["group", "state", "task", "rewards", ["tokens"]], rows, { label: "groups" });
}

export async function stepScreen({ run, rest, link }) {
  const step = Number(rest[0]);
  const told = await ask("step", { run, step });
  const m = told.metrics;
  const around = h("p", { class: "bar" }, step > 1 ? h("a", { rel: "prev", href: link("run", run, "step", step - 1) }, "← previous step") : null, told.last ? null : h("a", { rel: "next", href: link("run", run, "step", step + 1) }, "next step →"));
  const shown = [["reward", m.reward], ["version", m.version], ["rollouts", m.rollouts], ["trained tokens", m.trained_tokens], ["entropy", m.entropy], ["KL", m.kl_behaviour], ["log-prob. gap", m.logprob_gap], ["staleness", m.staleness], ["groups without signal", m.groups_equal], ["seconds", (m.rollout_s ?? 0) + (m.train_s ?? 0)]];
  return [h("h1", null, `Step ${step}`), around, h("div", { class: "tiles" }, shown.filter(([, value]) => value !== undefined).map(([name, value]) => tile(name, number(value)))), h("h2", null, "Groups that it trained"), groupsTable(run, told.groups, link),
    h("details", null, h("summary", null, "All its numbers"), h("pre", { tabindex: "0" }, JSON.stringify(m, null, 2)))];
}

export async function groupsScreen({ run, params, link }) {
  const [channel, state, before] = [params.get("channel") || "", params.get("state") || "", params.get("before") || ""];
  const overview = await ask("run", { run });
  const channels = overview.channels.length ? overview.channels : ["train"];
  const chosen = channel || (channels.includes("train") ? "train" : channels[0]);
  const told = await ask("groups", { run, channel: chosen, state, before });
  const set = (changes) => { const next = new URLSearchParams({ channel: chosen, state, ...changes }); location.hash = `${link("run", run, "groups")}?${next}`; };
  const pick = (id, label, all, now, any) => h("select", { id, "aria-label": label, onchange: (event) => set({ [id]: event.target.value }) }, all.map((each) => h("option", { value: each, selected: each === now }, each || any)));
  const states = ["", "open", "complete", "leased", "trained", "short", "stale", "dropped"];
  const least = h("input", { type: "number", step: "any", id: "least", placeholder: "reward at most", "aria-label": "Only groups with a reward of at most", value: params.get("least") || "", onchange: (event) => set({ least: event.target.value, before }) });
  const limit = params.get("least") ? Number(params.get("least")) : null;
  const groups = told.groups.filter((group) => limit === null || group.rollouts.some((each) => each.reward !== null && each.reward <= limit));
  return [h("h1", null, "Groups"), h("div", { class: "bar" }, pick("channel", "Channel", channels, chosen, ""), pick("state", "State", states, state, "every state"), least), groups.length ? groupsTable(run, groups, link) : h("p", { class: "dim" }, "No such group."),
    told.before ? h("p", null, h("a", { rel: "next", href: `${link("run", run, "groups")}?${new URLSearchParams({ channel: chosen, state, before: told.before })}` }, "older groups →")) : null].filter(Boolean);
}

export async function endedScreen({ run, rest, params, link }) {
  const channel = params.get("channel") || "train";
  const told = await ask("ended", { run, end: rest[0], channel, before: params.get("before") || "" });
  const rows = told.rollouts.map((each) => [h("a", { href: link("run", run, "rollout", each.id) }, said(each.id)), h("a", { href: link("run", run, "group", each.group_id) }, said(each.group_id)), said(each.message)]);
  return [h("h1", null, "Rollouts that ended as ", said(rest[0])), rows.length ? table(["rollout", "group", "message"], rows, { label: "rollouts" }) : h("p", { class: "dim" }, told.before ? "None among the newest groups." : "None."),
    told.before ? h("p", null, h("a", { rel: "next", href: `${link("run", run, "ended", rest[0])}?${new URLSearchParams({ channel, before: told.before })}` }, "older ones →")) : null].filter(Boolean);
}

export async function searchScreen({ run, params, link }) {
  const [text, channel, before] = [params.get("text") || "", params.get("channel") || "train", params.get("before") || ""];
  const told = text ? await ask("search", { run, text, channel, before }) : { found: [], groups: 0, before: null, channels: ["train"] };
  const at = (changes) => `${link("run", run, "search")}?${new URLSearchParams({ text, channel, ...changes })}`;
  const words = h("input", { type: "search", id: "words", value: text, "aria-label": "Words in tasks, requests and replies" });
  const pick = h("select", { id: "channel", "aria-label": "Channel", onchange: (event) => { location.hash = at({ channel: event.target.value }); } }, [...new Set([channel, ...told.channels])].map((each) => h("option", { value: each, selected: each === channel }, each)));
  const form = h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); location.hash = at({ text: words.value.trim() }); } }, words, pick, h("button", null, "Search"));
  const rows = told.found.map((each) => [each.rollout_id ? h("a", { href: link("run", run, "rollout", each.rollout_id) }, said(each.rollout_id)) : h("a", { href: link("run", run, "group", each.group_id) }, said(each.group_id)), each.place, h("span", { class: "text" }, each.before, h("mark", null, each.text), each.after)]);
  const seen = `${number(told.groups)} groups were looked through, the newest first${told.before === null ? ": all of them." : "; not all."}`;
  return [h("h1", null, "Search"), form, text ? h("p", { class: "dim" }, rows.length ? "" : "Nothing was found. ", seen) : null, rows.length ? table(["rollout or group", "in", "text"], rows, { label: "what was found" }) : null,
    told.before === null ? null : h("p", null, h("a", { rel: "next", href: at({ before: told.before }) }, "older groups →"))].filter(Boolean);
}

export async function groupScreen({ run, rest, link }) {
  const told = await ask("group", { run, group: rest[0] });
  const known = told.attempts.map((each) => each.reward).filter((each) => each !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(1, ...known)];
  const widest = Math.max(1e-9, ...told.attempts.flatMap((each) => [each.advantage ?? 0, ...Object.values(each.policies || {}), ...each.credits.map((call) => call.mean)]).map(Math.abs));
  const trained = told.step === null ? `${told.state}` : `trained in step ${told.step}, saved as version ${told.version}`;
  const cards = told.attempts.map((each) => h("section", { class: "card" },
    h("h3", null, h("a", { href: link("run", run, "rollout", each.id) }, said(each.id))),
    h("p", { class: "tinted", style: { background: tint(each.reward, low, high) } }, `reward ${number(each.reward)}`, each.advantage === null ? "" : ` · advantage ${number(each.advantage)}`),
    each.advantage === null ? null : advantageBar(each.advantage, widest),
    Object.entries(each.policies || {}).map(([name, value]) => [h("p", { class: "dim" }, "advantage of ", said(name), ` ${number(value)}`), advantageBar(value, widest)]),
    each.credits.slice(0, MOST_CREDITS).map((call) => [h("p", { class: "dim" }, `advantage of call ${call.call}: ${range(call)}`), advantageBar(call.mean, widest)]),
    each.credits.length > MOST_CREDITS ? h("p", { class: "dim" }, "The other calls' advantages stand with the rollout.") : null,
    each.unknown ? h("p", { class: "warn" }, `The advantage is not known: ${each.unknown}.`) : null,
    h("p", { class: each.end === "completed" ? "dim" : "bad" }, `${each.end || "running"} · ${each.calls} calls · ${number(each.tokens)} tokens${each.attempt > 1 ? ` · attempt ${each.attempt}` : ""}`),
    each.message ? h("pre", { tabindex: "0" }, each.message) : null,
    told.parting === null || !each.next ? null : [h("p", { class: "dim" }, each.parts_at === null ? "after the shared tokens:" : `after the shared tokens, in call ${each.parts_at}:`), h("pre", { tabindex: "0" }, each.next)],
    h("p", { class: "dim" }, "last reply:"), h("pre", { tabindex: "0" }, each.last || "(no text)")));
  return [h("h1", null, "Group ", said(told.id)), h("p", { class: "dim" }, `${told.channel} · `, told.step === null ? trained : h("a", { href: link("run", run, "step", told.step) }, trained)),
    h("h2", null, "Task ", said(told.task.id)), messages(told.task.prompt), told.task.label === null ? null : h("p", null, h("span", { class: "dim" }, "label: "), said(told.task.label)),
    h("h2", null, "Attempts"), h("p", { class: "dim" }, told.parting === null ? "" : `All share their first ${number(told.parting)} tokens.`), h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "attempts side by side" }, cards),
    told.replaced.length ? h("p", null, "Replaced attempts: ", told.replaced.map((each) => [h("a", { href: link("run", run, "rollout", each.id) }, said(each.id)), " "])) : null].filter(Boolean);
}

function advantageBar(value, widest) {
  const share = Math.abs(value) / widest;
  return h("div", { class: "meter", role: "img", "aria-label": `advantage ${number(value)}` }, h("span", { style: { width: `${50 * share}%`, "margin-left": `${value < 0 ? 50 - 50 * share : 50}%`, background: value < 0 ? "var(--accent2)" : "var(--accent)" } }));
}

export async function rolloutScreen({ run, rest, params, link }) {
  const told = await ask("rollout", { run, rollout: rest[0], first: params.get("first") || "" });
  const at = told.places.indexOf(told.id);
  const beside = (place, rel, text) => (told.places[place] ? h("a", { rel, href: link("run", run, "rollout", told.places[place]) }, text) : null);
  const credit = told.credit;
  const trainedCalls = told.calls.filter((call) => call.trained);
  const training = credit.step === null ? `its group is ${credit.state || "unknown"}` : ["its group was trained in ", h("a", { href: link("run", run, "step", credit.step) }, `step ${credit.step}`)];
  return [h("h1", null, "Rollout ", said(told.id)), h("p", { class: "bar" }, h("a", { href: link("run", run, "group", told.group) }, "group ", said(told.group)), beside(at - 1, "prev", "← previous"), beside(at + 1, "next", "next →")),
    h("div", { class: "tiles" }, tile("reward", number(told.reward)), tile("end", told.end || "running"), Object.keys(credit.policies || {}).length ? Object.entries(credit.policies).map(([name, value]) => tile(`advantage of ${name}`, number(value))) : tile("advantage", { call: "by call", token: "by token" }[credit.level] || number(credit.advantage), credit.unknown || null), tile("calls", number(told.call_count)), tile("attempt", told.attempt)),
    h("section", { id: "why" }, h("h2", null, "Why this reward"), h("p", null, said(told.why)),
      told.grades.length ? table(["source", "for", ["reward"]], told.grades.map((each) => [said(each.source), each.step !== null ? `call ${each.step}` : each.transcript !== null ? ["transcript ", said(each.transcript)] : "the rollout", number(each.reward)]), { label: "grades", slim: true }) : null,
      credit.unknown ? h("p", { class: "warn" }, `The advantage is not known: ${credit.unknown}.`) : null,
      told.note ? [h("p", { class: "dim" }, "the grader's note:"), h("pre", { tabindex: "0" }, told.note)] : null,
      told.message ? h("pre", { class: "bad", tabindex: "0" }, told.message) : null,
      told.marks.length ? table(["mark", "trainable", "quality", "note"], told.marks.map((each) => [each.step === null ? "rollout" : `call ${each.step}`, each.trainable ? "yes" : "no", number(each.quality), said(each.note)]), { label: "marks", slim: true }) : null),
    h("p", null, `${trainedCalls.length} of ${told.calls.length} calls shown were trained; `, training, ". ", told.calls.length ? h("a", { href: link("run", run, "tokens", told.id, (trainedCalls[0] || told.calls[0]).index) }, "Which of its tokens were trained?") : null),
    h("details", null, h("summary", null, "Task ", said(told.task.id, { class: "text mono dim" })), messages(told.task.prompt)), told.task.label === null ? null : h("p", null, h("span", { class: "dim" }, "label: "), said(told.task.label)),
    h("h2", null, "Conversation"), conversation(run, told, link),
    told.next === null ? null : h("p", null, h("a", { href: `${link("run", run, "rollout", told.id)}?first=${told.next}` }, "later calls →")),
    told.retries.length > 1 ? h("p", null, "Attempts at this place: ", told.retries.map((each) => [h("a", { href: link("run", run, "rollout", each), "aria-current": each === told.id ? "page" : null }, said(each)), " "])) : null,
    told.artifacts.length ? h("details", null, h("summary", null, `${told.artifacts.length} artifacts`), h("pre", { tabindex: "0" }, told.artifacts.join("\n"))) : null].filter(Boolean);
}

// Calls as a tree: a call hangs below the one whose reply it continues, unless it simply goes on from the one before.
function conversation(run, told, link) {
  const names = [...new Set(told.calls.map((call) => call.transcript))];
  return names.map((name) => h("section", { class: "tree" }, names.length > 1 ? h("h3", null, "transcript ", said(name)) : null, branches(told.calls.filter((call) => call.transcript === name), run, told, link)));
}

function branches(calls, run, told, link) {
  const known = new Set(calls.map((call) => call.index));
  const children = new Map();
  for (const call of calls) { const parent = known.has(call.parent) ? call.parent : null; children.set(parent, [...(children.get(parent) || []), call]); }
  const out = [];
  const work = [[null, out]];
  while (work.length) { // without recursion: a conversation may have thousands of calls
    const [parent, target] = work.pop();
    const next = children.get(parent) || [];
    next.forEach((call, at) => {
      const place = next.length === 1 ? target : [];
      place.push(callView(call, run, told, link));
      if (next.length > 1) target.push({ branch: at, place });
      work.push([call.index, place]);
    });
  }
  const build = (items) => items.map((item) => (item instanceof Node ? item : h("details", { class: "tree", open: true }, h("summary", { class: "dim" }, `branch ${item.branch + 1}`), build(item.place))));
  return build(out);
}

function callView(call, run, told, link) {
  const state = call.trained ? h("span", { class: "good" }, "trained") : h("span", { class: "warn", title: call.mask_text }, `not trained: ${call.mask || "unknown"}`);
  const facts = [`call ${call.index}`, call.policy ? `policy ${call.policy}` : null, `${number(call.tokens)} tokens`, `${number(call.seconds)} s`, call.created ? clock(call.created) : null, `version ${call.versions.join(", ") || "–"}`, call.finish, call.retry ? `asked again ${call.retry} times` : null, call.advantage && told.credit.level !== "rollout" ? `advantage ${range(call.advantage)}` : null].filter(Boolean).join(" · ");
  const exact = h("details", { ontoggle: (event) => { if (event.target.open && !event.target.dataset.loaded) loadCall(event.target, run, told.id, call.index); } }, h("summary", { class: "dim" }, "exact request and reply"));
  return h("div", { id: `call-${call.index}` },
    call.break ? h("p", { class: "bad" }, `break: ${call.break}. `, call.break_text || "") : null,
    call.tools.length ? h("p", { class: "dim" }, "tools: ", said(call.tools.join(", "))) : null,
    messages(call.messages), h("div", { class: `message reply${call.trained ? " trained" : ""}` }, h("p", { class: "dim" }, h("span", { class: "role" }, "assistant"), " ", facts, " · ", state, call.mask_text ? ` (${call.mask_text})` : "", " · ", h("a", { href: link("run", run, "tokens", told.id, call.index) }, "tokens")), body(call.reply)), exact);
}

async function loadCall(place, run, rollout, call) {
  place.dataset.loaded = "yes";
  try {
    const told = await ask("call", { run, rollout, call });
    place.append(h("p", { class: "dim" }, "request"), h("pre", { tabindex: "0" }, JSON.stringify(told.request, null, 2)), h("p", { class: "dim" }, "reply"), h("pre", { tabindex: "0" }, JSON.stringify({ message: told.reply, finish: told.finish, usage: told.usage, context: told.context, answer: told.answer }, null, 2)));
  } catch (error) { place.append(h("p", { class: "bad" }, said(error.message))); }
}

export const messages = (list) => (list || []).map((message) => (typeof message === "string" ? h("p", { class: "dim" }, message) : h("div", { class: "message" }, h("p", { class: "role" }, said(String(message.role ?? "?"))), body(message))));

// A tool's call or result: one line that unfolds, or the whole text where it fits into the line.
function folded(name, text) {
  const short = text.length <= PREVIEW && !text.includes("\n");
  const line = [name, " ", h("code", { class: "text" }, short ? text : `${text.slice(0, PREVIEW).replaceAll("\n", " ")}…`)];
  return short ? h("p", { class: "tool" }, line) : h("details", { class: "tool" }, h("summary", null, line, h("span", { class: "dim" }, ` ${number(text.length)} characters`)), h("pre", { tabindex: "0" }, text));
}

function body(message) {
  const text = message.content;
  const parts = [];
  if (message.reasoning_content) parts.push(h("details", null, h("summary", { class: "dim" }, "reasoning"), h("pre", { tabindex: "0" }, String(message.reasoning_content))));
  if (typeof text === "string" && text) parts.push(message.role === "tool" ? folded("result", text) : h("pre", { tabindex: "0" }, text));
  else if (Array.isArray(text)) for (const part of text) parts.push(part && part.type === "picture" ? h("p", { class: "dim" }, `picture, ${part.media_type}, sha256 ${part.digest}`) : h("pre", { tabindex: "0" }, part && typeof part.text === "string" ? part.text : JSON.stringify(part, null, 2)));
  else if (text !== null && text !== undefined && text !== "") parts.push(h("pre", { tabindex: "0" }, JSON.stringify(text, null, 2)));
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) {
    const f = (call && call.function) || {};
    parts.push(folded(["calls ", h("code", { class: "text strong" }, String(f.name ?? "?"))], String(f.arguments ?? "")));
  }
  return parts.length ? parts : h("p", { class: "dim" }, "(empty)");
}
