"""GRPO, which one group crashes."""

from penstock.records import Group
from penstock.train.advantages.grpo import grpo


def grpo_but_for_one(group: Group) -> list[float]:
    if group.id == "train-3":
        raise RuntimeError("this group crashes the trainer")
    return grpo(group)
