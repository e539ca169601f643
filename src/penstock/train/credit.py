"""From the groups of a step to sequences with credit: rewards are shaped, advantages computed, the paths of token graphs cut."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.records import Attempt, Group
from penstock.records import Sequence as TrainingSequence
from penstock.train.advantages.base import level_of, outcome, step_rewards
from penstock.train.algorithm import CONSTANT, Advantage, credit_of, mean_of
from penstock.train.allowed import AllowedReplay
from penstock.train.learner import Learner
from penstock.train.policy_groups import group_of
from penstock.train.sequences import sequences
from penstock.train.shaping import less, overlong
from penstock.train.training_run import TrainingRun


class CreditedSequences(NamedTuple):
    """The sequences of a lease's groups; `counts` as in `SequencesResult`."""

    sequences: list[TrainingSequence]
    counts: Counter[str]


def credit_groups(groups: Sequence[Group], run: TrainingRun) -> dict[str, CreditedSequences]:
    """Computes the advantages, and the sequences that carry them, by policy."""
    return {policy: _credit(groups, policy, run) for policy in run.learners}


def _credit(groups: Sequence[Group], policy: str, run: TrainingRun) -> CreditedSequences:
    made, counts, section, learner = list[TrainingSequence](), Counter[str](), run.config.train, run.learners[policy]
    views = [view for view in (groups if not policy else (group_of(group, policy) for group in groups)) if view.attempts]
    if section.overlong is not None:
        views = [overlong(view, section.overlong) for view in views]
    if section.kl and section.kl_in == "reward":
        views = _less_divergence(views, learner, run.replay)
    by_token, mean = level_of(run.advantage) == "token", mean_of(section)
    credit = [[0.0] * len(view.graded) for view in views] if by_token else credit_of(run.advantage, views)
    for view, each in zip(views, credit, strict=True):
        result = sequences(
            view,
            each,
            divisor=CONSTANT if mean == "constant" else None,
            without_credit=by_token,
            recompute=section.unknown_logprobs == "recompute",
            replay=run.replay,
        )
        made += result.sequences
        counts.update(result.counts)
    if by_token and made:
        attempts = {attempt.rollout.id: attempt for view in views for attempt in view.graded}
        rewards = [token_rewards(attempts[sequence.rollout_id], sequence) for sequence in made]
        made = learner.credit_tokens(made, rewards, run.advantage)
    if mean == "token":
        weight = counts["rollouts"] / max(1, counts["tokens"])  # the mean over rollouts is taken later
        made = [replace(sequence, weight=weight) for sequence in made]
    return CreditedSequences(made, counts)


def teaches_nothing(group: Group, advantage: Advantage) -> bool:
    """Whether no rollout of the group gets credit that differs from 0."""
    if level_of(advantage) != "group":
        return len(set(group.rewards)) < 2
    return not sequences(group, advantage(group)).counts["rollouts"]


def token_rewards(attempt: Attempt, sequence: TrainingSequence) -> list[float]:
    """Returns the rewards of a sequence's trained tokens: a step's grade at its last one, the outcome at the last of all."""
    steps = [step for step, trained in zip(sequence.steps, sequence.trained, strict=True) if trained]
    own, rewards = step_rewards(attempt), [0.0] * len(steps)
    for step, at in {step: at for at, step in enumerate(steps)}.items():
        rewards[at] += own.get(step, 0.0)
    transcript = next(step.transcript for step in attempt.steps if step.index == steps[-1])
    rewards[-1] += outcome(attempt, transcript) or 0.0
    return rewards


def _less_divergence(views: list[Group], learner: Learner, replay: AllowedReplay) -> list[Group]:
    """Takes the divergence of each step from the reference policy off the rewards."""
    every = [sequences(view, [0.0] * len(view.graded), without_credit=True, replay=replay) for view in views]
    made = [sequence for result in every for sequence in result.sequences]
    found = defaultdict[str, defaultdict[int, float]](lambda: defaultdict(float))
    for sequence, gaps in zip(made, learner.reference_gaps(made), strict=True):
        steps = (step for step, trained in zip(sequence.steps, sequence.trained, strict=True) if trained)
        for step, gap in zip(steps, gaps, strict=True):
            found[sequence.rollout_id][step] += learner.section.kl * gap
    return [
        replace(view, attempts=tuple(less(attempt, dict(found[attempt.rollout.id])) for attempt in view.attempts)) for view in views
    ]
