// The token lens: the tokens of a call, coloured by what is recorded of each; or twice, as the engine and as the trainer saw them.
import { ask } from "./api.js";
import { h, heat, number, said, signed, table, tint } from "./dom.js";

const FIELDS = {
  logprob: ["log-probability", "of the engine, under the distribution that it sampled from", (told) => told.logprobs, [0, -5], heat],
  entropy: ["entropy", "of the trainer's distribution, in nats", (told) => told.entropy, [0, 2], heat],
  ratio: ["ratio", "the trainer's probability over the engine's, before the first update of the step", (told) => told.gap && told.gap.map(Math.exp), [0.8, 1.2]],
  gap: ["engine against trainer", "the log-probability of each token on both sides, in the same colours", (told) => told.gap && told.logprobs, [0, -5], heat],
  advantage: ["advantage", "the credit that the token was trained with", (told) => told.token_advantages || (told.advantage === null ? null : told.logprobs.map(() => told.advantage)), null],
  version: ["policy version", "that the engine served for the token", (told) => told.versions, null],
};
const LEAST = 6;

export async function tokensScreen({ run, rest, params, link }) {
  const [rollout, call] = [rest[0], rest[1] || "0"];
  const told = await ask("tokens", { run, rollout, call, first: params.get("first") || "" });
  const field = params.get("by") in FIELDS ? params.get("by") : "logprob";
  const [name, meaning, read, range, colour = tint] = FIELDS[field];
  const values = read(told);
  const here = (changes) => `${link("run", run, "tokens", rollout, call)}?${new URLSearchParams({ by: field, ...changes })}`;
  const pick = h("select", { id: "by", "aria-label": "Colour tokens by", onchange: (event) => { location.hash = here({ by: event.target.value }); } }, Object.entries(FIELDS).map(([key, [label]]) => h("option", { value: key, selected: key === field }, label)));
  const known = (values || []).filter((value) => value !== null);
  const widest = Math.max(1e-9, ...known.map(Math.abs));
  const [low, high] = range || (field === "version" ? [Math.min(...known), Math.max(...known) + 1e-9] : [-widest, widest]);
  const paint = (value) => colour(value, low, high);
  const detail = h("aside", { class: "card", "aria-live": "polite", id: "token" }, h("p", { class: "dim" }, "Choose a token to see all that is recorded of it."));
  const at = told.calls.indexOf(told.call);
  const beside = (place, rel, text) => (told.calls[place] === undefined ? null : h("a", { rel, href: `${link("run", run, "tokens", rollout, told.calls[place])}?by=${field}` }, text));
  const both = field === "gap" && told.gap;
  return [h("h1", null, "Tokens of call ", told.call, " of ", h("a", { href: link("run", run, "rollout", rollout) }, said(rollout))),
    h("p", { class: told.trained ? "good" : "warn" }, told.trained ? `These tokens were trained in step ${told.credit.step}, whose weights were saved as version ${told.credit.version}.` : `These tokens were not trained: ${told.mask_text || told.mask || "unknown"}.`),
    told.flaw ? h("p", { class: "bad" }, `exactness: ${told.flaw}`) : null,
    told.has_text ? null : h("p", { class: "warn" }, "The model's tokenizer is not on this machine, so ids are shown instead of text."),
    h("div", { class: "bar" }, "colour by", pick, values === null ? null : scale(paint, low, high), h("span", { class: "grow" }), beside(at - 1, "prev", "← previous call"), beside(at + 1, "next", "next call →")),
    h("p", { class: "dim" }, `${name}: ${meaning}. `, values === null ? "It is not recorded for this call" + (told.trained ? ": the run was made by an earlier penstock, or its step trained too many tokens. " : ", as it was not trained. ") : "", "Grey text is the prompt; a dotted line marks tokens that other calls sampled."),
    both ? h("div", { class: "sides" }, side("engine", told, told.logprobs, paint, detail, "t"), side("trainer", told, told.logprobs.map((value, own) => value + told.gap[own]), paint, detail, "u"), detail)
      : h("div", { class: "lens" }, strip(told, values, paint, detail, "t"), detail),
    both ? differences(told) : least(told),
    h("p", { class: "bar" }, told.first > 0 ? h("a", { href: here({ first: Math.max(0, told.first - 2000) }) }, "← earlier tokens") : null, h("span", { class: "dim" }, `tokens ${number(told.first)} to ${number(told.first + told.ids.length)} of ${number(told.total)}`), told.more ? h("a", { href: here({ first: told.first + told.ids.length }) }, "later tokens →") : null)].filter(Boolean);
}

function scale(paint, low, high) {
  if (number(low) === number(high)) return null;
  const cells = Array.from({ length: 9 }, (_, at) => h("i", { style: { background: paint(low + ((high - low) * at) / 8) } }));
  return h("span", { class: "scale", role: "img", "aria-label": `colours from ${number(low)} to ${number(high)}` }, number(low), h("span", null, cells), number(high));
}

const side = (name, told, values, paint, detail, prefix) => h("section", null, h("h2", null, name), strip(told, values, paint, detail, prefix));

// The tokens of a path; those of this call can be chosen, and have the ids t0, t1, … (or u0, u1, … on the trainer's side).
function strip(told, values, paint, detail, prefix) {
  const breaks = new Map(told.breaks.map((each) => [each.at, each]));
  const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "tokens" });
  let own = 0;
  told.ids.forEach((id, at) => {
    const found = breaks.get(told.first + at);
    if (found) box.append(h("span", { class: "break" }, `break: ${found.reason}. ${found.text || ""}`));
    const text = told.texts[at] === "" ? "·" : told.texts[at];
    if (told.sampled_by[at] !== told.call) { box.append(h("span", { class: told.sampled_by[at] === null ? "context" : "sampled other", title: told.sampled_by[at] === null ? null : `sampled by call ${told.sampled_by[at]}` }, text)); return; }
    const number_ = own++;
    const choose = () => { press(number_); describe(told, number_, at, detail); };
    box.append(h("span", { class: `sampled${told.trained ? "" : " untrained"}`, role: "button", tabindex: number_ === 0 ? "0" : "-1", "aria-pressed": "false", id: `${prefix}${number_}`, style: { background: values ? paint(values[number_]) : "transparent" }, onclick: choose,
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); }
        const next = { ArrowRight: number_ + 1, ArrowLeft: number_ - 1 }[event.key];
        if (next !== undefined && document.getElementById(`${prefix}${next}`)) { event.preventDefault(); document.getElementById(`${prefix}${next}`).focus(); }
      }, onfocus: choose }, text));
  });
  return box;
}

function press(own) {
  document.querySelectorAll(".tokens [aria-pressed=true]").forEach((each) => each.setAttribute("aria-pressed", "false"));
  for (const prefix of ["t", "u"]) document.getElementById(`${prefix}${own}`)?.setAttribute("aria-pressed", "true");
}

function describe(told, own, at, detail) {
  const of = (column) => (column ? number(column[own], 5) : "not recorded");
  const engine = told.logprobs[own];
  const rows = [["token", [h("code", { class: "text" }, JSON.stringify(told.texts[at])), ` id ${told.ids[at]}`]], ["policy version", told.versions[own] ?? "–"], ["engine log-probability", number(engine, 5)],
    ["trainer log-probability", told.gap ? number(engine + told.gap[own], 5) : "not recorded"], ["ratio", told.gap ? number(Math.exp(told.gap[own]), 5) : "not recorded"], ["untempered log-probability", told.full_logprobs ? of(told.full_logprobs) : "the same"],
    ["entropy", of(told.entropy)], ["advantage", told.token_advantages ? of(told.token_advantages) : number(told.advantage)], ["temperature", number(told.temperature)], ["trained", told.trained ? `yes, in step ${told.credit.step}` : `no: ${told.mask_text || told.mask || "unknown"}`]];
  detail.replaceChildren(h("h2", null, `Token ${told.first + at}`), h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", { class: "dim" }, name), h("dd", null, value)])));
}

// The texts of the call's own tokens.
const ownTexts = (told) => told.texts.filter((_, at) => told.sampled_by[at] === told.call);

const goTo = (own, ...text) => h("button", { type: "button", class: "token", onclick: () => document.getElementById(`t${own}`)?.focus() }, ...text);

function least(told) {
  if (!told.logprobs.length) return null;
  const texts = ownTexts(told);
  const ranked = told.logprobs.map((value, own) => [value, own]).sort((a, b) => a[0] - b[0]).slice(0, LEAST);
  return h("p", { class: "bar" }, h("span", { class: "dim" }, "Least likely"), ranked.map(([value, own]) => goTo(own, h("code", { class: "text" }, JSON.stringify(texts[own])), ` ${number(value)}`)));
}

// The tokens on which both sides differ most.
function differences(told) {
  const texts = ownTexts(told);
  const ranked = told.gap.map((value, own) => [Math.abs(value), own]).sort((a, b) => b[0] - a[0]).slice(0, LEAST);
  const rows = ranked.map(([, own]) => [goTo(own, h("code", { class: "text" }, JSON.stringify(texts[own]))), number(told.logprobs[own], 5), number(told.logprobs[own] + told.gap[own], 5), signed(told.gap[own]), number(Math.exp(told.gap[own]), 5)]);
  return [h("h2", null, "Largest differences"), table(["token", ["engine"], ["trainer"], ["difference"], ["ratio"]], rows, { label: "largest differences", slim: true })];
}
