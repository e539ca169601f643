"""The screens of a group, a rollout, a call and its tokens, from the records of the pool. Functions return plain JSON values."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.chat.tokenizer import Tokenizer
from penstock.errors import ModelError, PenstockError, RequestError
from penstock.graders.rubric import VERDICT_FILE, read_verdict_file
from penstock.models import find_cached
from penstock.pool import reads
from penstock.pool.base import PoolDatabase
from penstock.records import Node, Rollout, Step
from penstock.train.sequences import Graph, read_graph
from penstock.view.credit import SequenceScores, TrainingCredit, group_credit, rollout_credit
from penstock.view.queries import REASONS, cut, state_of, trained_version
from penstock.view.run_files import ViewedRun

PAGE_CALLS = 100
MAX_TOKENS = 4000
"""Tokens in one answer."""
PROMPT_TOKENS = 300
"""Tokens of the prompt before a reply that are shown with it."""
NEXT_TOKENS = 40
"""Tokens shown after the place where the attempts of a group part."""
MAX_ARTIFACTS = 100
NOTE_FILE = "note.txt"
MAX_NOTE_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 128 << 20


# Group


def group_screen(files: ViewedRun, database: PoolDatabase, group_id: str) -> dict[str, Any]:
    """Returns the attempts of a group side by side, and where their tokens part."""
    try:
        (group,) = reads.read_groups(database, [group_id])
    except PenstockError as error:
        raise RequestError(str(error), status=404, code="unknown_group") from error
    credit, version = group_credit(files, database, group), trained_version(database, group_id)
    text, paths = TokenTexts.of(files), [_main_path(attempt) for attempt in group.rollouts]
    parting = _first_difference([path.ids for path in paths if path.ids])
    return {
        "id": group.id,
        "seq": group.seq,
        "channel": group.channel,
        "state": state_of(database, group_id),
        "version": version,
        "step": files.metrics.step_of(group_id),
        "task": {
            "id": group.task.id,
            "prompt": cut(group.task.prompt),
            "label": cut(group.task.label),
            "metadata": cut(group.task.metadata),
        },
        "parting": parting,
        "attempts": [
            {
                **_attempt_head(attempt),
                **_attempt_credit(credit[attempt.ref.id]),
                "calls": len(attempt.steps),
                "tokens": sum(step.sampled for step in attempt.steps),
                "parts_at": None if parting is None else path.step_at(parting),
                "next": text.joined(path.ids[parting : parting + NEXT_TOKENS]) if parting is not None else "",
                "last": cut(attempt.steps[-1].message.get("content") if attempt.steps else "", 2000),
            }
            for attempt, path in zip(group.rollouts, paths, strict=True)
        ],
        "replaced": [
            {"id": rollout.id, "place": rollout.place, "attempt": rollout.attempt}
            for rollout in reads.list_rollouts(database, group_id)
            if rollout.id not in {attempt.ref.id for attempt in group.rollouts}
        ],
    }


def _attempt_credit(credit: TrainingCredit) -> dict[str, Any]:
    """Returns the advantage of an attempt; of each of its calls where they differ."""
    shown = islice(credit.calls.items(), PAGE_CALLS if credit.level in ("call", "token") else 0)
    return {
        "advantage": credit.advantage,
        "policies": credit.policies,
        "level": credit.level,
        "credits": [{"call": index, **each._asdict()} for index, each in shown],
        "unknown": credit.unknown,
    }


class TokenPathView(NamedTuple):
    """The tokens on the longest path from a rollout's first call."""

    ids: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]
    """Per step on the path: its index, and where its reply ends."""

    def step_at(self, position: int) -> int | None:
        return next((index for index, end in self.ends if position < end), None)


def _main_path(attempt: Rollout) -> TokenPathView:
    graph, ids, ends = read_graph(attempt), list[int](), list[tuple[int, int]]()
    path = max(graph.paths, key=lambda steps: (-steps[0], len(steps)), default=list[int]())
    for index in path:
        step = graph.steps[index]
        ids += graph.nodes[step.node].token_ids
        ids += step.completion_ids
        ends.append((index, len(ids)))
    return TokenPathView(tuple(ids), tuple(ends))


def _first_difference(paths: Sequence[tuple[int, ...]]) -> int | None:
    """Returns the number of tokens that all paths share; None for fewer than two paths."""
    if len(paths) < 2:
        return None
    shortest, first = min(map(len, paths)), paths[0]
    return next((at for at in range(shortest) if any(path[at] != first[at] for path in paths)), shortest)


# Rollout


def rollout_screen(files: ViewedRun, database: PoolDatabase, rollout_id: str, *, first: int = 0) -> dict[str, Any]:
    """Returns a rollout: its end, grades, attempts at the same place, and a page of its calls."""
    attempt = _read(database, rollout_id)
    task = reads.read_task(database, rollout_id)
    credit = rollout_credit(files, database, attempt)
    calls = [call for call in attempt.steps if call.index >= first]
    nodes = {node.id: node for node in attempt.nodes}
    shown = calls[:PAGE_CALLS]
    siblings = reads.list_rollouts(database, attempt.ref.group_id)
    return {
        **_attempt_head(attempt),
        "group": attempt.ref.group_id,
        "channel": attempt.ref.channel,
        "task": {"id": task.id, "prompt": cut(task.prompt), "label": cut(task.label), "metadata": cut(task.metadata)},
        "why": why_reward(attempt),
        "grades": [
            {"reward": each.reward, "source": cut(each.source, 500), "transcript": each.transcript, "step": each.step}
            for each in attempt.grades
        ],
        "marks": [
            {"step": each.step, "trainable": each.trainable, "quality": each.quality, "note": cut(each.note)}
            for each in attempt.marks
        ],
        "note": _grader_note(files.path, rollout_id),
        "artifacts": _artifacts(files.path, rollout_id),
        "credit": credit.as_json(),
        "places": sorted({rollout.id for rollout in siblings if rollout.attempt == 1 or rollout.place != attempt.ref.place})[:200],
        "retries": [rollout.id for rollout in siblings if rollout.place == attempt.ref.place],
        "calls": [_call_line(call, nodes[call.node], credit) for call in shown if call.node in nodes],
        "call_count": len(attempt.steps),
        "next": calls[PAGE_CALLS].index if len(calls) > PAGE_CALLS else None,
    }


def why_reward(attempt: Rollout) -> str:
    """Says in one sentence where the reward comes from, or why there is none."""
    if attempt.end is None:
        return "It is still running."
    if attempt.void:
        return "It does not count: something else than the run's grader graded or ended it."
    if attempt.end != "completed":
        return f"It has no reward, because it ended as {attempt.end}: {cut(attempt.message, 500) or 'no message'}"
    if not attempt.grades:
        return "It has no reward: its grader gave none."
    whole = [grade for grade in attempt.grades if grade.transcript is None and grade.step is None]
    if whole:
        named = ", ".join(f"{name} {value:g}" for name, value in whole[-1].components.items())
        return f"{whole[-1].source} gave {whole[-1].reward:g} to the whole rollout{f', with {named}' if named else ''}."
    parts = [grade for grade in attempt.grades if grade.transcript is not None and grade.step is None]
    if parts:
        return f"It is the mean of {len(parts)} grades of its transcripts."
    return f"It is the sum of {len(attempt.grades)} grades of its calls."


def _read(database: PoolDatabase, rollout_id: str) -> Rollout:
    try:
        return reads.read_rollout(database, rollout_id)
    except PenstockError as error:
        raise RequestError(str(error), status=404, code="unknown_rollout") from error


def _attempt_head(attempt: Rollout) -> dict[str, Any]:
    rollout = attempt.ref
    return {
        "id": rollout.id,
        "place": rollout.place,
        "attempt": rollout.attempt,
        "end": attempt.end,
        "message": cut(attempt.message),
        "reward": attempt.reward,
        "sources": sorted({cut(grade.source, 200) for grade in attempt.grades}),
    }


def _call_line(step: Step, node: Node, credit: TrainingCredit) -> dict[str, Any]:
    return {
        "index": step.index,
        "transcript": step.transcript,
        "policy": step.policy,
        "parent": node.parent,
        "break": node.reason,
        "break_text": REASONS.get(node.reason or ""),
        "messages": cut(node.messages),
        "tools": [cut((tool.get("function") or tool).get("name"), 200) for tool in node.tools[:100]],
        "reply": cut(step.message),
        "finish": step.finish,
        "seconds": step.seconds,
        "created": step.created or None,
        "tokens": step.sampled,
        "added_tokens": len(node.token_ids),
        "versions": sorted({*step.versions}),
        "temperature": step.sampling.temperature,
        "logprob": sum(step.logprobs) / len(step.logprobs) if step.logprobs else None,
        "retry": _repeats(step),
        "advantage": credit.call_json(step.index),
        **credit.verdict(step.index),
    }


def _repeats(step: Step) -> int:
    """Returns how often the same request had been sampled before."""
    count = step.answer.rpartition("-")[2]
    return int(count) if count.isdecimal() and len(count) < 9 else 0


def call_screen(database: PoolDatabase, rollout_id: str, index: int) -> dict[str, Any]:
    """Returns the exact request and reply of one call: all messages on its path."""
    attempt = _read(database, rollout_id)
    graph = read_graph(attempt)
    step, path = _step(attempt, index), list[Node]()
    node = graph.nodes.get(step.node)
    messages = list[Any]()
    while node is not None:
        path.append(node)
        before = graph.steps.get(node.parent) if node.parent is not None else None
        messages[:0] = [*([before.message] if before else []), *node.messages]
        node = graph.nodes.get(before.node) if before else None
    return {
        "request": cut({"messages": messages, "tools": path[-1].tools if path else (), "sampling": _plain(step.sampling)}, 200_000),
        "reply": cut(step.message, 200_000),
        "finish": step.finish,
        "usage": _plain(step.usage),
        "context": step.context_digest,
        "answer": step.answer,
    }


def _plain(record: Any) -> Any:
    return orjson.loads(orjson.dumps(record))


def _step(attempt: Rollout, index: int) -> Step:
    found = next((step for step in attempt.steps if step.index == index), None)
    if found is None:
        raise RequestError(f"rollout {attempt.ref.id} has no call {index}", status=404, code="unknown_step")
    return found


def _grader_note(folder: Path, rollout_id: str) -> str:
    """Returns what a judge said, or what a grader of the author's own wrote into `note.txt`."""
    place = folder / "artifacts" / rollout_id
    for name in (VERDICT_FILE, NOTE_FILE) if _is_name(rollout_id) and not place.is_symlink() else ():
        size = (place / name).stat().st_size if (place / name).is_file() and not (place / name).is_symlink() else 0
        if size > MAX_NOTE_BYTES:
            return f"({name} has {size:,} bytes, too many to be shown)"
        if size:
            return _note_text(place, name)
    return ""


def _note_text(place: Path, name: str) -> str:
    if name == NOTE_FILE:
        return cut((place / name).read_text("utf-8", "replace"))
    verdict = read_verdict_file(place)
    return cut(verdict.explanation) if verdict else f"({name} cannot be read)"


def _artifacts(folder: Path, rollout_id: str) -> list[str]:
    """Returns the names of the files that the agent and its grader left."""
    place = folder / "artifacts" / rollout_id
    if not _is_name(rollout_id) or not place.is_dir() or place.is_symlink():
        return []
    return sorted(
        cut(path.relative_to(place).as_posix(), 300) for path in islice(place.rglob("*"), MAX_ARTIFACTS) if path.is_file()
    )


def _is_name(text: str) -> bool:
    return text not in ("", ".", "..") and not {"/", "\\", "\x00"}.intersection(text)


# Tokens


def tokens_screen(
    files: ViewedRun, database: PoolDatabase, rollout_id: str, index: int, *, first: int | None = None
) -> dict[str, Any]:
    """Returns the tokens of a call as the engine saw them, with all that is recorded of each sampled one."""
    attempt = _read(database, rollout_id)
    graph, step = read_graph(attempt), _step(attempt, index)
    credit, text = rollout_credit(files, database, attempt), TokenTexts.of(files)
    parts = _path_parts(graph, step)
    total = sum(len(part.ids) for part in parts)
    start = max(0, total - len(step.completion_ids) - PROMPT_TOKENS) if first is None else min(first, total)
    shown = list(islice(_numbered(parts), start, start + MAX_TOKENS))
    texts = text.pieces([each.token for each in shown])
    own = [each.at for each in shown if each.call == index]
    return {
        "rollout": rollout_id,
        "call": index,
        "calls": [each.index for each in attempt.steps][:2000],
        "first": start,
        "total": total,
        "more": start + len(shown) < total,
        "has_text": text.tokenizer is not None,
        "ids": [each.token for each in shown],
        "texts": texts,
        "sampled_by": [each.call for each in shown],
        "breaks": [
            {"at": part.start, "reason": part.reason, "text": REASONS.get(part.reason, part.reason)}
            for part in parts
            if part.reason and start <= part.start < start + len(shown)
        ],
        "logprobs": [step.logprobs[at] if at < len(step.logprobs) else None for at in own],
        "full_logprobs": None
        if step.full_logprobs is None
        else [step.full_logprobs[at] for at in own if at < len(step.full_logprobs)],
        "versions": [step.versions[at] if at < len(step.versions) else None for at in own],
        "advantage": credit.calls[index].number if index in credit.calls else credit.advantage,
        "temperature": step.sampling.temperature,
        **credit.verdict(index),
        "flaw": graph.flaws.get(index),
        "credit": credit.as_json(),
        **_trainer_columns(credit.scores.get(index), own),
    }


class PathPart(NamedTuple):
    """Consecutive tokens of a path: those that a node added, or a sampled reply."""

    start: int
    ids: tuple[int, ...]
    call: int | None
    """The call that sampled them; None for tokens of a caller's messages."""
    reason: str


class NumberedToken(NamedTuple):
    token: int
    call: int | None
    at: int
    """Its place in its part."""


def _path_parts(graph: Graph, step: Step) -> list[PathPart]:
    calls, at = [step], step
    while (node := graph.nodes.get(at.node)) is not None and node.parent is not None and node.parent in graph.steps:
        at = graph.steps[node.parent]
        calls.append(at)
    parts, start = list[PathPart](), 0
    for call in reversed(calls):
        node = graph.nodes.get(call.node)
        for ids, number, reason in (
            (node.token_ids if node else (), None, (node and node.reason) or ""),
            (call.completion_ids, call.index, ""),
        ):
            parts.append(PathPart(start, ids, number, reason))
            start += len(ids)
    return parts


def _numbered(parts: Iterable[PathPart]) -> Iterator[NumberedToken]:
    for part in parts:
        for at, token in enumerate(part.ids):
            yield NumberedToken(token, part.call, at)


def _trainer_columns(columns: SequenceScores | None, own: Sequence[int]) -> dict[str, Any]:
    """Returns what the trainer computed for the call's tokens; None where that is not recorded."""
    if columns is None or any(at >= len(columns.gap) for at in own):
        return {"gap": None, "entropy": None, "token_advantages": None}
    return {
        "gap": [columns.gap[at] for at in own],
        "entropy": [columns.entropy[at] for at in own],
        "token_advantages": [columns.advantages[at] for at in own],
    }


class TokenTexts:
    """Token ids as text, with the tokenizer of the run's model where that is here."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, files: ViewedRun) -> "TokenTexts":
        folder = _tokenizer_folder(files)
        return cls(None if folder is None else _load_tokenizer(folder))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds. Bytes that are no whole character yet are shown with the token that ends it."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids]
        decoder = self.tokenizer.decoder(hidden=frozenset())
        pieces = [decoder.push([token]) for token in ids]
        return [*pieces[:-1], pieces[-1] + decoder.finish()] if pieces else []

    def joined(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces(ids))


@lru_cache(maxsize=2)
def _load_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(folder) if (folder / "tokenizer.json").stat().st_size < MAX_TOKENIZER_BYTES else None
    except (ModelError, OSError):
        return None


def _tokenizer_folder(files: ViewedRun) -> Path | None:
    checkpoints = sorted((files.path / "checkpoints").glob("*/tokenizer.json"))
    if checkpoints:
        return checkpoints[-1].parent
    try:
        model = find_cached(str(files.setting("model", "name") or ""))
    except (PenstockError, OSError, ValueError):
        return None
    return model.path if model and (model.path / "tokenizer.json").is_file() else None
