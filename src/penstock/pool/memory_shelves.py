"""What the memory pool keeps of rollouts and groups, and where it finds them again without looking at all of them."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from penstock.pool.rows import AttemptRows, Ending, Row, build_attempt, unseal
from penstock.pool.rules import State, Trained
from penstock.records import Attempt, End, Group, Rollout, Task


@dataclass(slots=True)
class KeptRollout:
    """What is kept of one rollout."""

    rollout: Rollout
    row: Row
    end: End | None = None
    message: bytes = b""
    nodes: dict[int, Row] = field(default_factory=dict[int, Row])
    steps: dict[int, Row] = field(default_factory=dict[int, Row])
    grades: dict[bytes, Row] = field(default_factory=dict[bytes, Row])
    marks: dict[int, Row] = field(default_factory=dict[int, Row])
    oldest: int | None = None

    def read(self, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        """All of it, or its steps and nodes from these numbers on."""
        wanted = ((self.nodes, first_node), (self.steps, first_step))
        nodes, steps = ([rows[index] for index in sorted(rows) if index >= first] for rows, first in wanted)
        ending, marks = Ending(self.end, self.message), [self.marks[key] for key in sorted(self.marks)]
        return build_attempt(self.rollout.id, AttemptRows(self.row, ending, nodes, steps, self.grades.values(), marks))


@dataclass(slots=True)
class KeptGroup:
    """What is kept of one group."""

    id: str
    seq: int
    channel: str
    task: Row
    current: dict[int, KeptRollout]
    """Per place the attempt that counts."""
    rollouts: list[Rollout]
    """All attempts."""
    min_size: int = 0
    state: State = State.OPEN
    """`Shelf.move` changes it."""
    oldest: int | None = None
    """The oldest version on a token that counts, once it is complete."""
    lease_id: str | None = None
    """The last lease that held it."""
    trained: Trained | None = None

    def read(self) -> Group:
        """The group with the attempts that count."""
        attempts = tuple(self.current[place].read() for place in sorted(self.current))
        task = unseal(Task, self.task, f"the task of group {self.id!r}")
        return Group(id=self.id, seq=self.seq, task=task, channel=self.channel, attempts=attempts)


class Shelf:
    """The groups of one channel, in their order and by their states."""

    def __init__(self) -> None:
        self._ordered: list[KeptGroup] = []
        self._at: dict[State, dict[str, KeptGroup]] = {state: {} for state in State}

    @property
    def next_seq(self) -> int:
        """The number after the highest."""
        return self._ordered[-1].seq + 1 if self._ordered else 0

    def add(self, group: KeptGroup) -> None:
        """Put a new one in its place."""
        insort(self._ordered, group, key=_order)
        self._at[group.state][group.id] = group

    def remove(self, group: KeptGroup) -> None:
        """Take it away."""
        del self._ordered[bisect_left(self._ordered, _order(group), key=_order)]
        del self._at[group.state][group.id]

    def move(self, group: KeptGroup, state: State) -> None:
        """Let it stand there from now on."""
        del self._at[group.state][group.id]
        group.state = state
        self._at[state][group.id] = group

    def at(self, *states: State) -> list[KeptGroup]:
        """Those in one of these states, in their order."""
        return sorted((group for state in states for group in self._at[state].values()), key=_order)

    def count(self, *states: State) -> int:
        """How many those are."""
        return sum(len(self._at[state]) for state in states)

    def after(self, first_seq: int) -> Iterator[KeptGroup]:
        """Those from a number on, in their order."""
        return islice(self._ordered, bisect_left(self._ordered, first_seq, key=lambda group: group.seq), None)


def _order(group: KeptGroup) -> tuple[int, str]:
    return group.seq, group.id
