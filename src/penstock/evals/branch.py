"""`penstock branch`: runs continuations from the steps of a recorded rollout, and estimates the value of each step."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import RunConfig, make_config, override
from penstock.errors import ConfigError, PoolError
from penstock.evals.metrics import Estimate, estimate_draws
from penstock.evals.run import MAY_CHANGE, grading_digests, run_until_stopped
from penstock.events import Events, Listener
from penstock.pool.base import Pool
from penstock.pool.location import find_pool, open_pool_at
from penstock.records import BranchPoint, End, Rollout, Task
from penstock.rollout.branches import CHANNEL, UNFINISHED, branch_group, calls_of, run_branches
from penstock.run.folder import find_run_folder, locked, open_run_folder
from penstock.run.inputs import Inputs
from penstock.run.opening import bind_pool, open_pool, open_rollout_runner, sampling

FOLDER = "branches"
"""Folder of all branches, next to the runs."""
MAX_GROUPS = 100_000


class RecordedRollout(NamedTuple):
    """A rollout to branch from."""

    run: Path
    task: Task
    rollout: Rollout


class StepValue(NamedTuple):
    """The value of a rollout before the call of a step."""

    step: int
    group: str
    """The group that the continuations are in."""
    value: Estimate | None
    """Mean reward of the continuations that completed; None if none did."""
    gain: float | None
    """How much the call added: the value before the next call, or the recorded reward after the last, less this one."""
    rewards: tuple[float, ...]
    ends: dict[str, int]
    problem: str
    """The most common message of those that did not complete."""
    said: str
    """The recorded reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchReport:
    rollout: str
    run: str
    folder: str
    model: str
    reward: float | None
    """The recorded rollout's."""
    status: str
    """"finished", or "stopped" if the same command resumes it."""
    steps: list[StepValue]

    @property
    def all_void(self) -> bool:
        return not any(step.rewards for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        steps = [{**step._asdict(), "value": step.value and step.value._asdict()} for step in self.steps]
        return asdict(self) | {"steps": steps}


def read_rollout(run: Path, rollout_id: str) -> RecordedRollout:
    """Read a rollout from a run's pool; ConfigError if it is not there or has no steps."""

    async def read() -> RecordedRollout:
        async with open_pool_at(find_pool(run)) as pool:
            try:
                return RecordedRollout(run, await pool.task(rollout_id), await pool.rollout(rollout_id))
            except PoolError as cause:
                if "no rollout" not in str(cause):
                    raise
                raise ConfigError(f"no rollout {rollout_id!r} in {run}; `penstock pool show {run}` lists the groups") from cause

    recorded = asyncio.run(read())
    if not recorded.rollout.steps:
        raise ConfigError(f"rollout {rollout_id} made no model call that was recorded; branch from another one")
    return recorded


def branch_steps(rollout: Rollout, steps: Sequence[int]) -> list[int]:
    """Returns the steps to branch from; all if `steps` is empty. ConfigError for a step that does not exist."""
    known = calls_of(rollout)
    every = {step.index for step in rollout.steps}
    if unknown := [step for step in steps if step not in every]:
        raise ConfigError(f"rollout {rollout.ref.id} has no step {unknown[0]}; its steps are 0 to {max(every)}")
    return sorted(set(steps)) or known


def branch_config(
    recorded: RecordedRollout,
    *,
    count: int,
    name: str | None,
    model: str | None,
    temperature: float | None,
    overrides: Iterable[str],
) -> RunConfig:
    """Returns the settings of the run, with its newest checkpoint as the policy unless `model` names another."""
    folder = find_run_folder(recorded.run)
    tree: dict[str, Any] = folder.settings()["config"]
    config = folder.config()
    tree["run"] |= {
        "name": name or f"{recorded.run.resolve().name}-{recorded.rollout.ref.id}",
        "folder": str(_runs(recorded.run) / FOLDER),
    }
    tree["rollout"] |= {"branches": count}
    newest = _newest_checkpoint(folder.checkpoints) if config.engine.in_process else None
    if model or newest:
        tree["model"] |= {"name": model or str(newest)}
    if temperature is not None:
        tree["sampling"] |= {"temperature": temperature}
    override(tree, overrides)
    return make_config(tree, str(recorded.run / "config.json"))


def _runs(run: Path) -> Path:
    """The folder that all runs are in."""
    parent = (run if run.name not in ("", "..") else run.resolve()).parent
    return parent.parent if parent.name in ("evals", FOLDER) else parent


def _newest_checkpoint(checkpoints: Path) -> Path | None:
    found = [path for path in checkpoints.glob("*") if path.name.isdecimal() and (path / "state.json").exists()]
    return max(found, default=None)


async def branch(
    recorded: RecordedRollout,
    steps: Sequence[int],
    config: RunConfig,
    inputs: Inputs,
    *,
    listener: Listener,
    stop: asyncio.Event,
    fresh: bool = False,
) -> BranchReport:
    """Run `rollout.branches` continuations from each step, or those that an earlier process left; `stop` cancels what runs."""
    folder = open_run_folder(config, fresh=fresh, may_change=MAY_CHANGE, digests=grading_digests(inputs.agent))
    points = [BranchPoint(rollout_id=recorded.rollout.ref.id, step=step) for step in steps]
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        pool = open_pool(config, folder)
        try:
            await bind_pool(pool, folder)
            await _copy(recorded, pool)
            total = len(points) * config.rollout.branches
            done = sum(map(_ended, await _values(points, recorded.rollout, pool)))
            events.emit("branch.begin", model=config.model.name, folder=str(folder.path), rollouts=total - done, done=done)
            if done < total:
                async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
                    asked = sampling(config, temperature=config.sampling.temperature)
                    work = run_branches(points, opened.runner, pool=pool, sampling=asked, limits=config.rollout)
                    await run_until_stopped(work, stop)
            report = BranchReport(
                rollout=recorded.rollout.ref.id,
                run=str(recorded.run),
                folder=str(folder.path),
                model=config.model.name,
                reward=recorded.rollout.reward,
                status="stopped" if stop.is_set() else "finished",
                steps=await _values(points, recorded.rollout, pool),
            )
        finally:
            await pool.close()
        folder.write_summary(orjson.dumps(report.as_json()))
        return report


def _ended(step: StepValue) -> int:
    return sum(count for end, count in step.ends.items() if end not in map(str, UNFINISHED))


async def _copy(recorded: RecordedRollout, pool: Pool) -> None:
    """Store the recorded rollout with its branches, so that they need no other pool."""
    rollout, nodes = recorded.rollout, {node.id: node for node in recorded.rollout.nodes}
    if await pool.rollout_refs(rollout.ref.group_id) and (await pool.rollout(rollout.ref.id)).end is not None:
        return
    await pool.open_group(recorded.task, [rollout.ref], seq=0)
    for step in sorted(rollout.steps, key=lambda step: step.index):
        await pool.append(step, nodes.pop(step.node, None))
    await pool.end(rollout.ref.id, rollout.end or End.LOST, rollout.message, rollout.grades)


async def _values(points: Sequence[BranchPoint], recorded: Rollout, pool: Pool) -> list[StepValue]:
    groups = {group.id: group for group in await pool.groups(CHANNEL, limit=MAX_GROUPS)}
    made = [groups[branch_group(point)].rollouts if branch_group(point) in groups else () for point in points]
    rewards = [tuple(rollout.reward for rollout in each if rollout.reward is not None) for each in made]
    values = [estimate_draws(each) if each else None for each in rewards]
    calls, said = calls_of(recorded), {step.index: str(step.message.get("content") or "") for step in recorded.steps}
    known = {point.step: value.value for point, value in zip(points, values, strict=True) if value is not None}
    found: list[StepValue] = []
    for point, rollouts, each, value in zip(points, made, rewards, values, strict=True):
        later = next((call for call in calls if call > point.step), None)
        after = recorded.reward if later is None else known.get(later)
        failed = Counter(rollout.message for rollout in rollouts if rollout.end not in (None, End.COMPLETED))
        found.append(
            StepValue(
                step=point.step,
                group=branch_group(point),
                value=value,
                gain=None if value is None or after is None else after - value.value,
                rewards=each,
                ends=dict(Counter(str(rollout.end) for rollout in rollouts)),
                problem=failed.most_common(1)[0][0] if failed else "",
                said=said[point.step],
            )
        )
    return found
