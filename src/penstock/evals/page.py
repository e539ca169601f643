"""A run as one HTML page that needs nothing else: no script, no font, no picture from elsewhere; every text escaped."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

import orjson

from penstock.evals.curve import Point, reward_curve
from penstock.records import Attempt, Message, Task
from penstock.rollout.transcripts import transcripts

LONGEST = 20_000
"""Characters of one message that are shown; what is cut is counted."""

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
svg { width: 100%; height: auto; } .grid { stroke: var(--line); } .line { fill: none; stroke: var(--mark); stroke-width: 2; }
.dot { fill: var(--mark); } .target { fill: transparent; } g:hover .target { fill: var(--line); fill-opacity: .5; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; }
td, th { padding: .15rem 1.2rem .15rem 0; white-space: nowrap; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
pre { margin: .2rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
.message { border-left: 3px solid var(--line); padding-left: .8rem; margin: .7rem 0; } .assistant { border-color: var(--mark); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A rollout worth reading, and why."""

    why: str
    task: Task
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that the page tells about a run."""

    name: str
    config: dict[str, Any]
    """As the run folder keeps it."""
    metrics: list[dict[str, Any]]
    """One entry per trained step."""
    summary: dict[str, Any]
    """Empty until the run has stopped or finished."""
    ends: dict[str, int] = field(default_factory=dict[str, int])
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How often messages were rendered anew although the rollout had earlier steps, by reason."""
    picks: list[Pick] = field(default_factory=list[Pick])
    picked_from: str = ""
    """Which rollouts the picks were chosen among."""


def render_page(facts: RunFacts) -> str:
    """The whole document."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    status = facts.summary.get("status") or "not finished"
    model = facts.config.get("model", {}).get("name", "")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(facts.name)} · penstock</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(facts.name)}</h1>
<div class="dim">{escape(f"{model} · {len(facts.metrics)} steps · {status}")}</div>
{_tiles(facts)}
<h2>Mean reward per step</h2>
{reward_curve([_point(entry) for entry in facts.metrics if entry["reward"] is not None])}
{_steps(facts.metrics)}
<h2>Exact tokens</h2>
{_exactness(facts)}
<h2>How rollouts ended, held-out ones included</h2>
{_table(["end", "rollouts"], facts.ends.items()) if facts.ends else "<p>None yet.</p>"}
<h2>Transcripts</h2>
<p class="dim">{escape(facts.picked_from)}</p>
{"".join(_transcript(pick) for pick in facts.picks)}
<h2>Configuration</h2>
<details><summary>The resolved config of this run</summary><pre>{_json(facts.config, indent=True)}</pre></details>
</body>
</html>
"""


def _tiles(facts: RunFacts) -> str:
    summary, rewards = facts.summary, [entry["reward"] for entry in facts.metrics]
    first = summary.get("first_reward", rewards[0] if rewards else None)
    last = summary.get("last_reward", rewards[-1] if rewards else None)
    exact = _exact_rate(facts.metrics)
    tiles = [
        ("training reward", _change(first, last)),
        ("held-out reward", _change(summary.get("eval_before"), summary.get("eval_after"))),
        ("exact tokens", _percent(exact)),
        ("rollouts", f"{summary.get('rollouts', sum(facts.ends.values())):,}"),
        ("seconds", _number(summary.get("train_seconds"))),
    ]
    return '<div class="tiles">' + "".join(f'<div class="tile">{escape(k)}<b>{escape(v)}</b></div>' for k, v in tiles) + "</div>"


def _exact_rate(metrics: list[dict[str, Any]]) -> float | None:
    sampled = sum(entry["sampled_tokens"] for entry in metrics)
    return sum(entry["exact_tokens"] for entry in metrics) / sampled if sampled else None


def _exactness(facts: RunFacts) -> str:
    """What keeps tokens from being trained as they were sampled, or at all, by reason; entries of old runs may lack some of it."""
    totals: dict[str, Counter[str]] = {"inexact": Counter(), "masked": Counter()}
    for entry in facts.metrics:
        for name, total in totals.items():
            total.update(entry.get(name, {}))
    named = [("tokens not exact", totals["inexact"]), ("steps masked", totals["masked"]), ("breaks", facts.breaks)]
    rows = [(what, reason, f"{count:,}") for what, counted in named for reason, count in counted.items()]
    sampled = sum(entry["sampled_tokens"] for entry in facts.metrics)
    unhashed = sum(entry.get("unhashed_tokens", 0) for entry in facts.metrics)
    said = f"{_percent(_exact_rate(facts.metrics))} of {sampled:,} sampled tokens are exact, {unhashed:,} of them unhashed."
    return f'<p class="dim">{escape(said)}</p>' + (_table(["what", "reason", "count"], rows) if rows else "")


def _point(entry: dict[str, Any]) -> Point:
    counted = f"{entry['rollouts']} rollouts, {entry['groups_equal']} of {entry['groups']} groups of equal reward"
    return Point(
        step=entry["step"], reward=entry["reward"], title=f"step {entry['step']}: reward {_number(entry['reward'])}, {counted}"
    )


def _steps(metrics: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for entry in metrics for name, value in entry.items() if not isinstance(value, dict | list)))
    rows = [[_number(entry.get(name)) for name in names] for entry in metrics]
    return (
        f'<details><summary>Every step in numbers</summary><div class="wide">{_table(names, rows)}</div></details>' if rows else ""
    )


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _transcript(pick: Pick) -> str:
    attempt = pick.attempt
    said = f"{attempt.rollout.id}: reward {_number(attempt.reward)}, {attempt.end or 'running'}"
    parts = [f'<p class="dim">{escape(attempt.message)}</p>' if attempt.message else ""]
    if pick.task.label is not None:
        parts.append(f'<p class="dim">label: {escape(_cut(pick.task.label))}</p>')
    told = transcripts(attempt)
    for name, transcript in told.items():
        parts.append(f"<h3>{escape(name)}</h3>" if len(told) > 1 else "")
        parts += [_message(message) for message in transcript.messages]
    return f"<details><summary><b>{escape(pick.why)}</b> {escape(said)}</summary>{''.join(parts)}</details>"


def _message(message: Message) -> str:
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
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"


def _change(before: float | None, after: float | None) -> str:
    return " → ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def _percent(share: float | None) -> str:
    """Never rounded up to 100."""
    return "-" if share is None else f"{int(share * 10000) / 100:g} %"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
