"""What a rollout's calls were credited with in training: as the trainer recorded it, else computed again from the stored rewards.

Credit is one number for a rollout, or one for each policy, call or token. A function of the run's own is named in a file that may
come from anywhere, so it is never imported: its credit is known where the trainer recorded it.
"""

import base64
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import orjson

from penstock.config import TrainSection, validate
from penstock.errors import ConfigError, PenstockError
from penstock.pool import reads
from penstock.pool.base import PoolDatabase
from penstock.pool.rules import GroupState
from penstock.records import Group, Rollout
from penstock.train.advantages import ADVANTAGES
from penstock.train.advantages.base import Credit, credit_by_step, described
from penstock.train.algorithm import Advantage, load_advantage
from penstock.train.credit import attempt_of, group_of, overlong
from penstock.train.sequences import Graph, read_graph, step_masks, why_untrainable
from penstock.view.queries import REASONS, group_rows, state_of, trained_version
from penstock.view.run_files import ViewedRun

BUILT_IN_ADVANTAGES = frozenset(ADVANTAGES.table)
FROM_REWARDS = frozenset({"grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k"})
"""Advantages that read rewards alone: a group without its steps is enough for them."""


class CallCredit(NamedTuple):
    """The advantage of a call's tokens."""

    mean: float
    low: float
    high: float

    @property
    def number(self) -> float | None:
        """What all tokens have; None if they differ."""
        return self.mean if self.low == self.high else None


class TrainingCredit(NamedTuple):
    """What became of a rollout's tokens in training."""

    state: str
    """Of its group."""
    version: int | None
    """The policy version that its group was trained into."""
    step: int | None
    policies: Mapping[str, float]
    """The advantage in each policy's view of the group; empty in a run with one policy."""
    advantage: float | None
    """What all calls have; None if they differ, or if there are several policies, or if it is not known."""
    calls: dict[int, CallCredit]
    """Of each call, where it is known."""
    unknown: str
    """Why nothing is known; mostly empty."""
    masks: dict[int, str | None]
    """Per call: why its tokens were not trained; None if they were, or will be."""
    scores: dict[int, "SequenceScores"]
    """What the trainer recorded of each call."""

    @property
    def level(self) -> Literal["rollout", "policy", "call", "token", ""]:
        """What has its own advantage; empty if none is known."""
        if self.advantage is not None:
            return "rollout"
        if self.policies:
            return "policy"
        if any(each.number is None for each in self.calls.values()):
            return "token"
        return "call" if self.calls else ""

    def as_json(self) -> dict[str, Any]:
        fields = ("state", "version", "step", "advantage", "policies", "level", "unknown")
        return {name: getattr(self, name) for name in fields}

    def call_json(self, call: int) -> dict[str, float] | None:
        return self.calls[call]._asdict() if call in self.calls else None

    def verdict(self, call: int) -> dict[str, Any]:
        reason = self.masks.get(call)
        trained = reason is None and self.state == GroupState.TRAINED
        if reason is None and not trained:
            reason = "stale" if self.state == GroupState.STALE else "not_trained"
        return {
            "trained": trained,
            "mask": None if trained else reason,
            "mask_text": None if trained else REASONS.get(reason or ""),
        }


def rollout_credit(files: ViewedRun, database: PoolDatabase, attempt: Rollout) -> TrainingCredit:
    """Returns the credit of one rollout, which has its nodes and steps."""
    group_id = attempt.ref.group_id
    group = _read_group(files, database, group_id)
    return _credits(files, database, group_id, [attempt], computed_credit(files, group) if group else {})[attempt.ref.id]


def group_credit(files: ViewedRun, database: PoolDatabase, group: Group) -> dict[str, TrainingCredit]:
    """Returns the credit of every rollout of a group, by id; they have their nodes and steps."""
    return _credits(files, database, group.id, group.rollouts, computed_credit(files, group))


def row_advantages(files: ViewedRun, group: Group) -> dict[str, float]:
    """Returns the advantage of each graded rollout of a group without its steps; nothing if more than rewards decides it."""
    section = _section(files)
    if section is None or not _needs_rewards_only(files, section):
        return {}
    found = computed_credit(files, group).get("", {})
    return {name: credit for name, credit in found.items() if not isinstance(credit, Mapping)}


def _credits(
    files: ViewedRun,
    database: PoolDatabase,
    group_id: str,
    attempts: Collection[Rollout],
    computed: Mapping[str, Mapping[str, Credit]],
) -> dict[str, TrainingCredit]:
    state, version, step = state_of(database, group_id), trained_version(database, group_id), files.metrics.step_of(group_id)
    names = [attempt.ref.id for attempt in attempts]
    recorded = read_scores(files.path, step, names) if step is not None else {}
    found = dict[str, TrainingCredit]()
    for attempt in attempts:
        name, graph = attempt.ref.id, read_graph(attempt)
        own = {policy: credit[name] for policy, credit in computed.items() if name in credit}
        masks = _masks(files, attempt, graph, own)
        scores = _align(recorded.get(name, ()), graph, masks)
        calls = _calls(attempt, own, scores)
        numbers = {policy: credit for policy, credit in own.items() if not isinstance(credit, Mapping)}
        advantage = numbers.get("", None if own or files.config.get("policies") else _same(calls))
        unknown = "" if calls or own or attempt.reward is None or state != GroupState.TRAINED else _why_unknown(files)
        policies = {policy: number for policy, number in numbers.items() if policy}
        found[name] = TrainingCredit(state, version, step, policies, advantage, calls, unknown, masks, scores)
    return found


def _calls(attempt: Rollout, computed: Mapping[str, Credit], scores: "Mapping[int, SequenceScores]") -> dict[int, CallCredit]:
    found = dict[int, CallCredit]()
    for policy, credit in computed.items():
        by_step = credit_by_step(attempt_of(attempt, policy) if policy else attempt, credit)
        found |= {index: CallCredit(value, value, value) for index, value in by_step.items()}
    for index, columns in scores.items():
        if values := columns.advantages:
            found[index] = CallCredit(sum(values) / len(values), min(values), max(values))
    return dict(sorted(found.items()))


def _same(calls: Mapping[int, CallCredit]) -> float | None:
    numbers = {each.number for each in calls.values()}
    return numbers.pop() if len(numbers) == 1 else None


# Computed again


def computed_credit(files: ViewedRun, group: Group) -> dict[str, dict[str, Credit]]:
    """Returns the credit of each graded rollout by policy (the empty name in a run with one) and id, computed from its rewards.

    It lacks what is computed by a function of the run's own, from more than the group, or by token.
    """
    section, found = _section(files), dict[str, dict[str, Credit]]()
    if section is None or group.channel != "train" or _divergence_counts(section):
        return found
    if (advantage := _group_advantage(section)) is None:
        return found
    for policy in _trained_policies(files):
        view = group_of(group, policy) if policy else group
        view = view if section.overlong is None else overlong(view, section.overlong)
        found[policy] = {attempt.ref.id: credit for attempt, credit in zip(view.graded, advantage(view), strict=True)}
    return found


def _section(files: ViewedRun) -> TrainSection | None:
    """Returns `[train]`; None if the run does not train, or its file was edited or is of another version."""
    try:
        return validate(TrainSection, files.config.get("train") or {}, "config.json") if files.kind == "train" else None
    except ConfigError:
        return None


def _group_advantage(section: TrainSection) -> Advantage | None:
    if section.advantage not in BUILT_IN_ADVANTAGES:
        return None
    try:
        advantage = load_advantage(section)
    except ConfigError:
        return None
    return advantage if advantage.level == "group" else None


def _divergence_counts(section: TrainSection) -> bool:
    """Whether rewards are less the distance from the reference policy, which only the trainer knows."""
    return bool(section.kl) and section.kl_in == "reward"


def _needs_rewards_only(files: ViewedRun, section: TrainSection) -> bool:
    return section.advantage in FROM_REWARDS and section.overlong is None and not files.config.get("policies")


def _trained_policies(files: ViewedRun) -> list[str]:
    policies = files.config.get("policies")
    if not isinstance(policies, dict) or not policies:
        return [""]
    named = cast("dict[str, Any]", policies)
    return [name for name, section in named.items() if not (isinstance(section, dict) and section.get("frozen"))]


def _read_group(files: ViewedRun, database: PoolDatabase, group_id: str) -> Group | None:
    """Returns a group, with its steps if credit depends on them; None if it cannot be read whole."""
    section = _section(files)
    if section is None or _needs_rewards_only(files, section):
        return next((row.group for row in group_rows(database, [group_id])), None)
    try:
        return reads.read_groups(database, [group_id])[0]
    except PenstockError:
        return None


def _why_unknown(files: ViewedRun) -> str:
    section = _section(files)
    if section is None:
        return ""
    if section.advantage not in BUILT_IN_ADVANTAGES:
        reason = "a function of the run's own computed it"
    elif _divergence_counts(section):
        reason = "the divergence was taken off the rewards"
    else:
        level = described(ADVANTAGES.load(section.advantage)).level
        reason = {"batch": "it was computed over all groups of the step", "token": "it was computed for each token"}.get(level, "")
    return f"{reason}, and the trainer kept no scores of this rollout" if reason else ""


def _masks(files: ViewedRun, attempt: Rollout, graph: Graph, computed: Mapping[str, Credit]) -> dict[int, str | None]:
    if attempt.reward is None:
        return dict.fromkeys(graph.steps, "ungraded")
    if attempt.curated_out:
        return dict.fromkeys(graph.steps, "curated")
    recompute = files.setting("train", "unknown_logprobs") == "recompute"
    # Without credit only what holds at any credit is known.
    masks = {index: why_untrainable(call, graph) for index, call in graph.steps.items()}
    for policy, credit in computed.items():
        view = attempt_of(attempt, policy) if policy else attempt
        masks |= step_masks(view, read_graph(view) if policy else graph, credit, recompute=recompute)
    return masks


# As the trainer recorded it: see `train/scores.py`


class SequenceScores(NamedTuple):
    """Of trained tokens in order: those of a sequence, or of one call."""

    gap: tuple[float, ...]
    """The trainer's log-probability less the engine's."""
    entropy: tuple[float, ...]
    advantages: tuple[float, ...]
    steps: tuple[int, ...] = ()
    """Which call sampled it; empty in files of an earlier penstock."""

    def part(self, span: slice) -> "SequenceScores":
        return SequenceScores(self.gap[span], self.entropy[span], self.advantages[span], self.steps[span])


def _align(scores: Iterable[SequenceScores], graph: Graph, masks: dict[int, str | None]) -> dict[int, SequenceScores]:
    """Gives each trained call its part of the sequences. Where the trainer recorded calls, `masks` is corrected by them."""
    known = list(scores)
    if not known or not all(each.steps for each in known):
        return _align_by_path(known, graph, masks)
    found = {step: columns.part(span) for columns in known for step, span in _spans(columns.steps)}
    if any(step not in graph.steps or len(part.gap) != len(graph.steps[step].completion_ids) for step, part in found.items()):
        return {}  # it was trained from other records than these
    masks |= {step: None if step in found else masks.get(step) or "left_out" for step in graph.steps}
    return found


def _spans(steps: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields each call with the place of its tokens, which are together."""
    start = 0
    for step, same in groupby(steps):
        end = start + sum(1 for _ in same)
        yield step, slice(start, end)
        start = end


def _align_by_path(scores: list[SequenceScores], graph: Graph, masks: Mapping[int, str | None]) -> dict[int, SequenceScores]:
    """The same for sequences that name no calls: they follow the paths of the graph in order."""
    left = {index for index in graph.steps if masks.get(index) is None}
    found, remaining = dict[int, SequenceScores](), list(scores)
    for path in graph.paths:
        mine = [index for index in path if index in left]
        if not mine or not remaining:
            continue
        left.difference_update(mine)
        columns, start = remaining.pop(0), 0
        if len(columns.gap) != sum(len(graph.steps[index].completion_ids) for index in mine):
            return {}  # it was trained from other records than these
        for index in mine:
            span = slice(start, start + len(graph.steps[index].completion_ids))
            found[index], start = columns.part(span), span.stop
    return found


def read_scores(folder: Path, step: int, rollout_ids: Collection[str]) -> dict[str, list[SequenceScores]]:
    """Returns what the trainer recorded of rollouts' sequences in a step, by rollout; lacks those of which it recorded nothing."""
    found, wanted = dict[str, list[SequenceScores]](), [name.encode() for name in rollout_ids]
    try:
        with (folder / "scores" / f"{step:06d}.jsonl").open("rb") as file:
            lines = [orjson.loads(line) for line in file if line.endswith(b"\n") and any(name in line for name in wanted)]
        for line in lines:
            if line["rollout_id"] in rollout_ids:
                found.setdefault(line["rollout_id"], []).append(_sequence_scores(line))
    except (OSError, ValueError, LookupError, TypeError, struct.error):
        return {}
    return found


def _sequence_scores(line: dict[str, Any]) -> SequenceScores:
    gap, entropy = (unpack_halves(line[name]) for name in ("gap", "entropy"))
    if len(gap) != len(entropy):
        raise ValueError("columns of different lengths")
    return SequenceScores(gap, entropy, _repeated(line["advantages"], len(gap)), _repeated(line.get("steps", ()), len(gap)))


def _repeated(runs: Sequence[tuple[int, Any]], size: int) -> tuple[Any, ...]:
    """Returns the values of runs of `[count, value]`; checked before they are laid out, as a file may claim any count."""
    if runs and sum(count for count, _ in runs) != size:
        raise ValueError("columns of different lengths")
    return tuple(value for count, value in runs for _ in range(count))


def unpack_halves(text: str) -> tuple[float, ...]:
    blob = base64.b64decode(text)
    return struct.unpack(f"<{len(blob) // 2}e", blob)
