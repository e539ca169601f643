// Evaluations: a table, and those that are chosen side by side by task.
import { ask } from "./api.js";
import { ago, badge, h, number, said, signed, table, tint } from "./dom.js";

const between = (each) => (each ? h("span", { class: "nowrap" }, `${number(each.value)} (${number(each.low)} to ${number(each.high)})`) : "–");

export async function evalsScreen({ params, link }) {
  const chosen = (params.get("runs") || "").split(",").filter(Boolean).map(decodeURIComponent);
  const told = await ask("evals", { runs: chosen.join(",") });
  const toggle = (id, on) => { const next = on ? [...chosen, id] : chosen.filter((each) => each !== id); location.hash = `#/evals?${new URLSearchParams({ runs: next.join(",") })}`; };
  const rows = told.evaluations.map((each) => [h("input", { type: "checkbox", checked: chosen.includes(each.id), "aria-label": `compare ${each.id}`, onchange: (event) => toggle(each.id, event.target.checked) }), h("a", { href: link("run", each.id) }, said(each.id)), [badge(each.status), ...Object.entries(each.notices || {}).slice(0, 5).map(([name, count]) => h("div", { class: "warn" }, `not done: ${number(count)} × `, said(name)))], said(each.model, { class: "text narrow" }), number(each.tasks), [between(each.reward), ...Object.entries(each.components).map(([name, value]) => h("div", { class: "dim" }, said(name), " ", between(value)))],
    Object.entries(each.passes || {}).map(([k, value]) => h("div", { class: "nowrap" }, `pass@${k} `, between(value))), each.cost === null || each.cost === undefined ? "–" : number(each.cost), ago(Date.now() / 1000 - each.changed)]);
  const parts = [h("h1", null, "Evaluations"), rows.length ? table(["", "evaluation", "status", "model", ["tasks"], "reward", "pass@k", ["cost"], ["changed"]], rows, { label: "evaluations" }) : h("p", { class: "dim" }, "There is no evaluation here. Make one with ", h("code", null, "penstock eval run"), ".")];
  if (told.columns) parts.push(...matrix(told, link));
  else if (rows.length) parts.push(h("p", { class: "dim" }, "Choose evaluations to compare them task by task; the first one chosen is the baseline."));
  return parts;
}

function matrix(told, link) {
  const columns = told.columns;
  const summary = columns.map((each) => [said(each.id), each.tasks, between(each.reward), Object.entries(each.passes).map(([k, value]) => h("div", { class: "nowrap" }, `pass@${k} `, between(value))), each.paired ? [h("b", { class: each.paired.low > 0 ? "good" : each.paired.high < 0 ? "bad" : null }, signed(each.paired.value)), ` (${signed(each.paired.low)} to ${signed(each.paired.high)}), p = ${number(each.paired.p)}, ${each.shared} tasks`] : h("span", { class: "dim" }, "baseline")]);
  const rows = told.rows.map((row) => [[said(row.prompt), h("div", { class: "dim mono" }, said(row.task))], row.change === null ? "–" : h("span", { class: row.change < 0 ? "bad" : row.change > 0 ? "good" : "dim" }, signed(row.change)),
    ...row.cells.map((cell, at) => (cell ? h("div", { class: "rewards" }, h("a", { href: link("run", columns[at].id, "group", cell.group), style: { background: tint(cell.mean, 0, 1) } }, number(cell.mean)), cell.failed ? h("span", { class: "bad" }, `${cell.failed} failed`) : null) : "–"))]);
  return [h("h2", null, "Paired comparison"), table(["evaluation", ["tasks"], "reward", "pass@k", "against the first, on the same tasks"], summary, { label: "comparison" }),
    h("h2", null, "Tasks, worst regression first"), h("p", { class: "dim" }, told.tasks > told.rows.length ? `${told.rows.length} of ${told.tasks} tasks; ` : "", "mean reward of the attempts; a cell opens them. The change is that of the last column against the first."), table(["task", ["change"], ...columns.map((each) => each.id)], rows, { label: "tasks" })];
}
