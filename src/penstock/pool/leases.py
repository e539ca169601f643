"""Which leases have run out, judged by this process's own monotonic clock."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

Clock = Callable[[], float]


class Beat(NamedTuple):
    """An open lease as stored: its holder counts `number` up whenever it asks for more time."""

    lease_id: str
    number: int
    lease_s: float


class _Deadline(NamedTuple):
    beat: int
    at: float


class LeaseClock:
    """Deadlines of open leases.

    A beat that was not seen before starts its time anew, here. So the lease of another process, or of one that died,
    runs out `lease_s` seconds after this process last saw it move, whatever any wall clock says.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadlines: dict[str, _Deadline] = {}

    def see(self, beat: Beat) -> None:
        """Start the time of a lease that was given or renewed just now."""
        self._deadlines[beat.lease_id] = _Deadline(beat.number, self._clock() + beat.lease_s)

    def expired(self, beats: Iterable[Beat]) -> list[str]:
        """Those of all the open leases whose time is up. Leases not among `beats` are forgotten."""
        now, known = self._clock(), self._deadlines
        self._deadlines = {}
        for beat in beats:
            before = known.get(beat.lease_id)
            if before is None or before.beat != beat.number:
                before = _Deadline(beat.number, now + beat.lease_s)
            self._deadlines[beat.lease_id] = before
        return [lease_id for lease_id, deadline in self._deadlines.items() if deadline.at <= now]
