"""Learning-rate schedules: the share of `train.lr` that an update takes."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_share(update: int, *, schedule: Schedule, warmup: int, total: int, floor: float) -> float:
    """Returns the share for `update`, counted from 0: rising to 1 over `warmup` updates, then falling to `floor` at the last.

    Beyond `total`, as in a run that goes on, it stays at `floor`.
    """
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * left
