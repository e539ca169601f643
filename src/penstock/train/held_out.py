"""Held-out evaluations: before and after training, and beside it while it goes on."""

import asyncio
import time
from collections import Counter
from typing import Any, Literal

from penstock.errors import TrainError
from penstock.records import Attempt
from penstock.train.training_run import TrainingRun

When = Literal["before", "during", "after"]


async def evaluate(s: TrainingRun, when: When, step: int) -> float | None:
    """Mean reward over the held-out tasks at the evaluation's own sampling; a failed rollout counts as 0.

    What an earlier process measured is not measured again.
    """
    known, name = s.folder.evaluations(), f"{when}-{step}"
    if name in known or not s.inputs.heldout:
        return known.get(name)
    s.events.emit("eval.start", when=when, step=step, tasks=len(s.inputs.heldout))
    started = time.monotonic()
    attempts = [await s.pool.attempt(rollout_id) for rollout_id in await s.rollouts.evaluate()]
    refuse_all_failed(attempts, "of the held-out evaluation")
    reward = sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts)
    s.folder.add_evaluation(name, reward)
    s.events.emit(
        "eval.end",
        when=when,
        step=step,
        reward=reward,
        rollouts=len(attempts),
        versions=_versions(attempts),
        seconds=round(time.monotonic() - started, 3),
    )
    return reward


class BackgroundEvaluation:
    """Evaluations every `train.eval_every` steps, while the next steps are trained; at most one at a time.

    What is sampled meanwhile is of whatever version the engine serves: `eval.end` tells the first and the last.
    """

    def __init__(self, s: TrainingRun, tasks: asyncio.TaskGroup) -> None:
        self._stations, self._tasks = s, tasks
        self._running: asyncio.Task[None] | None = None
        self._step = 0
        self._ended: dict[str, Any] = {}

    def begin(self, step: int) -> None:
        """Start the evaluation that is due after `step`, if one is; skip it, and say so, while the last one still runs."""
        s, every = self._stations, self._stations.config.train.eval_every
        due = every and step and step % every == 0 and s.inputs.heldout
        if not due or f"during-{step}" in s.folder.evaluations():
            return
        if self._running is not None and not self._running.done():
            s.folder.add_evaluation(f"during-{step}", None)
            s.events.emit("eval.skip", step=step, running=self._step, skipped=count_skipped(s.folder.evaluations()))
            return
        self._step = step
        self._running = self._tasks.create_task(self._evaluate(step))

    def ended(self) -> dict[str, Any]:
        """The evaluation that ended since this was last asked, as a step's metrics show it; empty where none did."""
        ended, self._ended = self._ended, {}
        return ended

    async def finish(self) -> None:
        """Wait for the one that runs; cancelled, it is cancelled too."""
        if self._running is not None:
            await self._running

    def cancel(self) -> None:
        """Give the one that runs up: it is not recorded, so that a later process may measure it."""
        if self._running is not None:
            self._running.cancel()

    async def _evaluate(self, step: int) -> None:
        s = self._stations
        try:
            self._ended = {"eval_step": step, "eval_reward": await evaluate(s, "during", step)}
        except TrainError as error:  # training itself says whether it can go on
            s.folder.add_evaluation(f"during-{step}", None)
            s.events.emit("eval.fail", step=step, message=str(error))


def count_skipped(evaluations: dict[str, float | None]) -> int:
    """How many evaluations were due and have no result."""
    return sum(reward is None for reward in evaluations.values())


def evaluations_during_training(evaluations: dict[str, float | None]) -> dict[str, float | None]:
    """Those made while training went on, by step; None where one was skipped, or all its rollouts failed."""
    return {name.removeprefix("during-"): reward for name, reward in evaluations.items() if name.startswith("during-")}


def _versions(attempts: list[Attempt]) -> list[int]:
    """The lowest and the highest policy version that any of their tokens was sampled by; empty where none was sampled."""
    seen = {version for attempt in attempts for step in attempt.steps for version in step.versions}
    return [min(seen), max(seen)] if seen else []


def refuse_all_failed(attempts: list[Attempt], which: str) -> None:
    """Training cannot go on where every rollout fails: say why, once."""
    if any(attempt.reward is not None for attempt in attempts):
        return
    (end, message), count = Counter((str(a.end), a.message) for a in attempts).most_common(1)[0]
    share = "each" if count == len(attempts) else f"{count} of them"
    raise TrainError(f"all {len(attempts)} rollouts {which} failed, {share} with {end}: {message or 'no message'}")
