"""The summary of a training run: the few numbers that a reader asks for first."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import orjson

from penstock.codec import from_json
from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.run.code import code_changes
from penstock.run.folder import RunFolder
from penstock.run.shortfalls import add_shortfalls, read_shortfalls, shortfalls_json
from penstock.train import policy
from penstock.train.held_out import evaluations_during_training
from penstock.train.loop import TrainProgress
from penstock.train.promotion import promoted_version
from penstock.train.sequential_test import sequential_results
from penstock.train.stalled import FIRST, LAST, why_idle
from penstock.train.training_run import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    name: str
    folder: str
    status: str
    """"finished", or "stopped" if it can be resumed."""
    steps: int
    first_reward: float | None
    """Mean over the first 32 graded rollouts."""
    last_reward: float | None
    """Mean over the last 64 graded rollouts."""
    graded: int | None = None
    """Graded rollouts of the trained steps; None of a run that an earlier penstock summed up."""
    eval_before: float | None
    eval_after: float | None
    evals: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Held-out rewards during training, by step; None where an evaluation was skipped or failed."""
    exact_token_rate: float | None
    """Share of sampled tokens that are trained under exactly the context they were sampled under; None before the first."""
    rollouts: int
    sampled_tokens: int
    trained_tokens: int
    train_seconds: float
    """Of rollouts and updates, evaluation and loading left out."""
    policy_version: int
    checkpoint: str | None
    ends: dict[str, int]
    """How the training rollouts ended, attempts that a kill cut off included."""
    shortfalls: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """How many of the trained groups' rollouts failed, were not graded, and were wrong (below `eval.passes`), with the reason."""
    inexact: dict[str, int] = field(default_factory=dict[str, int])
    """The sampled tokens that are not exact, by reason."""
    unhashed_tokens: int = 0
    """Of the exact ones, those recorded without a digest of their context."""
    behaviour_unknown_tokens: int = 0
    """Sampled tokens whose engine did not tell the probabilities that it sampled with; see `train.unknown_logprobs`."""
    recomputed_tokens: int = 0
    """Of those, the ones that were trained with the trainer's own."""
    masked: dict[str, int] = field(default_factory=dict[str, int])
    """Steps of graded rollouts that were not trained, by reason."""
    notices: dict[str, int] = field(default_factory=dict[str, int])
    """What the gateway did not do as agents asked, by name: capped lengths, replies that were cut, ignored fields."""
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How often a caller's messages were rendered anew although the rollout had earlier steps, by reason."""
    checkpoints_damaged: int = 0
    """Checkpoints that were damaged on disk and passed over; the run went on from an earlier one."""
    groups_undone: int = 0
    """Groups that were trained into those, and therefore again."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that were taken out of training, by reason."""
    updates: int | None = None
    """Steps that published a version; None of a run that an earlier penstock summed up."""
    stalled: str = ""
    """Why the last steps made no update, and what to do; empty if the last one did."""
    better: str = ""
    """At which evaluations it was established, at 95 %, that the policy is better than before; empty if that cannot be told."""
    promoted: int | None = None
    """The version in `promoted/`; see `train.promote`."""
    alarms: list[str] = field(default_factory=list[str])
    """What was raised, with the step; see `train.on_alarm`."""
    stopped_by: str = ""
    """The alarms that stopped it; empty if none did."""
    code_changes: list[str] = field(default_factory=list[str])
    """When the author's code changed while the run went on, and in which files."""
    peak_memory_mb: float | None = None
    """The most memory that the trainer's process took: of the GPU or, on a CPU, of the machine."""
    resumed: bool = False
    already_finished: bool = False


async def summarize(run: TrainingRun, progress: TrainProgress, before: float | None, after: float | None) -> Summary:
    metrics = run.folder.metrics()
    stats = await run.pool.stats("train")
    rewards = [reward for entry in metrics for reward in entry["rewards"]]
    sampled = sum(entry["sampled_tokens"] for entry in metrics)
    saved = policy.latest(run.folder.checkpoints)
    done = progress.step >= run.config.train.steps and (after is not None or not run.inputs.heldout)
    return Summary(
        name=run.config.run.name,
        folder=str(run.folder.path),
        status="finished" if done else "stopped",
        steps=progress.step,
        first_reward=mean(rewards[:FIRST]),
        last_reward=mean(rewards[-LAST:]),
        graded=len(rewards),
        eval_before=before,
        eval_after=after,
        evals=evaluations_during_training(run.folder.evaluations()),
        exact_token_rate=sum(entry["exact_tokens"] for entry in metrics) / sampled if sampled else None,
        rollouts=stats.rollouts,
        sampled_tokens=sampled,
        trained_tokens=sum(entry["trained_tokens"] for entry in metrics),
        train_seconds=round(sum(entry["rollout_s"] + entry["train_s"] for entry in metrics), 1),
        policy_version=progress.version,
        checkpoint=str(policy.folder_of(run.folder.checkpoints, saved)) if saved else None,
        ends=stats.ends,
        shortfalls=shortfalls_json(add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in metrics)),
        inexact=_total_counts(metrics, "inexact"),
        unhashed_tokens=sum(entry.get("unhashed_tokens", 0) for entry in metrics),
        behaviour_unknown_tokens=sum(entry.get("behaviour_unknown_tokens", 0) for entry in metrics),
        recomputed_tokens=sum(entry.get("recomputed_tokens", 0) for entry in metrics),
        masked=_total_counts(metrics, "masked"),
        breaks=stats.breaks,
        checkpoints_damaged=sum(entry.get("checkpoints_damaged", 0) for entry in metrics),
        groups_undone=sum(entry.get("groups_undone", 0) for entry in metrics),
        dropped=stats.drops,
        peak_memory_mb=max((entry["peak_memory_mb"] for entry in metrics if entry.get("peak_memory_mb")), default=None),
        updates=sum(new != old for old, new in pairwise([0, *(entry["version"] for entry in metrics)])),
        stalled=why_idle(metrics),
        alarms=[f"{kind} at step {entry['step']}" for entry in metrics for kind in entry.get("alarms", ())],
        better=better_text(run.folder.task_rewards(), run.config.train.reward_range),
        promoted=promoted_version(run.folder.path),
        stopped_by=", ".join(metrics[-1].get("alarms", ())) if metrics and not done and run.config.train.on_alarm != "warn" else "",
        code_changes=[change.text for change in code_changes(run.folder)],
        resumed=run.folder.resumed,
    )


def better_text(rewards: dict[str, list[float]], reward_range: tuple[float, float]) -> str:
    try:
        results = sequential_results(rewards, reward_range)
    except ValueError as error:
        return str(error)
    if not results:
        return ""
    if better := [result for result in results if result.better]:
        steps = ", ".join(f"{each.difference:+.2f} at step {each.evaluation.rpartition('-')[2]}" for each in better)
        return f"than before, at 95 %: {steps}"
    last = results[-1]
    return f"not established at 95 %: evidence {last.evidence:,.1f} of {last.needed:,.0f}, in {len(results)} evaluations"


def finished_summary(folder: RunFolder, config: RunConfig) -> Summary | None:
    """Returns the summary of a run that has nothing left to do, else None."""
    try:
        done = from_json(Summary, orjson.dumps(folder.summary()))
    except (ConfigError, ValueError):  # none yet, or damaged: it can be made again
        return None
    if done.status != "finished" or done.steps < config.train.steps:
        return None
    saved, damaged = policy.find_intact(folder.checkpoints, folder.id)
    if damaged or (saved and saved.number != done.policy_version):  # its result is not there any more
        return None
    return replace(done, checkpoint=done.checkpoint if saved else None, already_finished=True)


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _total_counts(metrics: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Returns the sums over all steps of counts by reason; entries of an earlier penstock may lack them."""
    total: Counter[str] = Counter()
    for entry in metrics:
        total.update(entry.get(name, {}))
    return dict(total)
