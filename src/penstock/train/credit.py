"""From the groups of a step to sequences with credit: rewards are shaped, advantages computed, the paths of token graphs cut.

Each policy has its own view of a group: what it sampled, with the rewards that it is credited with. Policies share no path of a
token graph, so a view is a group like any other, and advantages are computed from it as for a run with one policy.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from penstock.config import TrainSection
from penstock.records import Grade, Group, Rollout, Step
from penstock.records import Sequence as TrainingSequence
from penstock.train.advantages.base import Credit, outcome, step_rewards
from penstock.train.algorithm import CONSTANT, Advantage, mean_of
from penstock.train.batches import ValueTargets
from penstock.train.sequences import ReplayedStep, sequences

Replay = Callable[[Step], ReplayedStep]


class TokenScorer(Protocol):
    """What credit needs of a learner."""

    def credit_tokens(
        self, sequences: Sequence[TrainingSequence], rewards: Sequence[list[float]], advantage: Advantage
    ) -> tuple[list[TrainingSequence], ValueTargets | None]:
        """Returns the sequences with the credit that an advantage of tokens gives, from the `rewards` of their trained tokens."""
        ...

    def reference_gaps(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Returns estimates of the divergence from the reference policy, for the trained tokens of each sequence."""
        ...


class CreditedSequences(NamedTuple):
    """The sequences of a lease's groups; `counts` as in `SequencesResult`."""

    sequences: list[TrainingSequence]
    counts: Counter[str]
    value_targets: ValueTargets | None = None
    """What the value head is trained on; None without one."""


def credit_groups(
    groups: Sequence[Group], section: TrainSection, advantage: Advantage, learner: TokenScorer, *, policy: str = "", replay: Replay
) -> CreditedSequences:
    """Computes the advantages of a policy's rollouts, and the sequences that carry them."""
    made, counts, targets = list[TrainingSequence](), Counter[str](), None
    views = [view for view in (groups if not policy else (group_of(group, policy) for group in groups)) if view.rollouts]
    if section.overlong is not None:
        views = [overlong(view, section.overlong) for view in views]
    if section.kl and section.kl_in == "reward":
        views = _less_divergence(views, learner, section.kl, replay)
    by_token, mean = advantage.level == "token", mean_of(section)
    credit = [[0.0] * len(view.graded) for view in views] if by_token else credit_of(advantage, views)
    for view, each in zip(views, credit, strict=True):
        result = sequences(
            view,
            each,
            divisor=CONSTANT if mean == "constant" else None,
            without_credit=by_token,
            recompute=section.unknown_logprobs == "recompute",
            replay=replay,
        )
        made += result.sequences
        counts.update(result.counts)
    if by_token and made:
        attempts = {attempt.ref.id: attempt for view in views for attempt in view.graded}
        rewards = [token_rewards(attempts[sequence.rollout_id], sequence) for sequence in made]
        made, targets = learner.credit_tokens(made, rewards, advantage)
    if mean == "token":
        weight = counts["rollouts"] / max(1, counts["tokens"])  # the mean over rollouts is taken later
        made = [replace(sequence, weight=weight) for sequence in made]
    return CreditedSequences(made, counts, targets)


def credit_of(advantage: Advantage, groups: Sequence[Group]) -> list[list[Credit]]:
    """Returns the credit of the graded rollouts of each group, by an advantage of groups or of a whole step."""
    if advantage.level == "batch":
        return advantage(groups)
    return [advantage(group) for group in groups]


def teaches_nothing(group: Group, advantage: Advantage) -> bool:
    """Whether no rollout of the group gets credit that differs from 0."""
    if advantage.level != "group":
        return len(set(group.rewards)) < 2
    return not sequences(group, advantage(group)).counts["rollouts"]


def token_rewards(attempt: Rollout, sequence: TrainingSequence) -> list[float]:
    """Returns the rewards of a sequence's trained tokens: a step's grade at its last one, the outcome at the last of all."""
    steps = [step for step, trained in zip(sequence.steps, sequence.trained, strict=True) if trained]
    own, rewards = step_rewards(attempt), [0.0] * len(steps)
    for step, at in {step: at for at, step in enumerate(steps)}.items():
        rewards[at] += own.get(step, 0.0)
    transcript = next(step.transcript for step in attempt.steps if step.index == steps[-1])
    rewards[-1] += outcome(attempt, transcript) or 0.0
    return rewards


def _less_divergence(views: list[Group], learner: TokenScorer, kl: float, replay: Replay) -> list[Group]:
    """Takes the divergence of each step from the reference policy off the rewards."""
    every = [sequences(view, [0.0] * len(view.graded), without_credit=True, replay=replay) for view in views]
    made = [sequence for result in every for sequence in result.sequences]
    found = defaultdict[str, defaultdict[int, float]](lambda: defaultdict(float))
    for sequence, gaps in zip(made, learner.reference_gaps(made), strict=True):
        steps = (step for step, trained in zip(sequence.steps, sequence.trained, strict=True) if trained)
        for step, gap in zip(steps, gaps, strict=True):
            found[sequence.rollout_id][step] += kl * gap
    return [
        replace(view, rollouts=tuple(less(attempt, dict(found[attempt.ref.id])) for attempt in view.rollouts)) for view in views
    ]


def group_of(group: Group, policy: str) -> Group:
    """The attempts in which `policy` was asked, with its nodes and steps alone."""
    return replace(group, rollouts=tuple(attempt_of(attempt, policy) for attempt in group.rollouts if took_part(attempt, policy)))


def took_part(attempt: Rollout, policy: str) -> bool:
    return any(step.policy == policy for step in attempt.steps)


def attempt_of(attempt: Rollout, policy: str) -> Rollout:
    """The nodes and steps of `policy` alone, with the grades that it is credited with."""
    steps = tuple(step for step in attempt.steps if step.policy == policy)
    nodes, indices = {step.node for step in steps}, {step.index for step in steps}
    return replace(
        attempt,
        nodes=tuple(node for node in attempt.nodes if node.id in nodes),
        steps=steps,
        grades=_grades_of(attempt, {step.transcript for step in steps}, indices),
        marks=tuple(mark for mark in attempt.marks if mark.step is None or mark.step in indices),
    )


def _grades_of(attempt: Rollout, transcripts: Collection[str], steps: Collection[int]) -> tuple[Grade, ...]:
    """The grades of its transcripts; without them the rollout's; without that those of its steps, else all."""
    own = tuple(grade for grade in attempt.grades if grade.step is None and grade.transcript in transcripts)
    whole = tuple(grade for grade in attempt.grades if grade.step is None and grade.transcript is None)
    own_steps = tuple(grade for grade in attempt.grades if grade.step in steps)
    if own or whole:
        return own or whole
    others = any(grade.step is None for grade in attempt.grades)  # of transcripts that other policies wrote
    return attempt.grades if others or not own_steps else own_steps


def overlong(group: Group, bounds: tuple[int, int]) -> Group:
    """Takes up to 1 off the reward of a rollout: nothing up to the first bound of sampled tokens, all from the second on."""
    first, last = bounds

    def penalty(attempt: Rollout) -> dict[int, float]:
        excess = (sum(step.sampled for step in attempt.steps) - first) / (last - first)
        return {attempt.steps[-1].index: min(1.0, excess)} if excess > 0 else {}

    attempts, branches = (tuple(less(each, penalty(each)) for each in made) for made in (group.rollouts, group.branches))
    return replace(group, rollouts=attempts, branches=branches)


def less(attempt: Rollout, penalties: Mapping[int, float]) -> Rollout:
    """Takes the penalties of steps off the grade that counts: the rollout's, else those of transcripts, else the steps' own."""
    if not penalties or not attempt.grades:
        return attempt
    whole = [grade for grade in attempt.grades if grade.step is None and grade.transcript is None]
    if whole:
        last = replace(whole[-1], reward=whole[-1].reward - sum(penalties.values()))
        return replace(attempt, grades=(*attempt.grades, last))
    transcripts = {step.index: step.transcript for step in attempt.steps}
    if any(grade.step is None for grade in attempt.grades):
        off = {name: sum(p for index, p in penalties.items() if transcripts[index] == name) for name in transcripts.values()}
        grades = (replace(g, reward=g.reward - off.get(g.transcript or "", 0.0)) if g.step is None else g for g in attempt.grades)
        return replace(attempt, grades=tuple(grades))
    own = (Grade(rollout_id=attempt.ref.id, reward=-p, source="train", step=index) for index, p in penalties.items())
    return replace(attempt, grades=(*attempt.grades, *own))
