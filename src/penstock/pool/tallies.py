"""What running counts add up to: the same statistics for every pool."""

from collections import defaultdict
from collections.abc import Iterable

from penstock.pool.base import PoolStats
from penstock.pool.rules import State


def add_up(tallies: Iterable[tuple[str, str, int]]) -> PoolStats:
    """The statistics that counts by kind and name make; of those that come several times, the highest `top`, else the sum."""
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for kind, name, n in tallies:
        known = counts[kind].get(name, 0)
        counts[kind][name] = max(known, n) if kind == "top" and name in counts[kind] else known + n
    state, plain, top = counts["state"], counts["count"], counts["top"]
    groups = sum(state.values())
    return PoolStats(
        groups=groups,
        groups_complete=groups - state.get(State.OPEN, 0),
        groups_leased=state.get(State.LEASED, 0),
        groups_trained=state.get(State.TRAINED, 0),
        groups_stale=state.get(State.STALE, 0),
        groups_short=state.get(State.SHORT, 0),
        groups_dropped=state.get(State.DROPPED, 0),
        rollouts=plain.get("rollouts", 0),
        steps=plain.get("steps", 0),
        tokens=plain.get("tokens", 0),
        prompt_tokens=plain.get("prompt_tokens", 0),
        ends=counts["end"],
        drops=counts["drop"],
        breaks=counts["break"],
        last_seq=top.get("seq", -1),
        last_version=max(top.get("version", 0), 0),
    )
