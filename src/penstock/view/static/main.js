// The page: addresses, navigation by keyboard, light and dark, and which screen is shown.
import { ask, exported, follow, setToken } from "./api.js";
import { h, said } from "./dom.js";
import { evalsScreen } from "./evals.js";
import { endedScreen, groupScreen, groupsScreen, rolloutScreen, searchScreen, stepScreen } from "./rollouts.js";
import { runScreen, runsScreen } from "./runs.js";
import { poolScreen, timelineScreen } from "./system.js";
import { tokensScreen } from "./tokens.js";

// Addresses: #/runs, #/evals, #/run/RUN, #/run/RUN/step/3, … with every part percent-encoded.
const SCREENS = { "": runScreen, step: stepScreen, groups: groupsScreen, ended: endedScreen, search: searchScreen, group: groupScreen, rollout: rolloutScreen, tokens: tokensScreen,
  timeline: timelineScreen, pool: poolScreen };
// The tab that a screen without one belongs to.
const WITHIN = { step: "", ended: "", search: "groups", group: "groups", rollout: "groups", tokens: "groups" };
let leave = new AbortController();

export const link = (...parts) => `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;

function address() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  let parts;
  try { parts = path.split("/").filter(Boolean).map(decodeURIComponent); } catch { parts = []; }
  return { parts, params: new URLSearchParams(search || "") };
}

function header(run, current) {
  const item = (text, href, name) => h("a", { href, "aria-current": name === current ? "page" : name === WITHIN[current] ? "true" : null }, text);
  const brand = h("span", { class: "brand" }, "Penstock");
  const places = exported ? [] : [item("Runs", "#/runs", "runs"), item("Evaluations", "#/evals", "evals")];
  const tabs = run ? [item("Overview", link("run", run), ""), item("Groups", link("run", run, "groups"), "groups")] : [];
  if (run && !exported) tabs.push(item("Timeline", link("run", run, "timeline"), "timeline"), item("Pool", link("run", run, "pool"), "pool"));
  const find = h("input", { type: "search", id: "find", placeholder: exported ? "group or rollout" : "id, or words", "aria-label": "Go to a step, group or rollout by its id, or search conversations (key /)" });
  const form = h("form", { role: "search", onsubmit: (event) => { event.preventDefault(); go(run, find.value.trim()); } }, find);
  const theme = h("button", { type: "button", onclick: switchTheme, "aria-label": "Switch between light and dark (key t)" }, "◐");
  const keys = h("button", { type: "button", onclick: showKeys, "aria-label": "Keys (key ?)" }, "?");
  document.getElementById("top").replaceChildren(h("div", { class: "row" }, brand, h("nav", { "aria-label": "screens" }, places), h("span", { class: "grow" }), run ? form : null, theme, keys),
    ...(run ? [h("div", { class: "row tabs" }, said(run, { class: "text of" }), h("nav", { "aria-label": "screens of the run" }, tabs))] : []));
}

async function go(run, text) {
  if (!text) return;
  try {
    const found = exported ? { kind: text.split(".").length > 2 ? "rollout" : "group", id: text } : await ask("find", { run, text });
    if (found.kind) location.hash = link("run", run, found.kind, found.id);
    else location.hash = `${link("run", run, "search")}?${new URLSearchParams({ text })}`;
  } catch (error) { show(failure(error)); }
}

function switchTheme() {
  const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("penstock-theme", document.documentElement.dataset.theme); } catch { /* a file has no storage in some browsers */ }
  render();
}

function showKeys() {
  const keys = [["/", "go to a step, group or rollout, or search conversations"], ["j, k", "next and previous link of a list"], ["[, ]", "previous and next of its kind"], ["u", "up one level"], ["t", "light or dark"], ["r", "runs"], ["?", "this list"]];
  const dialog = h("dialog", { "aria-label": "Keys" }, h("h2", null, "Keys"), h("dl", null, keys.map(([key, text]) => [h("dt", { class: "mono" }, key), h("dd", null, text)])),
    h("form", { method: "dialog" }, h("button", null, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function show(...content) { document.getElementById("main").replaceChildren(...content); }

function failure(error) {
  if (error.status === 401) return tokenForm(error);
  return h("div", { class: "error", role: "alert" }, h("h1", null, "This screen cannot be shown"), h("p", null, said(error.message)), h("p", null, h("a", { href: exported ? "#/" : "#/runs" }, "Go back")));
}

function tokenForm(error) {
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
  const send = (event) => { event.preventDefault(); setToken(input.value); render(); };
  return h("div", { class: "error" }, h("h1", null, "A token is needed"), h("p", null, said(error.message)), h("form", { class: "bar", onsubmit: send }, input, h("button", null, "Open")),
    h("p", { class: "dim" }, "It is kept in this tab alone, and is never part of an address."));
}

export async function render() {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const { parts, params } = address();
  const [kind = exported ? "run" : "runs", given = "", screen = "", ...rest] = parts;
  const run = kind === "run" ? given || (exported ? exportedRun() : "") : "";
  header(run, kind === "run" ? screen : kind);
  document.title = [rest[0], run, "Penstock"].filter(Boolean).join(" · ");
  const draw = kind === "evals" ? evalsScreen : kind === "run" ? SCREENS[screen] : runsScreen;
  const context = { run, rest, params, signal, render: refresh, link, follow: (changed) => run && follow(run, signal, changed) };
  async function refresh() {
    if (signal.aborted) return;
    try {
      if (!draw) throw new Error("There is no such screen.");
      const made = await draw(context);
      if (!signal.aborted) {
        const [top, focused] = [window.scrollY, document.activeElement && document.activeElement.id];
        show(...[made].flat(Infinity).filter(Boolean));
        window.scrollTo(0, top);
        if (focused && focused !== "main") document.getElementById(focused)?.focus();
        document.body.dataset.ready = String(Date.now());
      }
    } catch (error) { if (!signal.aborted) { show(failure(error)); document.body.dataset.ready = String(Date.now()); } }
  }
  await refresh();
  if (run && !signal.aborted && (screen === "" || screen === "groups" || screen === "pool" || screen === "rollout" || (screen === "timeline" && !params.get("until")))) {
    let waiting = null;
    follow(run, signal, () => { waiting ??= setTimeout(() => { waiting = null; refresh(); }, 500); });
  }
}

function exportedRun() { return document.getElementById("data").dataset.run; }

function up() {
  const { parts } = address();
  const parent = { step: 2, group: 2, groups: 2, ended: 2, search: 2, timeline: 2, pool: 2, rollout: 2, tokens: 2 }[parts[2]];
  if (parts[2] === "tokens") location.hash = link("run", parts[1], "rollout", parts[3]);
  else if (parts[2] === "rollout") location.hash = link("run", parts[1], "group", parts[3].split(".").slice(0, -2).join("."));
  else location.hash = parent ? link(...parts.slice(0, parent)) : "#/runs";
}

function step(by) {
  const links = [...document.querySelectorAll("main a, main summary, main button, main .sampled[tabindex]")].filter((each) => each.offsetParent !== null);
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const keys = { "/": () => document.getElementById("find")?.focus(), t: switchTheme, "?": showKeys, u: up, r: () => { location.hash = "#/runs"; }, j: () => step(1), k: () => step(-1),
    "[": () => document.querySelector("[rel=prev]")?.click(), "]": () => document.querySelector("[rel=next]")?.click() };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});

// An exported page begins with a note for readers without scripts.
function takeOver() {
  document.body.replaceChildren(h("a", { class: "skip", href: "#main" }, "Skip to the content"), h("header", { id: "top" }), h("main", { id: "main", tabindex: "-1" }), document.getElementById("data"));
}

if (exported) takeOver();
try { const kept = localStorage.getItem("penstock-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* see above */ }
window.addEventListener("hashchange", () => { window.scrollTo(0, 0); render().then(() => document.getElementById("main").focus({ preventScroll: true })); });
render();
