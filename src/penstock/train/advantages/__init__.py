"""Advantages: from a group's rewards to the credit of each graded rollout, one small pure file each."""

from penstock.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        "grpo": "penstock.train.advantages.grpo:grpo",
        "dr_grpo": "penstock.train.advantages.dr_grpo:dr_grpo",
    },
)

DIVISORS = {"dr_grpo": 128.0}
"""Advantages whose loss sums a rollout's tokens over a constant, so that long replies are not discounted; all others take the
mean over the rollout's own tokens. The constant sets the scale of the loss: near the tokens of a usual rollout, the gradient
clip means the same under both."""
