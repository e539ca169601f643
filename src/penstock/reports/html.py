"""Builds parts of the HTML reports: page, tables, transcripts, and charts as inline SVG. No part needs a script."""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import orjson

from penstock.records import Attempt, Message, Task
from penstock.rollout.transcripts import transcripts

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPoint:
    """A point of the reward curve."""

    step: int
    reward: float
    title: str
    """Text of the tooltip."""


def reward_curve(points: list[ChartPoint], heldout: Sequence[ChartPoint] = ()) -> str:
    """Returns an `<svg>` with a tooltip per step. `heldout` rewards are drawn as rings.

    The axis spans 0 to 1 if all rewards lie within, else a rounded range around them.
    """
    if not points:
        return '<p class="dim">No step has been trained yet.</p>'
    first, last = points[0].step, points[-1].step
    rings = [point for point in heldout if first <= point.step <= last]
    low, high, ticks = _scale([p.reward for p in (*points, *rings)])

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (reward - low) / (high - low))

    parts = [_row(tick, y(tick)) for tick in ticks]
    parts += [_column(step, x(step)) for step in _some_steps(first, last)]
    line = " ".join(f"{x(p.step):.1f},{y(p.reward):.1f}" for p in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    reach = max(3.0, (WIDTH - LEFT - RIGHT) / max(1, last - first) / 2)
    parts += [_mark(p, x(p.step), y(p.reward), reach) for p in points]
    parts += [_ring(p, x(p.step), y(p.reward)) for p in rings]
    label = f"Mean reward per step, from {points[0].reward:.3f} to {points[-1].reward:.3f}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _scale(rewards: list[float]) -> tuple[float, float, list[float]]:
    low, high = min(rewards), max(rewards)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]
    span = (high - low) or max(1.0, abs(high))
    unit = 10 ** math.floor(math.log10(span))
    step = next(unit * m for m in (0.25, 0.5, 1, 2.5) if span / (unit * m) <= 5)
    bottom, top = math.floor(low / step), math.ceil(high / step)
    top = max(top, bottom + 1)
    return bottom * step, top * step, [n * step for n in range(bottom, top + 1)]


def _some_steps(first: int, last: int) -> list[int]:
    """Returns about ten steps to label on the axis."""
    gap = max(1, math.ceil((last - first + 1) / 10))
    return list(range(first, last + 1, gap))


def _row(tick: float, y: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'


def _column(step: int, x: float) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>'


def _ring(point: ChartPoint, x: float, y: float) -> str:
    return f'<g><circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="5"/><title>{escape(point.title)}</title></g>'


def _mark(point: ChartPoint, x: float, y: float, reach: float) -> str:
    dot = f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    target = f'<rect class="target" x="{x - reach:.1f}" y="{TOP}" width="{2 * reach:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
    return f"<g>{target}{dot}<title>{escape(point.title)}</title></g>"


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
svg { width: 100%; height: auto; } .grid { stroke: var(--line); } .line { fill: none; stroke: var(--mark); stroke-width: 2; }
.dot { fill: var(--mark); } .held { fill: var(--page); stroke: var(--ink); stroke-width: 2; }
.target { fill: transparent; } g:hover .target { fill: var(--line); fill-opacity: .5; }
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
class TranscriptPick:
    """A rollout chosen for the report, and why."""

    why: str
    task: Task
    attempt: Attempt
    note: str = ""
    """The judge's explanation."""


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


def config_section(config: dict[str, Any], of: str) -> str:
    body = f"<summary>The resolved config of this {of}</summary><pre>{_json(config, indent=True)}</pre>"
    return f"<h2>Configuration</h2>\n<details>{body}</details>"


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def transcript(pick: TranscriptPick) -> str:
    """Returns a rollout's messages, folded under a summary line."""
    attempt = pick.attempt
    summary = f"{attempt.rollout.id}: reward {number(attempt.reward)}, {attempt.end or 'running'}"
    parts = [f'<p class="dim">{escape(attempt.message)}</p>' if attempt.message else ""]
    if pick.task.label is not None:
        parts.append(f'<p class="dim">label: {escape(_cut(pick.task.label))}</p>')
    if pick.note:
        parts.append(f'<p class="dim">judge: {escape(_cut(pick.note))}</p>')
    found = transcripts(attempt)
    for name, transcript in found.items():
        parts.append(f"<h3>{escape(name)}</h3>" if len(found) > 1 else "")
        parts += [_tools(transcript.tools), *_messages(transcript.messages)]
    return f"<details><summary><b>{escape(pick.why)}</b> {escape(summary)}</summary>{''.join(parts)}</details>"


def _tools(schemas: list[dict[str, Any]]) -> str:
    names = [str((schema.get("function") or schema).get("name")) for schema in schemas]
    return f'<p class="dim">tools: {escape(_cut(", ".join(names)))}</p>' if names else ""


def _messages(messages: list[Message]) -> list[str]:
    if len(messages) <= 2 * MAX_MESSAGES:
        return [_message(message) for message in messages]
    left_out = f'<p class="dim">{len(messages) - 2 * MAX_MESSAGES:,} messages are left out here</p>'
    return [*map(_message, messages[:MAX_MESSAGES]), left_out, *map(_message, messages[-MAX_MESSAGES:])]


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
    return (
        text
        if len(text) <= MAX_MESSAGE_CHARS
        else f"{text[:MAX_MESSAGE_CHARS]}… ({len(text) - MAX_MESSAGE_CHARS:,} more characters)"
    )


def change(before: float | None, after: float | None) -> str:
    """Returns `before → after`, with a dash for None."""
    return " → ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def percent(share: float | None) -> str:
    """Returns a share in percent, rounded down, so that only 1.0 shows as 100."""
    return "-" if share is None else f"{int(share * 10000) / 100:g} %"


def number(value: Any) -> str:
    """Formats a float with four significant digits, and None as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
