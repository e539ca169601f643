"""Checks of a run's tasks before it begins: labels that are missing, prompts that the model cannot read whole."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import RenderError
from penstock.records import Message, Task
from penstock.sdk.discovery import Agent

Render = Callable[[Sequence[Message]], Sequence[int]]
RENDERED = 200
"""Prompts that are rendered, the longest first: enough to say that there is one."""


def missing_labels(tasks: Sequence[Task], agent: Agent, path: Path) -> str:
    """Says how many rows have no label, if others have one or the grader's code speaks of it; else an empty string."""
    lacking = [number for number, task in enumerate(tasks) if task.label is None]
    if not lacking or (len(lacking) == len(tasks) and not _reads_label(agent)):
        return ""
    return (
        f"{path}: {len(lacking)} of {len(tasks)} rows have no label (the first is row {lacking[0]}), and ctx.label is None for the "
        "grader; add the column `label` to them, or let the grader do without"
    )


def _reads_label(agent: Agent) -> bool:
    try:
        return agent.grader is not None and ".label" in inspect.getsource(agent.grader)
    except (OSError, TypeError):  # no source
        return False


def long_prompts(tasks: Sequence[Task], render: Render, context_length: int, path: Path) -> str:
    """Says how many prompts leave no room for a reply in the model's context; else an empty string."""
    # No token is shorter than a byte, and half is left for what the template adds: short texts need not be rendered.
    sizes = [(sum(map(_bytes, task.prompt)), row) for row, task in enumerate(tasks)]
    longest = sorted((each for each in sizes if each[0] >= context_length // 2), reverse=True)[:RENDERED]
    found: list[tuple[int, int]] = []
    for _, row in longest:
        try:
            found.append((len(render(tasks[row].prompt)), row))
        except RenderError:  # the rollout will say so
            continue
    if not (beyond := [each for each in found if each[0] >= context_length]):
        return ""
    tokens, row = max(beyond)
    what = f"{path}: {len(beyond)} of {len(tasks)} prompts are longer than the model's context of {context_length:,} tokens"
    return (
        f"{what} (row {row} has {tokens:,}): a call with the whole prompt will fail; shorten them, leave these rows out, or take a "
        "model with a longer context"
    )


def _bytes(message: Message) -> int:
    return len(str(message.get("content") or "").encode("utf-8", "replace"))
