"""The contract of every pool: it records what was sampled, graded and trained, and each acknowledged write is durable."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from penstock.errors import ConfigError
from penstock.records import End, Grade, Group, Lease, Mark, Node, Rollout, RolloutRef, Step, Task

if TYPE_CHECKING:
    from penstock.pool.check import PoolCheck

AFTER_ALL = 2**31 - 1
"""As `first_step` and `first_node`: read a rollout without its steps and nodes."""

CheckProgress = Callable[[int, int], None]
"""Called with the number of rollouts checked so far and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts over one channel, or over all."""

    groups: int = 0
    groups_complete: int = 0
    """Groups in which every place has ended, claimed or not."""
    groups_leased: int = 0
    groups_trained: int = 0
    groups_stale: int = 0
    """Complete, but dropped because their tokens were too old."""
    groups_short: int = 0
    """Ended with fewer completed rollouts than `min_size`; to be topped up or dropped."""
    groups_dropped: int = 0
    rollouts: int = 0
    steps: int = 0
    tokens: int = 0
    """Sampled tokens."""
    prompt_tokens: int = 0
    """Tokens of nodes; a shared prefix counts once."""
    ends: dict[str, int] = field(default_factory=dict[str, int])
    """Number of rollouts by `End`."""
    drops: dict[str, int] = field(default_factory=dict[str, int])
    """Number of dropped groups by reason."""
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """Number of nodes that opened a new root, by reason."""
    last_seq: int = -1
    """`seq` of the newest group; -1 without groups."""
    last_version: int = 0
    """The highest policy version on any token or acknowledgement."""


class GroupLimit(NamedTuple):
    """How many groups of a channel may wait to be trained, and what happens to one more."""

    groups: int
    overflow: Literal["refuse", "drop"]
    """`refuse` raises PoolFull. `drop` drops the oldest complete group to make room, and refuses if none is complete."""


ChangeKind = Literal["opened", "ended", "graded", "marked", "lent", "returned", "trained", "undone", "stale", "dropped"]


class Change(NamedTuple):
    """One entry of a pool's change log."""

    position: int
    kind: ChangeKind
    channel: str
    id: str
    """The rollout's id for `ended`, `graded` and `marked`, otherwise the group's."""


class Pool(Protocol):
    """Every write returns once it is durable.

    Writes are idempotent by id; a different value under the same id is refused (PoolConflict). If the caller of a write is
    cancelled, the write is finished or refused before the cancellation propagates.
    """

    async def open_group(
        self, task: Task, rollouts: Sequence[RolloutRef], *, seq: int | None, min_size: int = 0, limit: GroupLimit | None = None
    ) -> None:
        """Create a group with one place per rollout; do nothing if its id exists.

        `seq` None takes the number after the channel's highest, also while other processes open groups there. The group is
        complete once every place has ended and at least `min_size` of them completed. With fewer it waits for `replace` or
        `drop`.
        """
        ...

    async def replace(self, lost: RolloutRef, reason: str) -> RolloutRef:
        """End `lost` as LOST if it has no end yet, and open its successor in the same place. Idempotent.

        Refused for a completed rollout, and once its group was leased or dropped: data that a trainer saw does not change.
        """
        ...

    async def append(self, step: Step, node: Node | None) -> None:
        """Store a step and the node that it added (None if that node is stored). Refused once the rollout has ended.

        Also refused: token columns of different lengths, a log-probability that is not finite, a missing node or parent.
        """
        ...

    async def grade(self, grade: Grade) -> None:
        """Store a grade: one per source, transcript and step.

        Refused for an unknown or ended rollout, or a reward that is not finite.
        """
        ...

    async def end(
        self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = (), *, only_grades: bool = False
    ) -> bool:
        """End the rollout. Returns False if it had ended before: the first end stays.

        Stores `grades` in the same transaction, as if by `grade` just before. If one is refused, and all are once the rollout
        has ended, nothing is written; `only_grades` refuses also if it has been graded before.
        """
        ...

    async def mark(self, mark: Mark) -> bool:
        """Store a curator's mark, replacing an earlier one. Returns False if its group was already leased, trained or dropped.

        Refused for an unknown rollout or step, or a quality that is not a valid weight.
        """
        ...

    async def drop(self, group_id: str, reason: str) -> bool:
        """Take an ended group out of training, counted by reason. Returns False if it is dropped, stale or trained already.

        Refused while a rollout of it runs or a trainer holds it.
        """
        ...

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        """Lease the `count` oldest complete groups that are neither leased nor trained. Returns None if fewer are ready.

        A group with a token older than `version - max_staleness` is dropped for good and counted as stale, even if None is
        returned: the next lease reports it.
        """
        ...

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """Keep the lease for `lease_s` more seconds; PoolError if it has expired."""
        ...

    async def release(self, lease_id: str | None = None) -> None:
        """Return the groups of a lease; of every open lease if None (a trainer that starts).

        With None, PoolError if the states of groups contradict the counts or the leases, which only damage can cause: the trainer
        would wait for groups that never come.
        """
        ...

    async def ack(self, lease_id: str, policy_version: int) -> None:
        """Mark the lease's groups as trained into `policy_version`, for good. Idempotent.

        Works on an expired or released lease unless another lease holds one of its groups: then PoolError.
        """
        ...

    async def undo(self, policy_version: int) -> list[tuple[str, int]]:
        """Take the groups trained into later versions than `policy_version` out of the ledger, to be claimed again.

        For a trainer that resumes from `policy_version` because the weights of later versions are lost.
        Returns their ids and versions, in the order of the ledger. No version number is used again.
        """
        ...

    async def run_id(self) -> str:
        """Return the id of the run that the pool belongs to; empty if `set_run_id` was never called."""
        ...

    async def set_run_id(self, run_id: str) -> None:
        """Store the id of the run that the pool belongs to. The first one stays."""
        ...

    async def rollout(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Rollout:
        """Return everything recorded of a rollout, or only its steps and nodes from these numbers on; PoolError if unknown."""
        ...

    async def task(self, rollout_id: str) -> Task:
        """Return the rollout's task; PoolError for an unknown rollout."""
        ...

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        """List groups in the order of `seq`, from `first_seq` on."""
        ...

    async def rollout_refs(self, group_id: str) -> list[RolloutRef]:
        """List all rollouts of a group, replaced ones included, by place and attempt; empty for an unknown group."""
        ...

    async def channels(self) -> list[str]:
        """List the channels with a group, sorted."""
        ...

    async def unfinished(self, channel: str) -> list[Group]:
        """List groups with a running place, and short ones: what a killed process left behind."""
        ...

    async def trained(self) -> list[tuple[str, int]]:
        """Return the ledger: each trained group with its policy version, in the order of acknowledgement."""
        ...

    async def stats(self, channel: str | None = None) -> PoolStats: ...

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        """Return the changes after this position, in order. Continue from the last one's position."""
        ...

    async def position(self) -> int:
        """Return the position of the last change."""
        ...

    async def wait(self, after: int, *, timeout_s: float) -> bool:
        """Wait for a change after this position, made by any process. Returns False on a timeout."""
        ...

    async def close(self) -> None:
        """Finish pending writes and close all connections."""
        ...


class CounterChange(NamedTuple):
    """A change of a running count: `n` is added; a counter of kind `top` keeps the highest `n` instead."""

    kind: str
    name: str
    n: int


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class PoolDatabase(Protocol):
    """One connection, used by one thread at a time. Statements take values for `?`."""

    LOCK: ClassVar[str]
    """Suffix of a SELECT that locks the rows read until the transaction ends."""
    SKIP: ClassVar[str]
    """The same, but leaves out rows that another transaction has locked."""
    SETTLED: ClassVar[str]
    """Condition on rows of `changes`: no row with an earlier position can still appear."""
    ERRORS: ClassVar[tuple[type[Exception], ...]]
    """What a statement raises."""

    @property
    def in_transaction(self) -> bool: ...

    def begin(self) -> None:
        """Begin a transaction that writes."""
        ...

    def begin_reading(self) -> None:
        """Begin a transaction whose queries all see the same snapshot."""
        ...

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor: ...

    def select(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        """Run `SELECT columns rest` and return all rows; for columns of text and integers only."""
        ...

    def lock(self, name: str) -> None:
        """Wait until no other transaction holds the lock `name`, and hold it until this one ends."""
        ...

    def add_counts(self, channel: str, changes: Iterable[CounterChange]) -> None:
        """Update the running counts of a channel, in one statement."""
        ...

    def log_changes(self, changes: Iterable[tuple[ChangeKind, str, str]]) -> None:
        """Append to the change log; each change is a kind, a channel and an id."""
        ...

    def close(self) -> None: ...


class PoolClass:
    """Base of the classes in `POOLS`: what is known of a kind of pool without opening one.

    A subclass implements `Pool`; calling it as `(folder, *, url="", clock=…)` opens the pool of that run folder. It overrides what
    differs from a database that several processes share.
    """

    name: ClassVar[str] = ""
    """Its name in `POOLS`."""
    durable: ClassVar[bool] = True
    """Whether a later process can read what was written."""
    shareable: ClassVar[bool] = True
    """Whether several processes can have the same pool open."""

    @classmethod
    def check_url(cls, url: str) -> None:
        """Refuse a `pool.url` that this pool cannot use."""
        if url:
            raise ConfigError(f"pool.url has no meaning for pool.name = {cls.name!r}; leave it out, or name 'postgres'")

    @classmethod
    def why_unreadable(cls, folder: Path) -> str | None:
        """Return why the run in `folder` has no pool to read; None if it may have one."""
        return None

    @classmethod
    def size_bytes(cls, folder: Path, url: str) -> int | None:
        """Return its size on disk; None if unknown."""
        return None

    @classmethod
    def reading(cls, folder: Path, url: str) -> AbstractContextManager[PoolDatabase]:
        """Open a connection that cannot write, at one snapshot; also while a run writes, after a crash, and on a copy."""
        raise ConfigError(f"pool.name = {cls.name!r}: only sqlite and postgres can be read by another process")

    @classmethod
    def verify(cls, folder: Path, url: str, progress: CheckProgress) -> "PoolCheck":
        """Read every row with its checksum and compare the tables with each other."""
        raise ConfigError(f"pool.name = {cls.name!r}: only sqlite and postgres can be verified")

    @classmethod
    def compact(cls, folder: Path) -> None:
        """Rewrite its files without gaps; refused while another process has them open."""
        raise ConfigError(
            f"pool.name = {cls.name!r}: only a SQLite file is compacted by hand; PostgreSQL does it automatically (autovacuum)"
        )

    @classmethod
    def rename_run(cls, url: str, before: str, after: str) -> None:
        """Follow a run folder that gets another name; nothing to do for data inside the folder."""
