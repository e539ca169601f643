"""Held-out evaluations: before training, after it, and in the background while it runs."""

import asyncio
import time
from collections import Counter
from typing import Any, Literal

from penstock.errors import TrainError
from penstock.records import Rollout
from penstock.train.resources import TrainingRun

When = Literal["before", "during", "after"]


async def evaluate(run: TrainingRun, when: When, step: int) -> float | None:
    """Mean reward over the held-out tasks at the evaluation's own sampling; a failed rollout counts as 0.

    A result that an earlier process recorded is returned as it is.
    """
    known, name = run.folder.evaluations(), f"{when}-{step}"
    if name in known or not run.inputs.heldout:
        return known.get(name)
    run.events.emit("eval.start", when=when, step=step, tasks=len(run.inputs.heldout))
    started = time.monotonic()
    attempts = [await run.pool.rollout(rollout_id) for rollout_id in await run.rollouts.evaluate()]
    refuse_all_failed(attempts, "of the held-out evaluation")
    rewards = [attempt.reward or 0.0 for attempt in attempts]
    reward = sum(rewards) / len(rewards)
    run.folder.add_evaluation(name, reward, rewards)
    run.events.emit(
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

    Their tokens are sampled by whatever version the engine serves then: `eval.end` has the first and the last.
    """

    def __init__(self, run: TrainingRun, tasks: asyncio.TaskGroup) -> None:
        self._run, self._tasks = run, tasks
        self._running: asyncio.Task[None] | None = None
        self._step = 0
        self._ended: dict[str, Any] = {}

    def begin(self, step: int) -> None:
        """Start the evaluation that is due after `step`, if one is; it is skipped, with an event, while the last one still runs."""
        run, every = self._run, self._run.config.train.eval_every
        due = every and step and step % every == 0 and run.inputs.heldout
        if not due or f"during-{step}" in run.folder.evaluations():
            return
        if self._running is not None and not self._running.done():
            run.folder.add_evaluation(f"during-{step}", None)
            run.events.emit("eval.skip", step=step, running=self._step, skipped=count_skipped(run.folder.evaluations()))
            return
        self._step = step
        self._running = self._tasks.create_task(self._evaluate(step))

    def ended(self) -> dict[str, Any]:
        """Returns the evaluation that ended since the last call, as metrics of a step; empty if none did."""
        ended, self._ended = self._ended, {}
        return ended

    async def finish(self) -> None:
        """Wait for the running evaluation; if cancelled, it is cancelled too."""
        if self._running is not None:
            await self._running

    def cancel(self) -> None:
        """Cancel the running evaluation: it is not recorded, so that a later process can make it."""
        if self._running is not None:
            self._running.cancel()

    async def _evaluate(self, step: int) -> None:
        run = self._run
        try:
            reward = await evaluate(run, "during", step)
            self._ended = {"eval_step": step, "eval_reward": reward}
        except TrainError as error:  # the training step itself decides whether the run can continue
            run.folder.add_evaluation(f"during-{step}", None)
            run.events.emit("eval.fail", step=step, message=str(error))


def count_skipped(evaluations: dict[str, float | None]) -> int:
    """Returns how many evaluations were due and have no result."""
    return sum(reward is None for reward in evaluations.values())


def evaluations_during_training(evaluations: dict[str, float | None]) -> dict[str, float | None]:
    """Returns the rewards measured during training, by step; None where one was skipped, or all its rollouts failed."""
    return {name.removeprefix("during-"): reward for name, reward in evaluations.items() if name.startswith("during-")}


def _versions(attempts: list[Rollout]) -> list[int]:
    """Returns the lowest and the highest policy version that sampled a token; empty if none was sampled."""
    seen = {version for attempt in attempts for step in attempt.steps for version in step.versions}
    return [min(seen), max(seen)] if seen else []


def refuse_all_failed(attempts: list[Rollout], which: str) -> None:
    """Raises TrainError with the most frequent reason if every rollout failed."""
    if any(attempt.reward is not None for attempt in attempts):
        return
    (end, message), count = Counter((str(a.end), a.message) for a in attempts).most_common(1)[0]
    share = "each" if count == len(attempts) else f"{count} of them"
    raise TrainError(f"all {len(attempts)} rollouts {which} failed, {share} with {end}: {message or 'no message'}")
