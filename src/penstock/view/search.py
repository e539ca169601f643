"""Finds words in conversations: tasks, what agents sent, and replies; the newest groups first, as far as its time reaches."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import orjson

from penstock.pool.base import PoolDatabase

MAX_FOUND = 50
"""Rollouts on a page."""
BUDGET_S = 0.7
"""How long one page may take; the next one continues there."""
AROUND = 80
"""Characters shown on both sides of what was found."""
TEXT_FIELDS = ("prompt", "messages", "message")
"""The fields of a task, a node and a step that hold what was said."""
_RECORDS = """SELECT r.id, {kind}.id, {kind}.record FROM rollouts AS r JOIN {table} AS {kind} ON {kind}.rollout_id = r.id
              WHERE r.group_id = ? AND r.current = 1 ORDER BY r.place, {kind}.id"""


class FoundText(NamedTuple):
    rollout_id: str
    """Empty if it is in the task of the group."""
    group_id: str
    place: str
    before: str
    text: str
    after: str


class SearchPage(NamedTuple):
    found: list[FoundText]
    groups: int
    """How many were looked through."""
    before: int | None
    """The group below which the next page begins; None if all were looked through."""


def search_page(database: PoolDatabase, channel: str, text: str, *, before: int, budget_s: float = BUDGET_S) -> SearchPage:
    """Looks for `text`, upper or lower case; the first place of each rollout."""
    began, found, groups = time.monotonic(), list[FoundText](), 0
    query = "SELECT id, seq, record FROM groups WHERE channel = ? AND seq < ? ORDER BY seq DESC, id LIMIT 20"
    while rows := database.execute(query, (channel, before)).fetchall():
        for group_id, before, task in rows:
            found += _find_in_group(database, group_id, task, text)
            groups += 1
            if len(found) >= MAX_FOUND or time.monotonic() - began > budget_s:
                return SearchPage(found, groups, before or None)
    return SearchPage(found, groups, None)


def _find_in_group(database: PoolDatabase, group_id: str, task: bytes, text: str) -> Iterator[FoundText]:
    if around := find_in_record(task, text):
        yield FoundText("", group_id, "task", *around)
    seen = set[str]()
    for kind, table, place in (("s", "steps", "reply of call {}"), ("n", "nodes", "request {}")):
        for rollout_id, number, record in database.execute(_RECORDS.format(kind=kind, table=table), (group_id,)).fetchall():
            if rollout_id not in seen and (around := find_in_record(record, text)):
                seen.add(rollout_id)
                yield FoundText(rollout_id, group_id, place.format(number), *around)


def find_in_record(record: bytes, text: str) -> tuple[str, str, str] | None:
    """Returns what stands before, at and after the first place of `text` in what was said; None if it is not there."""
    wanted, quoted = text.lower(), orjson.dumps(text).decode()[1:-1].lower()
    if quoted not in bytes(record).decode("utf-8", "replace").lower():  # most records are done with here, undecoded
        return None
    fields: Mapping[str, Any] = orjson.loads(record)
    for name in TEXT_FIELDS:
        for said in _texts(fields.get(name)):
            at = said.lower().find(wanted)
            if at >= 0:
                end = at + len(text)
                return said[max(0, at - AROUND) : at], said[at:end], said[end : end + AROUND]
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            if key not in ("role", "type", "id", "tool_call_id"):
                yield from _texts(each)
