"""Branches of the groups that a step trains on, where the advantage needs them: made before credit, never trained."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.records import Attempt, BranchPoint, Group
from penstock.rollout.branches import spread_calls
from penstock.train.advantages.base import needs_of
from penstock.train.algorithm import load_advantage
from penstock.train.training_run import TrainingRun


def refuse_branches(config: RunConfig) -> None:
    """Raises ConfigError if the advantage needs branches and there are none, or none does and there are some."""
    name, needed = config.train.advantage, "branches" in needs_of(load_advantage(config.train))
    if needed and not config.rollout.branches:
        raise ConfigError(f"train.advantage = {name!r} compares continuations; set rollout.branches to how many, such as 4")
    if config.rollout.branches and not needed:
        raise ConfigError(f"train.advantage = {name!r} has no use for rollout.branches; leave it out, or take 'vine'")
    if needed and config.train.kl and config.train.kl_in == "reward":
        text = "takes the divergence off the rewards of rollouts alone, which are compared with their continuations'"
        raise ConfigError(f"train.kl_in = 'reward' {text}; set train.kl_in = 'loss'")


async def with_branches(groups: Sequence[Group], run: TrainingRun, stop: asyncio.Event) -> list[Group] | None:
    """Returns the groups with continuations of their graded rollouts; None if `stop` was set first. A later process goes on."""
    limits = run.config.rollout
    if not limits.branches:
        return list(groups)
    points = [
        BranchPoint(rollout_id=attempt.rollout.id, step=step)
        for group in groups
        for attempt in group.graded
        for step in spread_calls(attempt, limits.branch_calls)
    ]
    work, stopped = asyncio.ensure_future(run.rollouts.branch(points)), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        made = [await run.pool.attempt(name) for name in work.result()]
    finally:
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    return [replace(group, branches=_of(group, made)) for group in groups]


def branch_ends(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns how the branches ended, as `metrics.jsonl` has it; nothing without branches."""
    ends = Counter(str(attempt.end) for group in groups for attempt in group.branches)
    return {"branches": dict(ends)} if ends else {}


def _of(group: Group, made: Sequence[Attempt]) -> tuple[Attempt, ...]:
    names = {attempt.rollout.id for attempt in group.attempts}
    return tuple(each for each in made if each.rollout.branch is not None and each.rollout.branch.rollout_id in names)
