"""The contract of every pool: what was sampled, graded and trained, each acknowledged write durable."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from penstock.records import Attempt, End, Grade, Group, Lease, Mark, Node, Rollout, Step, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts over one channel, or over all."""

    groups: int = 0
    groups_complete: int = 0
    """All of whose places have ended, whether claimed or not."""
    groups_leased: int = 0
    groups_trained: int = 0
    groups_stale: int = 0
    """Complete, but dropped because their tokens were too old."""
    groups_short: int = 0
    """Ended with fewer graded rollouts than their `min_size`: to be topped up or dropped."""
    groups_dropped: int = 0
    rollouts: int = 0
    steps: int = 0
    tokens: int = 0
    """Sampled tokens."""
    prompt_tokens: int = 0
    """Tokens of nodes, each shared prefix counted once."""
    ends: dict[str, int] = field(default_factory=dict[str, int])
    """How many rollouts ended in each way."""
    drops: dict[str, int] = field(default_factory=dict[str, int])
    """How many groups were dropped, by reason."""
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How many nodes opened a new root, by reason."""
    last_seq: int = -1
    """Of the newest group; -1 where there is none."""
    last_version: int = 0
    """The highest policy version on any token or acknowledgement."""


class Bound(NamedTuple):
    """How many groups of a channel may wait to be trained, and what happens to one more."""

    groups: int
    overflow: Literal["refuse", "drop"]
    """`refuse` it with PoolFull, or `drop` the oldest complete group for it; where none is complete, it is refused all the same."""


Kind = Literal["opened", "ended", "graded", "marked", "lent", "returned", "trained", "stale", "dropped"]


class Change(NamedTuple):
    """One line of what happened to a pool, in order."""

    position: int
    kind: Kind
    channel: str
    id: str
    """Of the rollout that ended or was graded or marked, else of the group."""


class Pool(Protocol):
    """Every write returns once it is durable.

    Writes are idempotent by id; a different value under the same id is refused (PoolConflict). A write whose caller is cancelled is
    finished or refused before the cancellation goes on.
    """

    async def open_group(
        self, task: Task, rollouts: Sequence[Rollout], *, seq: int | None, min_size: int = 0, bound: Bound | None = None
    ) -> None:
        """Make a group whose places are these rollouts; a group id that exists is left as it is.

        `seq` None takes the number after the channel's highest, whoever else opens groups there at the same time. The group is
        complete once all its places have ended with at least `min_size` of them completed; short of that it waits for `replace` or
        `drop`.
        """
        ...

    async def replace(self, lost: Rollout, reason: str) -> Rollout:
        """End `lost` as LOST, if it has no end yet, and open its successor in the same place. Repeating it is harmless.

        Refused for a rollout that completed, and once its group was lent or dropped: what a trainer saw does not change.
        """
        ...

    async def append(self, step: Step, node: Node | None) -> None:
        """Store a step and the node it added (None where the node was there). Refused once the rollout has ended.

        Also refused: token columns of different lengths, a log-probability that is not finite, a node or parent that is not there.
        """
        ...

    async def grade(self, grade: Grade) -> None:
        """Store a grade: one per source, transcript and step.

        Refused for an unknown rollout, one that has ended, or a reward that is not finite.
        """
        ...

    async def end(self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = ()) -> bool:
        """Give the rollout its one end. False where it had one already: the first stays.

        With `grades` of it, as if `grade` had stored each of them just before, all or nothing: where one is refused, as all are
        once the rollout has ended, nothing is written.
        """
        ...

    async def mark(self, mark: Mark) -> bool:
        """Store a curator's word, over an earlier one. False where it comes too late: its group was lent or is done with.

        Refused for an unknown rollout or step, or a quality that is no weight.
        """
        ...

    async def drop(self, group_id: str, reason: str) -> bool:
        """Take a group whose places have all ended out of training, counted by reason; False where it is out or trained already.

        Refused while some place runs, or a trainer has the group.
        """
        ...

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        """Lend the `count` oldest complete groups that are neither lent nor trained; None where fewer are ready.

        A group with a token older than `version - max_staleness` is dropped for good and counted as stale, even where None is
        returned: the lease that comes next tells of it.
        """
        ...

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """Keep the lease for `lease_s` more seconds; PoolError where it expired."""
        ...

    async def release(self, lease_id: str | None = None) -> None:
        """Give the groups of a lease back; of every open lease where None (a trainer that starts)."""
        ...

    async def ack(self, lease_id: str, policy_version: int) -> None:
        """Mark the lease's groups as trained into `policy_version`, for good. Repeating it is harmless.

        Works on an expired or released lease as long as no one else holds its groups; PoolError otherwise.
        """
        ...

    async def attempt(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        """Everything recorded of one rollout, or only its steps and nodes from these numbers on; PoolError for an unknown one."""
        ...

    async def task(self, rollout_id: str) -> Task:
        """The task that the rollout is an attempt at; PoolError for an unknown one."""
        ...

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        """Groups by number, from `first_seq` on."""
        ...

    async def rollouts(self, group_id: str) -> list[Rollout]:
        """All attempts at the places of a group, replaced ones included, by place and attempt; empty for an unknown group."""
        ...

    async def channels(self) -> list[str]:
        """The names of all channels that a group was opened in, sorted."""
        ...

    async def unfinished(self, channel: str) -> list[Group]:
        """Groups in which some place has not ended, and short ones: what a killed process left behind."""
        ...

    async def trained(self) -> list[tuple[str, int]]:
        """The ledger: each trained group with its policy version, in the order of acknowledgement."""
        ...

    async def stats(self, channel: str | None = None) -> PoolStats: ...

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        """What happened after this position, in order: the last one's position is where to go on."""
        ...

    async def position(self) -> int:
        """Of the last change: from where to wait for the next."""
        ...

    async def wait(self, after: int, *, timeout_s: float) -> bool:
        """Wait until something has happened after this position, in whatever process; False where the time was up first."""
        ...

    async def close(self) -> None:
        """Finish pending writes and let go of the files."""
        ...
