"""What is taken off rewards before credit is given: for overlong rollouts (DAPO), and for distance from the reference policy."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.records import Attempt, Grade, Group


def overlong(group: Group, bounds: tuple[int, int]) -> Group:
    """Takes up to 1 off the reward of a rollout: nothing up to the first bound of sampled tokens, all from the second on."""
    first, last = bounds

    def penalty(attempt: Attempt) -> dict[int, float]:
        excess = (sum(step.sampled for step in attempt.steps) - first) / (last - first)
        return {attempt.steps[-1].index: min(1.0, excess)} if excess > 0 else {}

    attempts, branches = (tuple(less(each, penalty(each)) for each in made) for made in (group.attempts, group.branches))
    return replace(group, attempts=attempts, branches=branches)


def less(attempt: Attempt, penalties: Mapping[int, float]) -> Attempt:
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
    own = (Grade(rollout_id=attempt.rollout.id, reward=-p, source="train", step=index) for index, p in penalties.items())
    return replace(attempt, grades=(*attempt.grades, *own))
