"""Two training runs, paired: their held-out tasks after training, and their groups, which runs of one seed draw in one order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.evals.metrics import Difference, difference
from penstock.pool.location import find_pool, open_pool_at
from penstock.records import Group
from penstock.run.folder import find_run_folder

PAGE_GROUPS = 64


class PairedRewards(NamedTuple):
    """The second run against the first, over what both have."""

    pairs: int
    left_out: int
    """What only one of them has."""
    first: float
    second: float
    difference: Difference
    better: int
    """Pairs in which the second has more."""
    worse: int

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "difference": self.difference._asdict()}


class RunComparison(NamedTuple):
    first: str
    second: str
    same_seed: bool
    held_out: PairedRewards | None
    """By task, after training; None where one has no held-out evaluation of the other's tasks."""
    training: PairedRewards | None
    """By task and how often it was drawn before, over all steps."""

    def as_json(self) -> dict[str, Any]:
        parts = {"held_out": self.held_out, "training": self.training}
        return {**self._asdict(), **{name: part and part.as_json() for name, part in parts.items()}}


class _RunRewards(NamedTuple):
    seed: int
    held_out: dict[Any, float]
    training: dict[Any, float]


async def compare_runs(first: Path, second: Path) -> RunComparison:
    """ConfigError if they have no task in common."""
    one, other = await _read(first), await _read(second)
    held_out, training = _pair(one.held_out, other.held_out), _pair(one.training, other.training)
    if held_out is None and training is None:
        raise ConfigError(f"{first} and {second} have no graded task in common; train both on the same dataset")
    return RunComparison(str(first), str(second), one.seed == other.seed, held_out, training)


async def _read(path: Path) -> _RunRewards:
    seed = find_run_folder(path).config().run.seed
    async with open_pool_at(find_pool(path)) as pool:
        held_out, training, drawn = dict[Any, float](), dict[Any, float](), dict[str, int]()
        for channel in ("val", "train"):
            last, seq = (await pool.stats(channel)).last_seq, 0
            while page := await pool.groups(channel, first_seq=seq, limit=min(PAGE_GROUPS, last + 1 - seq)):
                seq = page[-1].seq + 1
                for group in page:
                    task = group.task.id
                    if channel == "val":
                        held_out[task] = _mean(group)  # the last evaluation counts
                    elif group.graded:
                        drawn[task] = drawn.get(task, -1) + 1
                        training[task, drawn[task]] = _mean(group)
    return _RunRewards(seed, held_out, training)


def _mean(group: Group) -> float:
    """Returns the mean of a group's rewards; a rollout that was not graded counts as 0."""
    rewards = [rollout.reward or 0.0 for rollout in group.rollouts]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _pair(one: Mapping[Any, float], other: Mapping[Any, float]) -> PairedRewards | None:
    shared = [key for key in one if key in other]
    if not shared:
        return None
    before, after = [one[key] for key in shared], [other[key] for key in shared]
    return PairedRewards(
        pairs=len(shared),
        left_out=len(one.keys() ^ other.keys()),
        first=sum(before) / len(before),
        second=sum(after) / len(after),
        difference=difference(before, after),
        better=sum(b > a for a, b in zip(before, after, strict=True)),
        worse=sum(b < a for a, b in zip(before, after, strict=True)),
    )
