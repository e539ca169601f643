"""How often Python looks for garbage in processes that serve many calls at once: seldom."""

import gc

NEW, TIMES, MORE = 20_000, 10, 10
"""Objects that are new at a look, and how many looks there are between deeper ones. At Python's 700 a crowd of calls in flight is
looked through again and again, and almost nothing of it is garbage: it took a sixth of a rollout's processor time."""


def collect_seldom() -> None:
    """Set it for this process; for its main program to decide, not for a library."""
    gc.set_threshold(NEW, TIMES, MORE)
