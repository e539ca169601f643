"""Rollouts as ATIF trajectories (Agent Trajectory Interchange Format, v1.4): one JSON file per transcript. Export only.

An ATIF trajectory is a list of turns, a rollout is a graph: a file holds the path to the transcript's last reply, and records how
many calls it leaves out. Fields that ATIF has no name for are under `extra.penstock`.
"""

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import orjson

from penstock.errors import ConfigError
from penstock.pool.export.histories import GroupHistory
from penstock.records import Message, Node, Rollout, Step, Task
from penstock.system.files import creating

SCHEMA = "ATIF-v1.4"
NAME_LIMIT = 200


@dataclass(slots=True)
class AtifSink:
    folder: Path

    def write(self, history: GroupHistory) -> None:
        for rollout in history.rollouts:
            by_transcript = trajectories(history.group.task, rollout)
            for transcript, trajectory in by_transcript.items():
                name = rollout.ref.id if len(by_transcript) == 1 else f"{rollout.ref.id}-{transcript}"
                (self.folder / file_name(name)).write_bytes(orjson.dumps(trajectory, option=orjson.OPT_INDENT_2))


@contextmanager
def open_export(path: Path, channels: Sequence[str]) -> Generator[AtifSink]:
    if path.suffix in (".json", ".jsonl"):
        raise ConfigError(f"{path}: ATIF is one file per rollout; give a folder with --out")
    with creating(path) as part:
        part.mkdir()
        yield AtifSink(part)


def file_name(name: str) -> str:
    """Return a safe file name for any rollout and transcript."""
    plain = quote(name, safe=" @+,=", errors="replace")
    if len(plain) > NAME_LIMIT:
        plain = f"{plain[:NAME_LIMIT]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return f"{plain}.json" if not plain.startswith(".") else f"_{plain}.json"


def trajectories(task: Task, rollout: Rollout) -> dict[str, dict[str, Any]]:
    """Return a trajectory per transcript, by name; one without turns if the rollout made no call."""
    last: dict[str, Step] = {}
    for step in rollout.steps:
        if step.finish in ("stop", "length") or step.transcript not in last:
            last[step.transcript] = step
    if not last:
        return {"main": _trajectory(task, rollout, "main", [])}
    return {name: _trajectory(task, rollout, name, _path(rollout, step)) for name, step in last.items()}


class _Turn(NamedTuple):
    """A call on the path: the messages that it added, and the reply."""

    node: Node
    step: Step


def _path(rollout: Rollout, step: Step) -> list[_Turn]:
    nodes, steps = {node.id: node for node in rollout.nodes}, {step.index: step for step in rollout.steps}
    path = [_Turn(nodes[step.node], step)]
    while (parent := path[-1].node.parent) is not None:
        path.append(_Turn(nodes[steps[parent].node], steps[parent]))
    return path[::-1]


def _trajectory(task: Task, rollout: Rollout, transcript: str, path: list[_Turn]) -> dict[str, Any]:
    calls = sum(step.transcript == transcript for step in rollout.steps)
    left_out = calls - sum(turn.step.transcript == transcript for turn in path)
    tools = [dict(tool) for tool in path[0].node.tools] if path else []
    steps = _steps(path)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": SCHEMA,
        "session_id": rollout.ref.id,
        "agent": {"name": transcript, "version": "unknown", **({"extra": {"tools": tools}} if tools else {})},
        "steps": steps,
        **({"notes": f"{left_out} calls on other branches of this transcript are left out"} if left_out else {}),
        "final_metrics": {
            "total_prompt_tokens": sum(entry["prompt_tokens"] for entry in metrics),
            "total_completion_tokens": sum(entry["completion_tokens"] for entry in metrics),
            "total_steps": len(steps),
        },
        "extra": {"penstock": _extra(task, rollout, transcript, left_out)},
    }


def _extra(task: Task, rollout: Rollout, transcript: str, left_out: int) -> dict[str, Any]:
    return {
        **asdict(rollout.ref),
        "transcript": transcript,
        "label": task.label,
        "metadata": task.metadata,
        "end": rollout.end,
        "message": rollout.message.encode("utf-8", "replace").decode(),
        "reward": rollout.reward,
        "grades": [asdict(grade) for grade in rollout.grades],
        "calls_left_out": left_out,
    }


def _steps(path: list[_Turn]) -> list[dict[str, Any]]:
    """Return the turns in ATIF's form: a tool's result belongs to the turn that called it."""
    steps: list[dict[str, Any]] = []
    prompt: list[int] = []
    for node, step in path:
        for message in node.messages:
            _add_message(steps, message)
        prompt += node.token_ids
        _add_message(steps, step.message)
        steps[-1] |= _step_metrics(step, prompt)
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
    """Return the text of a message; other parts are replaced by their type."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = list(content) if isinstance(content, (list, tuple)) else [content]  # pyright: ignore[reportUnknownArgumentType]
    return "".join(part["text"] if isinstance(part, dict) and "text" in part else f"[{_part(part)}]" for part in parts)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return "part"
    named = cast("dict[str, Any]", part)
    return f"image sha256:{named['digest']}" if "digest" in named else str(named.get("type", "part"))


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool call; arguments that are not a JSON object are kept under another name."""
    function: dict[str, Any] = call.get("function") or {}
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = {"unparsed": arguments}
    named = arguments if isinstance(arguments, dict) else {"value": arguments}  # pyright: ignore[reportUnknownVariableType]
    return {"tool_call_id": str(call.get("id") or ""), "function_name": str(function.get("name") or ""), "arguments": named}


def _step_metrics(step: Step, prompt: list[int]) -> dict[str, Any]:
    """Return when a reply began, and its tokens with the whole prompt before them."""
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(step.completion_ids),
        "prompt_token_ids": list(prompt),
        "completion_token_ids": step.completion_ids,
        "logprobs": step.logprobs,
        "extra": {
            "policy_versions": step.versions,
            "behaviour_known": step.behaviour_known,
            "finish": step.finish,
            "sampling": asdict(step.sampling),
            "seconds": step.seconds,
        },
    }
    timestamp = {"timestamp": datetime.fromtimestamp(step.created, UTC).isoformat()} if step.created else {}
    return {**timestamp, "metrics": metrics, "extra": {"step": step.index}}
