"""Advantages: from a group's rewards to the credit of each graded rollout, one small pure file each."""

from penstock.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        "grpo": "penstock.train.advantages.grpo:grpo",
        "dr_grpo": "penstock.train.advantages.dr_grpo:dr_grpo",
    },
)
