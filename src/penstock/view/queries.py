"""Reads of a pool for the dashboard, and their values as bounded texts.

Each read takes a bounded number of rows by an index, however large the pool is.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from penstock.errors import PoolError
from penstock.pool import reads
from penstock.pool.base import AFTER_ALL, PoolDatabase
from penstock.pool.rows import RecordRow, decode_row
from penstock.pool.rules import GroupState
from penstock.records import Group, Rollout, Task

PAGE_GROUPS = 50
PAGE_ROLLOUTS = 100
SCANNED_GROUPS = 20_000
"""Groups that are looked through for one page of rollouts with a certain end."""
MAX_LEDGER = 200
_COLUMNS = "id, seq, channel, state, lease_id, record, crc"


class GroupRow(NamedTuple):
    """A group without the tokens and messages of its rollouts."""

    id: str
    seq: int
    channel: str
    state: str
    task: Task
    attempts: tuple[Rollout, ...]
    """Per place the last one, without nodes and steps."""
    sizes: dict[str, tuple[int, int]]
    """Calls and sampled tokens of each rollout."""
    damaged: dict[str, str]
    """Rollouts that cannot be read, with the reason."""

    @property
    def group(self) -> Group:
        return Group(id=self.id, seq=self.seq, task=self.task, channel=self.channel, rollouts=self.attempts)


def group_rows(database: PoolDatabase, ids: Iterable[str]) -> list[GroupRow]:
    """Reads groups by id, in this order; unknown ones are left out."""
    rows = [database.execute(f"SELECT {_COLUMNS} FROM groups WHERE id = ?", (name,)).fetchone() for name in ids]
    return [_group_row(database, row) for row in rows if row is not None]


def group_page(database: PoolDatabase, channel: str, *, before: int, state: str = "") -> list[GroupRow]:
    """Reads a page of groups, the newest first, from below the number `before` on."""
    if state:
        query = f"SELECT {_COLUMNS} FROM groups WHERE channel = ? AND state = ? AND seq < ? ORDER BY seq DESC, id LIMIT ?"
        values: Sequence[Any] = (channel, state, before, PAGE_GROUPS)
    else:
        query = f"SELECT {_COLUMNS} FROM groups WHERE channel = ? AND seq < ? ORDER BY seq DESC, id LIMIT ?"
        values = (channel, before, PAGE_GROUPS)
    return [_group_row(database, row) for row in database.execute(query, values).fetchall()]


def _group_row(database: PoolDatabase, row: tuple[Any, ...]) -> GroupRow:
    name, seq, channel, state, _, record, crc = row
    attempts, sizes, broken = list[Rollout](), dict[str, tuple[int, int]](), dict[str, str]()
    query = "SELECT id FROM rollouts WHERE group_id = ? AND current = 1 ORDER BY place"
    for (rollout,) in database.execute(query, (name,)).fetchall():
        try:
            attempts.append(reads.read_rollout(database, rollout, first_step=AFTER_ALL, first_node=AFTER_ALL))
            sizes[rollout] = call_sizes(database, rollout)
        except PoolError as error:
            broken[rollout] = str(error)
    try:
        task = _task(name, record, crc)
    except PoolError as error:
        task, broken[name] = Task(id="", prompt=()), str(error)
    return GroupRow(name, seq, channel, state, task, tuple(attempts), sizes, broken)


def _task(group_id: str, record: bytes, crc: int) -> Task:
    return decode_row(Task, RecordRow(record, (), crc), f"the task of group {group_id!r}")


def group_task(database: PoolDatabase, group_id: str) -> Task:
    """Reads the task of a group, and nothing of its rollouts."""
    record, crc = database.execute("SELECT record, crc FROM groups WHERE id = ?", (group_id,)).fetchone()
    return _task(group_id, record, crc)


def call_sizes(database: PoolDatabase, rollout_id: str) -> tuple[int, int]:
    """Returns a rollout's number of calls and of sampled tokens."""
    query = "SELECT count(*), sum(length(completion_ids)) FROM steps WHERE rollout_id = ?"
    calls, size = database.execute(query, (rollout_id,)).fetchone()
    return int(calls), int(size or 0) // 4


class EndedRollout(NamedTuple):
    seq: int
    id: str
    group_id: str
    message: str


class EndedPage(NamedTuple):
    found: list[EndedRollout]
    before: int | None
    """Where the next page begins; None after the last."""


def ended_page(database: PoolDatabase, channel: str, end: str, *, before: int) -> EndedPage:
    """Reads rollouts with a certain end, of the newest groups first."""
    top = min(before, last_seq(database, channel) + 1)
    low = max(0, top - SCANNED_GROUPS)
    query = """SELECT g.seq, r.id, g.id, r.message FROM groups AS g JOIN rollouts AS r ON r.group_id = g.id
               WHERE g.channel = ? AND g.seq < ? AND g.seq >= ? AND r.ended = ? ORDER BY g.seq DESC, r.id LIMIT ?"""
    rows = database.execute(query, (channel, top, low, end, PAGE_ROLLOUTS + 1)).fetchall()
    found = [EndedRollout(seq, name, group, bytes(text).decode("utf-8", "replace")) for seq, name, group, text in rows]
    if len(found) > PAGE_ROLLOUTS:
        last = found[PAGE_ROLLOUTS].seq
        whole = [each for each in found if each.seq > last]
        return EndedPage(whole or found, last + 1 if whole else last)
    return EndedPage(found, low or None)


def last_seq(database: PoolDatabase, channel: str) -> int:
    row = database.execute("SELECT seq FROM groups WHERE channel = ? ORDER BY seq DESC LIMIT 1", (channel,)).fetchone()
    return row[0] if row else -1


def trained_version(database: PoolDatabase, group_id: str) -> int | None:
    row = database.execute("SELECT version FROM ledger WHERE group_id = ?", (group_id,)).fetchone()
    return row[0] if row else None


def state_of(database: PoolDatabase, group_id: str) -> str:
    row = database.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
    return row[0] if row else ""


class LedgerLine(NamedTuple):
    position: int
    group_id: str
    version: int
    lease_id: str


def ledger_page(database: PoolDatabase, *, before: int) -> list[LedgerLine]:
    """Reads the newest lines of the ledger below a position."""
    query = "SELECT position, group_id, version, lease_id FROM ledger WHERE position < ? ORDER BY position DESC LIMIT ?"
    return [LedgerLine(*row) for row in database.execute(query, (before, MAX_LEDGER)).fetchall()]


class LeaseRow(NamedTuple):
    id: str
    renewals: int
    lease_s: float
    groups: list[str]


def lease_rows(database: PoolDatabase) -> list[LeaseRow]:
    """Reads the leases that are neither released nor acknowledged."""
    rows = database.execute("SELECT id, beat, lease_s FROM leases WHERE open = 1 LIMIT 100").fetchall()
    groups = "SELECT group_id FROM lease_groups WHERE lease_id = ? ORDER BY position LIMIT 200"
    return [
        LeaseRow(name, beat, lease_s, [group for (group,) in database.execute(groups, (name,)).fetchall()])
        for name, beat, lease_s in rows
    ]


class LedgerCheck(NamedTuple):
    lines: int
    groups: int
    """Different groups among them."""
    trained: int
    """Groups that are counted as trained."""

    @property
    def is_exact(self) -> bool:
        return self.lines == self.groups == self.trained


def check_ledger(database: PoolDatabase) -> LedgerCheck:
    """Compares the ledger with the running counts: every trained group is in it exactly once."""
    lines, groups = database.execute("SELECT count(*), count(DISTINCT group_id) FROM ledger").fetchone()
    query = "SELECT sum(n) FROM tally WHERE kind = 'state' AND name = ?"
    (trained,) = database.execute(query, (GroupState.TRAINED,)).fetchone()
    return LedgerCheck(int(lines), int(groups), int(trained or 0))


def exists(database: PoolDatabase, table: str, name: str) -> bool:
    """Whether a group or rollout has this id; `table` is one of ours, never a caller's."""
    return database.execute(f"SELECT 1 FROM {table} WHERE id = ?", (name,)).fetchone() is not None


MAX_TEXT = 20_000
"""Characters of one string; more is cut, with a note."""
MAX_ITEMS = 500
"""Entries of one list or object."""
MAX_DEPTH = 12

REASONS = {
    "zero_advantage": "its reward is the group's mean: nothing to learn from",
    "groups_equal": "all rewards of the group are the same: nothing to learn from",
    "ungraded": "the rollout has no reward",
    "behaviour_unknown": "the engine did not tell with which probability it sampled: see train.unknown_logprobs",
    "curated": "a curator took it out",
    "picture_in_context": "sampled after a picture, which the trainer cannot see",
    "relayed": "an endpoint gave it as text: its tokens were never seen here",
    "empty": "no token was sampled",
    "greedy": "sampled at temperature 0: there is no choice to learn from",
    "cancelled": "the call was cancelled before it ended",
    "error": "the call ended with an error",
    "context_missing": "what came before it is not recorded",
    "context_flawed": "what came before it has a flaw",
    "context_differs": "its recorded context has another digest than the one that the engine saw",
    "bad_token": "a token id is impossible",
    "bad_logprob": "a log-probability is impossible",
    "bad_version": "a policy version is impossible",
    "misaligned": "tokens, log-probabilities and versions differ in number",
    "constrained": "its tokens were not chosen from all, and the trainer cannot tell from which",
    "grammar_unknown": "its grammar cannot be compiled here, so the tokens that it allowed are not known",
    "not_allowed": "a token is not one that its grammar allows",
    "left_out": "the trainer did not record it with what it trained, such as a reply whose choices cannot be replayed",
    "not_trained": "its group has not been trained",
    "stale": "its tokens were too old",
    "history_edited": "the caller changed earlier messages: they were rendered again, as a new branch",
    "reply_edited": "the caller sent a reply that was not sampled",
    "tools_changed": "the caller changed the tools: all was rendered again",
    "template_rewrites_history": "the chat template writes earlier messages differently: all was rendered again",
}
"""Why tokens were not trained, or groups dropped."""
ENDS = {
    "agent_error": "the agent raised an error, or made no model call",
    "timeout": "it ran longer than rollout.agent_timeout_s, or its group than rollout.group_timeout_s",
    "cancelled": "the run was stopped; its place got a new attempt",
    "lost": "the process died; its place got a new attempt",
    "engine_error": "the engine failed a call",
    "grader_error": "the grader raised, ran too long, or gave no finite reward",
    "refused": "a runner elsewhere would not take it",
    "superseded": "a runner elsewhere gave up on it for another attempt",
    "branch_diverged": "a branch whose program did not repeat the recorded requests",
}
NOTICES = {
    "finish:length": "the reply was cut at its limit of tokens",
    "capped:max_tokens": "asked for more tokens than sampling.max_tokens",
}
MEANINGS = {"ends": ENDS, "notices": NOTICES}
"""By kind of loss; the others have theirs in `REASONS`."""


def cut(value: Any, most: int = MAX_TEXT, depth: int = MAX_DEPTH) -> Any:
    """Returns JSON values with long texts and lists cut. What is left out is said in place."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most:,} more characters)"
    if isinstance(value, dict):
        if depth == 0:
            return "…"
        pairs = list(cast("dict[str, Any]", value).items())
        shown = {cut(str(key), 200): cut(item, most, depth - 1) for key, item in pairs[:MAX_ITEMS]}
        return shown | ({"…": f"{len(pairs) - MAX_ITEMS:,} more"} if len(pairs) > MAX_ITEMS else {})
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        if depth == 0:
            return "…"
        more = [f"… {len(items) - MAX_ITEMS:,} more"] if len(items) > MAX_ITEMS else []
        return [cut(item, most, depth - 1) for item in items[:MAX_ITEMS]] + more
    return value
