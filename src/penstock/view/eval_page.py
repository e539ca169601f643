"""The report of an evaluation as one HTML page without scripts: numbers, histograms, tasks, and chosen transcripts."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import orjson

from penstock.config import EvalSection
from penstock.evals.metrics import Estimate
from penstock.evals.outcome import EvalOutcome, StoredEvaluation, TaskScores, open_evaluation, outcome, score_tasks
from penstock.evals.spending import Latency
from penstock.graders.rubric import read_verdict_file
from penstock.pool.base import Pool
from penstock.records import End, Message, Rollout, Task
from penstock.rollout.transcripts import transcripts
from penstock.system.files import write_file

TRANSCRIPTS_EACH = 3
"""Transcripts shown of the best rollouts, of the worst, and of each failed end."""
MAX_TASKS = 1000
"""Tasks listed; the others are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptPick:
    """A rollout chosen for the report, and why."""

    why: str
    task: Task
    rollout: Rollout
    note: str = ""
    """The judge's explanation."""


async def write_eval_page(folder: Path) -> Path:
    """Writes `report.html` into the evaluation's folder and returns its path."""
    async with open_evaluation(folder) as found:
        page = await render_eval_page(found, folder / "artifacts")
    return write_file(folder / "report.html", page.encode("utf-8", "replace"))


async def render_eval_page(found: StoredEvaluation, artifacts: Path | None = None) -> str:
    """Returns the page. `artifacts` holds a folder per rollout, with the judge's verdict."""
    section = EvalSection.model_validate(found.config.get("eval", {}))
    scored = await score_tasks(found.groups())
    result = outcome(scored, section, prices=found.prices, seconds=found.seconds)
    picked = await choose_transcripts(scored, found.pool)
    name, model = found.config["run"]["name"], found.config["model"]["name"]
    body = f"""{_tiles(result)}
<h2>Mean reward of each task</h2>
{histogram([each.mean for each in scored], what="tasks", of="mean reward", low=0.0, high=1.0)}
<details><summary>Every task</summary><div class="wide">{_tasks(scored)}</div></details>
{_components(result)}<h2>How long rollouts took</h2>
{histogram(list(found.seconds.values()), what="rollouts", of="time in seconds", low=0.0, high=0.0)}
<h2>How rollouts ended</h2>
{table(["end", "rollouts"], result.ends.items())}
{table(["", "rollouts", "most common reason"], [(kind, each.count, each.reason) for kind, each in result.shortfalls.items()])}
{_reasons(result)}
{_notices(found)}<h2>Transcripts</h2>
{"".join(transcript(replace(pick, note=_note(artifacts, pick))) for pick in picked)}
{config_section(found.config)}"""
    status = found.summary.get("status", "not finished")
    return document(name, f"{model} · {result.tasks} tasks x {result.samples} · {status}", body)


async def choose_transcripts(scored: Sequence[TaskScores], pool: Pool) -> list[TranscriptPick]:
    """Returns the worst and best rollouts, and some of each failed end, without duplicates."""
    rollouts = [each for task in scored for each in task.rollouts]
    graded = sorted((each for each in rollouts if each.end is End.COMPLETED), key=lambda each: each.reward)
    chosen = [("worst", each) for each in graded[:TRANSCRIPTS_EACH]] + [("best", each) for each in graded[::-1][:TRANSCRIPTS_EACH]]
    for end in sorted({str(each.end) for each in rollouts if each.end is not End.COMPLETED}):
        chosen += [("failed", each) for each in rollouts if each.end == end][:TRANSCRIPTS_EACH]
    reasons: dict[str, str] = {}
    for why, each in chosen:
        reasons.setdefault(each.usage.rollout_id, why)
    return [TranscriptPick(why=why, task=await pool.task(name), rollout=await pool.rollout(name)) for name, why in reasons.items()]


def _tiles(result: EvalOutcome) -> str:
    named = [_between("reward", result.reward), *(_between(f"pass@{k}", value) for k, value in result.passes.items())]
    spent = result.spent
    named += [("rollouts", f"{result.rollouts:,}"), ("model calls", f"{spent.steps:,}")]
    named += [("tokens sampled", f"{spent.completion_tokens:,}"), ("tokens read", f"{spent.prompt_tokens:,}")]
    named += [("cost", "-" if spent.cost is None else f"{spent.cost:.4g}")]
    named += [("call, p50 / p95", _latency(spent.call_s)), ("rollout, p50 / p95", _latency(spent.rollout_s))]
    return tiles(named)


def _components(result: EvalOutcome) -> str:
    rows = [(name, number(each.value), f"{each.low:.3f} to {each.high:.3f}") for name, each in result.components.items()]
    return f"<h2>Parts of the reward</h2>\n{table(['part', 'mean', '95 %'], rows)}\n" if rows else ""


def _latency(seconds: Latency | None) -> str:
    return "-" if seconds is None else f"{seconds.p50:.3g} / {seconds.p95:.3g} s"


def _note(artifacts: Path | None, pick: TranscriptPick) -> str:
    verdict = read_verdict_file(artifacts / pick.rollout.ref.id) if artifacts else None
    return verdict.explanation if verdict else ""


def _between(name: str, value: Estimate | None) -> tuple[str, str]:
    return (name, "-") if value is None else (f"{name} ({value.low:.2f} to {value.high:.2f})", f"{value.value:.3f}")


def _tasks(scored: Sequence[TaskScores]) -> str:
    rows = [
        (each.row, each.task_id, number(each.mean), " ".join(number(reward) for reward in each.rewards))
        for each in scored[:MAX_TASKS]
    ]
    beyond = f'<p class="dim">and {len(scored) - MAX_TASKS:,} more</p>' if len(scored) > MAX_TASKS else ""
    return table(["row", "task", "mean", "rewards"], rows) + beyond


def _notices(found: StoredEvaluation) -> str:
    rows: dict[str, int] = found.summary.get("notices") or {}
    return f"<h2>What was not done as agents asked</h2>\n{table(['what', 'calls'], rows.items())}\n" if rows else ""


def _reasons(result: EvalOutcome) -> str:
    rows = [(end, count, message[:300]) for end, messages in result.reasons.items() for message, count in messages.items()]
    return table(["end", "rollouts", "message"], rows) if rows else ""


# Parts of the page


BARS, HISTOGRAM_WIDTH, HISTOGRAM_HEIGHT, FOOT = 20, 760, 180, 24


def histogram(values: Sequence[float], *, what: str, of: str, low: float, high: float) -> str:
    """Returns an `<svg>` that counts `what` by `of`, such as tasks by mean reward. The axis spans at least `low` to `high`."""
    if not values:
        return f'<p class="dim">There are no {escape(what)} yet.</p>'
    low, high = min(low, *values), max(high, *values)
    width, counts = (high - low or 1.0) / BARS, [0] * BARS
    for value in values:
        counts[min(BARS - 1, int((value - low) / width))] += 1
    bars = [_bar(place, count, max(counts), _bar_title(count, place, low, width, what, of)) for place, count in enumerate(counts)]
    ticks = [
        f'<text class="tick" x="{at * (HISTOGRAM_WIDTH - 30) + 2:.0f}" y="{HISTOGRAM_HEIGHT - 6}">'
        f"{low + at * BARS * width:.3g}</text>"
        for at in (0, 0.5, 1)
    ]
    ticks.append(
        f'<line class="grid" x1="0" x2="{HISTOGRAM_WIDTH}" y1="{HISTOGRAM_HEIGHT - FOOT}" y2="{HISTOGRAM_HEIGHT - FOOT}"/>'
    )
    label = escape(f"{of} of {len(values)} {what}")
    return (
        f'<svg viewBox="0 0 {HISTOGRAM_WIDTH} {HISTOGRAM_HEIGHT}" role="img" aria-label="{label}">{"".join([*bars, *ticks])}</svg>'
    )


def _bar_title(count: int, place: int, low: float, width: float, what: str, of: str) -> str:
    return f"{count} {what} with a {of} from {low + place * width:.3g} to {low + (place + 1) * width:.3g}"


def _bar(place: int, count: int, most: int, title: str) -> str:
    step, tall = HISTOGRAM_WIDTH / BARS, (HISTOGRAM_HEIGHT - FOOT - 10) * count / most
    box = f'x="{place * step + 1:.1f}" y="{HISTOGRAM_HEIGHT - FOOT - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
    return f'<g><rect class="dot" {box}/><title>{escape(title)}</title></g>'


MAX_MESSAGE_CHARS = 20_000
"""Characters shown of one message; the rest is only counted."""
MAX_MESSAGES = 100
"""Messages shown from the start, and from the end, of a transcript; the others are only counted."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #667085; --line: #d9dee6; --page: #fff; --card: #f6f7f9; --mark: #0a7f58; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --dim: #97a1b0; --line: #343b47; --page: #14171c; --card: #1c2027; --mark: #4cc793; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 52rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.5rem; } h2 { margin: 2.2rem 0 .6rem; font-size: 1.05rem; }
.dim, .tick { color: var(--dim); fill: var(--dim); } .tick { font-size: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.6rem, 1fr)); gap: .6rem; margin: 1.2rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .7rem;
  color: var(--dim); font-size: .87rem; }
.tile b { display: block; color: var(--ink); font-size: 1.05rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } .grid { stroke: var(--line); }
.dot { fill: var(--mark); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; }
td, th { padding: .15rem 1.2rem .15rem 0; white-space: nowrap; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
pre { margin: .2rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
.message { border-left: 3px solid var(--line); padding-left: .8rem; margin: .7rem 0; } .assistant { border-color: var(--mark); }
"""


def document(title: str, subtitle: str, body: str) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · penstock</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<div class="dim">{escape(subtitle)}</div>
{body}
</body>
</html>
"""


def tiles(named: Iterable[tuple[str, str]]) -> str:
    """Returns a row of boxes, each with a label and its value."""
    return '<div class="tiles">' + "".join(f'<div class="tile">{escape(k)}<b>{escape(v)}</b></div>' for k, v in named) + "</div>"


def config_section(config: dict[str, Any]) -> str:
    body = f"<summary>The resolved config of this evaluation</summary><pre>{_json(config, indent=True)}</pre>"
    return f"<h2>Configuration</h2>\n<details>{body}</details>"


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def transcript(pick: TranscriptPick) -> str:
    """Returns a rollout's messages, folded under a summary line."""
    rollout = pick.rollout
    summary = f"{rollout.ref.id}: reward {number(rollout.reward)}, {rollout.end or 'running'}"
    parts = [f'<p class="dim">{escape(rollout.message)}</p>' if rollout.message else ""]
    if pick.task.label is not None:
        parts.append(f'<p class="dim">label: {escape(_cut(pick.task.label))}</p>')
    if pick.note:
        parts.append(f'<p class="dim">judge: {escape(_cut(pick.note))}</p>')
    found = transcripts(rollout)
    for name, transcript in found.items():
        parts.append(f"<h3>{escape(name)}</h3>" if len(found) > 1 else "")
        parts += [_tools(transcript.tools), *_messages(transcript.messages)]
    return f"<details><summary><b>{escape(pick.why)}</b> {escape(summary)}</summary>{''.join(parts)}</details>"


def _tools(schemas: list[dict[str, Any]]) -> str:
    names = [str((schema.get("function") or schema).get("name")) for schema in schemas]
    return f'<p class="dim">tools: {escape(_cut(", ".join(names)))}</p>' if names else ""


def _messages(messages: list[Message]) -> list[str]:
    if len(messages) <= 2 * MAX_MESSAGES:
        return [_message_box(message) for message in messages]
    left_out = f'<p class="dim">{len(messages) - 2 * MAX_MESSAGES:,} messages are left out here</p>'
    return [*map(_message_box, messages[:MAX_MESSAGES]), left_out, *map(_message_box, messages[-MAX_MESSAGES:])]


def _message_box(message: Message) -> str:
    role, content = str(message.get("role", "")), message.get("content")
    kind = "message assistant" if role == "assistant" else "message"
    text = escape(_cut(content)) if isinstance(content, str) else _json(content) if content else ""
    calls = [_call(call.get("function") or {}) for call in message.get("tool_calls") or ()]
    body = "".join(f"<pre>{part}</pre>" for part in [text, *calls] if part)
    return f'<div class="{kind}"><div class="dim">{escape(role)}</div>{body}</div>'


def _call(function: dict[str, Any]) -> str:
    return escape(_cut(f"{function.get('name')}({function.get('arguments')})"))


def _json(value: object, *, indent: bool = False) -> str:
    return escape(_cut(orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None).decode()))


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= MAX_MESSAGE_CHARS
        else f"{text[:MAX_MESSAGE_CHARS]}… ({len(text) - MAX_MESSAGE_CHARS:,} more characters)"
    )


def number(value: Any) -> str:
    """Formats a float with four significant digits, and None as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
