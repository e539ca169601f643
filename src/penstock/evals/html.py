"""Pages that need nothing else: no script, no font, no picture from elsewhere; every text escaped."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import orjson

from penstock.records import Attempt, Message, Task
from penstock.rollout.transcripts import transcripts

LONGEST = 20_000
"""Characters of one message that are shown; what is cut is counted."""
MOST = 100
"""Messages of one transcript that are shown from its beginning, and from its end; others are counted."""

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
class Pick:
    """A rollout worth reading, and why."""

    why: str
    task: Task
    attempt: Attempt
    note: str = ""
    """What a judge said of it."""


def document(title: str, subtitle: str, body: str) -> str:
    """A whole page."""
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
    """The few numbers that a reader asks for first."""
    return '<div class="tiles">' + "".join(f'<div class="tile">{escape(k)}<b>{escape(v)}</b></div>' for k, v in named) + "</div>"


def config_part(config: dict[str, Any], of: str) -> str:
    """The settings that led to it."""
    told = f"<summary>The resolved config of this {of}</summary><pre>{_json(config, indent=True)}</pre>"
    return f"<h2>Configuration</h2>\n<details>{told}</details>"


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Plain."""
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def transcript(pick: Pick) -> str:
    """A rollout to unfold, every message of it."""
    attempt = pick.attempt
    said = f"{attempt.rollout.id}: reward {number(attempt.reward)}, {attempt.end or 'running'}"
    parts = [f'<p class="dim">{escape(attempt.message)}</p>' if attempt.message else ""]
    if pick.task.label is not None:
        parts.append(f'<p class="dim">label: {escape(_cut(pick.task.label))}</p>')
    if pick.note:
        parts.append(f'<p class="dim">judge: {escape(_cut(pick.note))}</p>')
    told = transcripts(attempt)
    for name, transcript in told.items():
        parts.append(f"<h3>{escape(name)}</h3>" if len(told) > 1 else "")
        parts += [_tools(transcript.tools), *_messages(transcript.messages)]
    return f"<details><summary><b>{escape(pick.why)}</b> {escape(said)}</summary>{''.join(parts)}</details>"


def _tools(schemas: list[dict[str, Any]]) -> str:
    names = [str((schema.get("function") or schema).get("name")) for schema in schemas]
    return f'<p class="dim">tools: {escape(_cut(", ".join(names)))}</p>' if names else ""


def _messages(messages: list[Message]) -> list[str]:
    if len(messages) <= 2 * MOST:
        return [_message(message) for message in messages]
    left_out = f'<p class="dim">{len(messages) - 2 * MOST:,} messages are left out here</p>'
    return [*map(_message, messages[:MOST]), left_out, *map(_message, messages[-MOST:])]


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


def change(before: float | None, after: float | None) -> str:
    """From one reward to another."""
    return " → ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def percent(share: float | None) -> str:
    """Never rounded up to 100."""
    return "-" if share is None else f"{int(share * 10000) / 100:g} %"


def number(value: Any) -> str:
    """Four digits, or a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
