"""Advantages that fail for the group of one task, each in its own way."""

from collections import Counter

from penstock.records import Group
from penstock.train.advantages.grpo import grpo

POISON = "train-1"
tried = Counter[str]()


def raising(group: Group) -> list[float]:
    tried[group.id] += 1
    if group.id == POISON:
        raise ZeroDivisionError("no spread\nat all")
    return spread(group)


def huge(group: Group) -> list[float]:
    """Finite, but no longer in the trainer's 32 bits."""
    return [1e300] * len(group.rewards) if group.id == POISON else spread(group)


def spread(group: Group) -> list[float]:
    """Never all zero, so that every group is trained."""
    return [float(place + 1) for place in range(len(grpo(group)))]


def broken(group: Group) -> list[float]:
    raise KeyError("not here")


class Moody:
    """Fails the first batch as a whole, for no group's fault."""

    fails = 1

    def __call__(self, group: Group) -> list[float]:
        if group.id == "train-1" and self.fails:
            self.fails -= 1
            raise RuntimeError("once")
        return spread(group)


moody = Moody()
