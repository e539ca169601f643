"""A baseline for each role: transcripts of one name are compared with each other. As agent-wise in Dr. MAS, arXiv 2602.08847."""

from collections import defaultdict

from penstock.config import Section
from penstock.records import Group
from penstock.train.advantages.base import centred, outcome


class TranscriptGrpoSettings(Section):
    scaled: bool = True
    """Divide by the standard deviation of the role's rewards, as GRPO does."""


def transcript_grpo(group: Group, settings: TranscriptGrpoSettings) -> list[dict[str, float]]:
    """The grade of each transcript, else that of its rollout, standardised over the transcripts of its name in the group."""
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
