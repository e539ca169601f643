"""One attempt for a reader: what it was asked, what was said, how it was graded, what it took. Pure."""

from typing import Any

import orjson

from penstock.controller.runs import Run
from penstock.evals.spending import took
from penstock.records import Attempt, Task
from penstock.rollout.transcripts import transcripts


def trajectory(run: Run, row: int, task: Task, attempt: Attempt) -> bytes:
    """As JSON: every transcript with its messages and tools, every grade, every model call with its tokens and time."""
    told, spent = transcripts(attempt), took(attempt)
    first = next(iter(told.values()), None)
    content: dict[str, Any] = {
        "eval_run": {"id": run.id, "name": run.name},
        "row": row,
        "run": attempt.rollout.place,
        "rollout_id": attempt.rollout.id,
        "task": {"id": task.id, "prompt": task.prompt, "label": task.label, "metadata": task.metadata},
        "end": attempt.end,
        "message": attempt.message,
        "reward": attempt.reward,
        "grades": [{"source": g.source, "reward": g.reward, "transcript": g.transcript, "step": g.step} for g in attempt.grades],
        "messages": first.messages if first else [],
        "transcripts": {name: {"messages": each.messages, "tools": each.tools} for name, each in told.items()},
        "calls": _calls(attempt),
        "tokens": {"prompt": spent.prompt_tokens, "sampled": spent.completion_tokens},
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _calls(attempt: Attempt) -> list[dict[str, Any]]:
    return [
        {
            "index": step.index,
            "transcript": step.transcript,
            "finish": step.finish,
            "sampled_tokens": step.sampled,
            "seconds": step.seconds,
            "temperature": step.sampling.temperature,
        }
        for step in attempt.steps
    ]
