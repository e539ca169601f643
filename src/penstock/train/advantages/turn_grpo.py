"""GRPO by turns, arXiv 2505.11821, and by transcripts, as agent-wise in Dr. MAS, arXiv 2602.08847."""

from collections import defaultdict

from pydantic import Field

from penstock.config import Section
from penstock.records import Group, Rollout
from penstock.train.advantages.base import centred, outcome, step_rewards, turns


class TurnGrpoSettings(Section):
    outcome_weight: float = Field(default=1.0, ge=0)
    """Of the part that all steps of a rollout share: its own grade, or that of its transcript."""
    turn_weight: float = Field(default=1.0, ge=0)
    """Of the part that a step has for itself: its own grade."""


def turn_grpo(group: Group, settings: TurnGrpoSettings) -> list[dict[int, float]]:
    """The grade of a step against those of the same turn in the group, and the outcome; each standardised over the group."""
    credit: list[dict[int, float]] = [{step.index: 0.0 for step in attempt.steps} for attempt in group.graded]
    by_turn = defaultdict[tuple[str, int], list[tuple[int, int, float]]](list)
    by_name = defaultdict[str, list[tuple[int, float]]](list)
    for place, attempt in enumerate(group.graded):
        own = step_rewards(attempt)
        for index, turn in turns(attempt).items():
            if own:
                by_turn[turn].append((place, index, own.get(index, 0.0)))
        for name, reward in _outcomes(attempt).items():
            by_name[name].append((place, reward))
    for steps in by_turn.values():
        for (place, index, _), value in zip(steps, centred(reward for *_, reward in steps), strict=True):
            credit[place][index] += settings.turn_weight * value
    for name, ends in by_name.items():
        for (place, _), value in zip(ends, centred(reward for _, reward in ends), strict=True):
            for step in group.graded[place].steps:
                if step.transcript == name:
                    credit[place][step.index] += settings.outcome_weight * value
    return credit


def _outcomes(attempt: Rollout) -> dict[str, float]:
    found = {step.transcript: outcome(attempt, step.transcript) for step in attempt.steps}
    return {name: reward for name, reward in found.items() if reward is not None}


class TranscriptGrpoSettings(Section):
    scaled: bool = True
    """Divide by the standard deviation of the role's rewards, as GRPO does."""


def transcript_grpo(group: Group, settings: TranscriptGrpoSettings) -> list[dict[str, float]]:
    """A baseline for each role: the grade of a transcript, else of its rollout, among the group's transcripts of its name."""
    found = defaultdict[str, list[tuple[int, float]]](list)
    for place, attempt in enumerate(group.graded):
        for name in dict.fromkeys(step.transcript for step in attempt.steps):
            reward = outcome(attempt, name)
            found[name].append((place, (attempt.reward or 0.0) if reward is None else reward))
    credit: list[dict[str, float]] = [{} for _ in group.graded]
    for name, rewards in found.items():
        values = centred((reward for _, reward in rewards), scaled=settings.scaled)
        for (place, _), value in zip(rewards, values, strict=True):
            credit[place][name] = value
    return credit
