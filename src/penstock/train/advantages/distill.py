"""Distillation on the policy's own rollouts: each token is judged by a teacher. On-policy distillation (GKD), arXiv 2306.13649."""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Literal

from pydantic import Field

from penstock.config import Section
from penstock.train.advantages.base import SequenceTokens, per_token


class DistillSettings(Section):
    teacher: str = ""
    """A model with the policy's tokenizer, as `model.name` takes it, or the URL of a vLLM server, whose temperature is 1."""
    model: str = ""
    """What the server calls its model; empty asks it."""
    kl: Literal["reverse", "forward"] = "reverse"
    """`reverse` seeks what the teacher finds likely; `forward` covers all that it finds likely."""
    cap: float = Field(default=5.0, gt=0)
    """Largest credit of a token, either way."""


@per_token("teacher")
def distill(sequences: Sequence[SequenceTokens], settings: DistillSettings) -> list[list[float]]:
    """How much likelier a token is for the teacher: its logarithm (reverse divergence), or the ratio less 1 (forward)."""
    return [
        [
            0.0 if unknown else _credit(teacher, own, settings)
            for teacher, own, unknown in zip(each.teacher, each.logprobs, each.recomputed or repeat(False), strict=False)
        ]
        for each in sequences
    ]


def _credit(teacher: float, own: float, settings: DistillSettings) -> float:
    gap = teacher - own
    value = gap if settings.kl == "reverse" else math.exp(min(gap, 50.0)) - 1.0
    return max(-settings.cap, min(settings.cap, value))
