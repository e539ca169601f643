"""Rollouts as ATIF trajectories (Agent Trajectory Interchange Format, v1.4), a JSON file for each transcript. Written, never read.

ATIF is a line of turns, a rollout is a graph: a file holds the path to the transcript's last reply, and says how many calls it
leaves out. Fields that ATIF has no name for are under `extra.penstock`.
"""

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from penstock.errors import ConfigError
from penstock.pool.paging import Whole
from penstock.records import Attempt, Message, Node, Step, Task
from penstock.system.files import creating

SCHEMA = "ATIF-v1.4"
NAME_LIMIT = 200


@dataclass(slots=True)
class AtifSink:
    """Writes a file for each transcript."""

    folder: Path

    def write(self, whole: Whole) -> None:
        for attempt in whole.attempts:
            made = trajectories(whole.group.task, attempt)
            for transcript, trajectory in made.items():
                name = attempt.rollout.id if len(made) == 1 else f"{attempt.rollout.id}-{transcript}"
                (self.folder / file_name(name)).write_bytes(orjson.dumps(trajectory, option=orjson.OPT_INDENT_2))


@contextmanager
def open_export(path: Path, channels: Sequence[str]) -> Generator[AtifSink]:
    if path.suffix in (".json", ".jsonl"):
        raise ConfigError(f"{path}: ATIF is one file per rollout; give a folder with --out")
    with creating(path) as part:
        part.mkdir()
        yield AtifSink(part)


def file_name(name: str) -> str:
    """A file for any rollout and transcript, whatever characters and length its name has."""
    plain = quote(name, safe=" @+,=", errors="replace")
    if len(plain) > NAME_LIMIT:
        plain = f"{plain[:NAME_LIMIT]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return f"{plain}.json" if not plain.startswith(".") else f"_{plain}.json"


def trajectories(task: Task, attempt: Attempt) -> dict[str, dict[str, Any]]:
    """A trajectory for each transcript, by name; one without turns where the rollout made no call."""
    last: dict[str, Step] = {}
    for step in attempt.steps:
        if step.finish in ("stop", "length") or step.transcript not in last:
            last[step.transcript] = step
    if not last:
        return {"main": _trajectory(task, attempt, "main", [])}
    return {name: _trajectory(task, attempt, name, _path(attempt, step)) for name, step in last.items()}


class _Turn(NamedTuple):
    """A call on the path: what was added to the conversation, and the reply."""

    node: Node
    step: Step


def _path(attempt: Attempt, step: Step) -> list[_Turn]:
    nodes, steps = {node.id: node for node in attempt.nodes}, {step.index: step for step in attempt.steps}
    path = [_Turn(nodes[step.node], step)]
    while (parent := path[-1].node.parent) is not None:
        path.append(_Turn(nodes[steps[parent].node], steps[parent]))
    return path[::-1]


def _trajectory(task: Task, attempt: Attempt, transcript: str, path: list[_Turn]) -> dict[str, Any]:
    calls = sum(step.transcript == transcript for step in attempt.steps)
    left_out = calls - sum(turn.step.transcript == transcript for turn in path)
    tools = [dict(tool) for tool in path[0].node.tools] if path else []
    steps = _steps(path)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": SCHEMA,
        "session_id": attempt.rollout.id,
        "agent": {"name": transcript, "version": "unknown", **({"extra": {"tools": tools}} if tools else {})},
        "steps": steps,
        **({"notes": f"{left_out} calls on other branches of this transcript are left out"} if left_out else {}),
        "final_metrics": {
            "total_prompt_tokens": sum(one["prompt_tokens"] for one in metrics),
            "total_completion_tokens": sum(one["completion_tokens"] for one in metrics),
            "total_steps": len(steps),
        },
        "extra": {"penstock": _about(task, attempt, transcript, left_out)},
    }


def _about(task: Task, attempt: Attempt, transcript: str, left_out: int) -> dict[str, Any]:
    """What ATIF has no name for."""
    return {
        **asdict(attempt.rollout),
        "transcript": transcript,
        "label": task.label,
        "metadata": task.metadata,
        "end": attempt.end,
        "message": attempt.message.encode("utf-8", "replace").decode(),
        "reward": attempt.reward,
        "grades": [asdict(grade) for grade in attempt.grades],
        "calls_left_out": left_out,
    }


def _steps(path: list[_Turn]) -> list[dict[str, Any]]:
    """The turns in ATIF's form: what a tool said belongs to the agent's turn that called it."""
    steps: list[dict[str, Any]] = []
    prompt: list[int] = []
    for node, step in path:
        for message in node.messages:
            _add_message(steps, message)
        prompt += node.token_ids
        _add_message(steps, step.message)
        steps[-1] |= _sampled(step, prompt)
        prompt += step.completion_ids
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _add_message(steps: list[dict[str, Any]], message: Message) -> None:
    role, text = message.get("role"), _text(message.get("content"))
    if role == "tool" and steps:
        result = {"source_call_id": message.get("tool_call_id"), "content": text}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return
    step: dict[str, Any] = {"source": _SOURCES.get(str(role), "user"), "message": text}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        step |= {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
        step |= {"tool_calls": calls} if calls else {}
    steps.append(step)


_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}


def _text(content: Any) -> str:
    """The text of a message; parts that are no text are named in their place."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = list(content) if isinstance(content, (list, tuple)) else [content]  # pyright: ignore[reportUnknownArgumentType]
    return "".join(part["text"] if isinstance(part, dict) and "text" in part else f"[{_part(part)}]" for part in parts)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _part(part: Any) -> str:
    return str(part.get("type", "part")) if isinstance(part, dict) else "part"  # pyright: ignore[reportUnknownArgumentType]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call; arguments that are no JSON object are kept as text, under a name of their own."""
    function: dict[str, Any] = call.get("function") or {}
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = {"unparsed": arguments}
    named = arguments if isinstance(arguments, dict) else {"value": arguments}  # pyright: ignore[reportUnknownVariableType]
    return {"tool_call_id": str(call.get("id") or ""), "function_name": str(function.get("name") or ""), "arguments": named}


def _sampled(step: Step, prompt: list[int]) -> dict[str, Any]:
    """What is known of a reply beside its text: when it began, and its tokens with the whole prompt before them."""
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(step.completion_ids),
        "prompt_token_ids": list(prompt),
        "completion_token_ids": step.completion_ids,
        "logprobs": step.logprobs,
        "extra": {
            "policy_versions": step.versions,
            "finish": step.finish,
            "sampling": asdict(step.sampling),
            "seconds": step.seconds,
        },
    }
    when = {"timestamp": datetime.fromtimestamp(step.created, UTC).isoformat()} if step.created else {}
    return {**when, "metrics": metrics, "extra": {"step": step.index}}
