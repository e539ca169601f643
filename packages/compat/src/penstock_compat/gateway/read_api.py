"""The read API: pages of steps, trajectories and events of the pool, and curation marks.

A cursor holds a position in each channel, so that no entry is missed or repeated while channels grow.
"""

import asyncio
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.requests import Request
from starlette.responses import Response

from penstock.engines.base import Engine
from penstock.gateway.auth import Access
from penstock.gateway.graph import TokenGraph
from penstock.gateway.routes import FunctionEndpoint, Route, json_response
from penstock.gateway.session import pool_refusals
from penstock.pool.base import AFTER_ALL, Change, Pool, PoolStats
from penstock.pool.export.histories import iterate_groups
from penstock.records import Group, Mark, Rollout, Step
from penstock_compat.gateway.bodies import detail_body, read_small, schema_error

MAX_ENTRIES = 200
"""Entries in one response, at most and by default."""
MAX_CHANNELS = 100
"""Channels in one request; each is read in turn."""
MAX_OFFSET = 1000
"""Bound of `offset`, which reads what it skips; a cursor does not."""
MAX_TEXT_CHARACTERS = 2_000
"""How much is shown of a reply's text."""
CHANGES_PER_READ = 1000
MAX_READS = 20
"""How often changes are read for one response."""
MAX_SCANNED_GROUPS = 100
"""Groups read for one response, of all its channels together, however few entries they give."""
MAX_IDS = 1_000_000
"""Token ids in one response. The entry that goes beyond it is the last one."""
ROLLOUT_CHANGES = ("ended", "graded", "marked")
Entries = Callable[[Group], Iterable[dict[str, Any]]]
Marks = dict[int | None, Mark]
"""The marks of one rollout, by step; None is the whole rollout."""


class ChannelCursor(NamedTuple):
    """A position in a channel: the seq of a group, and how many of its entries were sent."""

    seq: int = 0
    sent: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.sent}"


class CurationUpdate(BaseModel):
    """A mark for a step or for a whole trajectory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: str = Field(default="", max_length=1000)
    """`trajectory:step`"""
    trajectory_uid: str = Field(default="", max_length=1000)
    step_index: int | None = Field(default=None, ge=0, lt=2**31)
    trainable: bool | None = None
    quality: FiniteFloat | None = Field(default=None, ge=0)
    note: str | None = Field(default=None, max_length=2000)


class CurationBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    updates: list[CurationUpdate] = Field(max_length=1000, fail_fast=True)


class ReadApi:
    def __init__(self, pool: Pool, engine: Engine, *, mode: str) -> None:
        self._pool = pool
        self._engine = engine
        self._mode = mode
        self._reading = asyncio.Semaphore(1)
        """One response is put together at a time: several threads that compute would delay every model call."""

    def routes(self) -> list[Route]:
        read = {
            "config": self.config,
            "stats": self.stats,
            "steps": self.steps,
            "trajectories": self.trajectories,
            "events": self.events,
        }
        return [
            *(Route("GET", f"/api/{name}", Access.ADMIN, FunctionEndpoint(each), detail_body) for name, each in read.items()),
            Route("POST", "/api/curation", Access.ADMIN, FunctionEndpoint(self.curate), detail_body),
        ]

    async def config(self, request: Request) -> Response:
        own = {"mode": self._mode, "model": self._engine.model, "policy_version": self._engine.version, "limit": MAX_ENTRIES}
        return json_response({**own, "channels": await self._pool.channels()})

    async def stats(self, request: Request) -> Response:
        """Counts of the requested channels, and their sums."""
        refuse_unknown(request, STATS_PARAMETERS)
        channels = await self._channels(request)
        async with self._reading:
            by_channel = {name: stats(await self._pool.stats(name)) for name in channels}
            cursor = await self._pool.position()
        return json_response({**total(by_channel.values()), "channels": by_channel, "event_cursor": cursor})

    async def steps(self, request: Request) -> Response:
        """Steps, of one trajectory if `trajectory_uid` is given; with `tokens=true` also their token ids."""
        with_ids = request.query_params.get("tokens") in ("1", "true")
        return await self._page(request, "steps", lambda group: steps(group, with_ids=with_ids))

    async def trajectories(self, request: Request) -> Response:
        return await self._page(request, "trajectories", trajectories)

    async def events(self, request: Request) -> Response:
        """Changes since each channel's cursor, in order."""
        refuse_unknown(request, EVENT_PARAMETERS)
        channels = await self._channels(request)
        after = read_positions(request, channels)
        at, limit = min(after.values(), default=0), read_limit(request)
        found: list[dict[str, Any]] = []
        more = False
        for _ in range(MAX_READS):
            page = await self._pool.changes(at, limit=CHANGES_PER_READ)
            for change in page:
                if len(found) == limit:
                    break
                at = change.position
                if change.channel in after and at > after[change.channel]:
                    found.append(event(change))
            more = len(page) == CHANGES_PER_READ or (bool(page) and at < page[-1].position)
            if not more or len(found) == limit:
                break
        cursors = {channel: max(at, position) for channel, position in after.items()}
        return json_response({"events": found, "cursors": cursors, "cursor": at, "more": more})

    async def curate(self, request: Request) -> Response:
        """Exclude steps or rollouts from training, or weight them. Has no effect on groups that a trainer has claimed (`late`)."""
        body = await read_small(request, CurationBody)
        late: list[str] = []
        known: dict[str, Marks] = {}
        for index, update in enumerate(body.updates):
            mark = await self._mark(update, index, known)
            with pool_refusals(status=404, code="unknown_step"):
                in_time = await self._pool.mark(mark)
            known[mark.rollout_id][mark.step] = mark
            late += [] if in_time else [update.key or mark.rollout_id]
        return json_response({"updated": len(body.updates) - len(late), "late": late})

    async def _mark(self, update: CurationUpdate, at: int, known: dict[str, Marks]) -> Mark:
        """The current mark with the update applied; `known` caches the marks of rollouts that were read."""
        rollout_id, index = update.trajectory_uid, update.step_index
        if update.key:
            rollout_id, _, step = update.key.rpartition(":")
            if not rollout_id or not step.isdecimal() or len(step) > 9:
                raise schema_error("must be `trajectory:step`", "body", "updates", at, "key")
            index = int(step)
        if not rollout_id:
            raise schema_error("say what is meant, by key or trajectory_uid", "body", "updates", at)
        if rollout_id not in known:
            rollout = await self._rollout(rollout_id, first=AFTER_ALL)
            known[rollout_id] = {mark.step: mark for mark in rollout.marks}
        changes = update.model_dump(include={"trainable", "quality", "note"}, exclude_none=True)
        return replace(known[rollout_id].get(index) or Mark(rollout_id=rollout_id, step=index), **changes)

    async def _page(self, request: Request, name: str, entries: Entries) -> Response:
        refuse_unknown(request, PAGE_PARAMETERS[name])
        wanted = request.query_params.get("prompt_uid")

        def of_prompt(group: Group) -> Iterable[dict[str, Any]]:
            return entries(group) if wanted in (None, prompt_uid(group), group.id) else ()

        page = _EntryPage(of_prompt, limit=read_limit(request), skip=read_offset(request))
        channels = await self._channels(request)
        if uid := request.query_params.get("trajectory_uid"):
            async with self._reading:
                group = await self._as_group(uid)
                if group.channel in channels:
                    await asyncio.to_thread(page.add, group)
            return json_response({name: page.found, "cursors": {}, "more": page.more})
        cursors = read_cursors(request, channels)
        async with self._reading:
            for channel in channels:
                await self._read(channel, cursors[channel], page)
                cursors[channel] = page.cursor
                if page.more:
                    break
        shown = {channel: str(cursor) for channel, cursor in cursors.items()}
        return json_response({name: page.found, "cursors": shown, "more": page.more})

    async def _read(self, channel: str, cursor: ChannelCursor, page: "_EntryPage") -> None:
        """Add a channel's entries from a cursor on to the page."""
        page.begin(cursor)
        async for group in iterate_groups(self._pool, channel, first_seq=cursor.seq):
            await asyncio.to_thread(page.add, group)
            if page.more:
                return

    async def _as_group(self, rollout_id: str) -> Group:
        """Returns a rollout as a group of one."""
        rollout, task = await self._rollout(rollout_id), await self._pool.task(rollout_id)
        return Group(id=rollout.ref.group_id, seq=0, task=task, channel=rollout.ref.channel, rollouts=(rollout,))

    async def _rollout(self, rollout_id: str, *, first: int = 0) -> Rollout:
        with pool_refusals(status=404, code="unknown_rollout"):
            return await self._pool.rollout(rollout_id, first_step=first, first_node=first)

    async def _channels(self, request: Request) -> list[str]:
        return read_channels(request, await self._pool.channels())


class _EntryPage:
    """The entries of one response, and the cursor after them in the channel that is read."""

    def __init__(self, entries: Entries, *, limit: int, skip: int) -> None:
        self.found: list[dict[str, Any]] = []
        self.more = False
        """Whether there is more than the page may hold."""
        self.cursor = ChannelCursor()
        self._start = self.cursor
        self._entries = entries
        self._limit = limit
        self._skip = skip
        """Entries still to be skipped."""
        self._sent = 0
        """Entries of the cursor's group that were sent before."""
        self._groups = 0
        self._ids = 0

    def begin(self, cursor: ChannelCursor) -> None:
        """Starts a channel at a cursor."""
        self.cursor = self._start = cursor
        self._sent = cursor.sent

    def add(self, group: Group) -> None:
        """Add the entries of the channel's next group. Runs in a thread."""
        self._groups += 1
        if self._groups > MAX_SCANNED_GROUPS:
            self.more = True
            return
        if group.seq != self.cursor.seq:
            self.cursor = ChannelCursor(group.seq)
        for entry in self._entries(group):
            if group.seq == self._start.seq and self._sent:
                self._sent -= 1
            elif len(self.found) == self._limit or self._ids > MAX_IDS:
                self.more = True
                return
            else:
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        self.cursor = self.cursor._replace(sent=self.cursor.sent + 1)
        if self._skip:
            self._skip -= 1
        else:
            self.found.append(entry)
            self._ids += len(entry.get("prompt_ids", ()))


# Query parameters

PAGE_PARAMETERS = {
    "steps": ("channel", "channels", "trajectory_uid", "prompt_uid", "limit", "offset", "cursor", "tokens"),
    "trajectories": ("channel", "channels", "trajectory_uid", "prompt_uid", "limit", "offset", "cursor"),
}
EVENT_PARAMETERS = ("channel", "channels", "limit", "cursor")
STATS_PARAMETERS = ("channel", "channels")


def refuse_unknown(request: Request, known: Sequence[str]) -> None:
    """SchemaError 422 for a parameter that would be ignored."""
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise schema_error(f"is not a parameter of this route; {hint}", "query", name)


def read_limit(request: Request) -> int:
    return min(_query_number(request, "limit", MAX_ENTRIES, low=1), MAX_ENTRIES)


def read_offset(request: Request) -> int:
    offset = _query_number(request, "offset", 0, low=0)
    if offset > MAX_OFFSET:
        raise schema_error(f"skip at most {MAX_OFFSET} entries; use the cursors of the last answer to read more", "query", "offset")
    return offset


def read_channels(request: Request, known: Iterable[str]) -> list[str]:
    """The channels in `channel` or `channels`, comma-separated; all known ones if there are none."""
    given = request.query_params.get("channels") or request.query_params.get("channel") or ""
    named = list(dict.fromkeys(name for part in given.split(",") if (name := part.strip())))
    channels = named or list(known)
    if len(channels) > MAX_CHANNELS:
        raise schema_error(f"{len(channels)} channels are meant; name at most {MAX_CHANNELS}", "query", "channel")
    return channels


def read_positions(request: Request, channels: Iterable[str]) -> dict[str, int]:
    """The position of each channel for events. `cursor` is one number for all, or `train:12,val:9`."""
    given = request.query_params.get("cursor", "")
    if given.isdecimal():
        return dict.fromkeys(channels, _cursor_number(given))
    parts = _cursor_parts(given)
    return {channel: _cursor_number(parts.get(channel, "0")) for channel in channels}


def read_cursors(request: Request, channels: Iterable[str]) -> dict[str, ChannelCursor]:
    """The cursor of each channel for entries: `train:12.3,val:0.0`."""
    parts = _cursor_parts(request.query_params.get("cursor", ""))
    cursors_by_channel: dict[str, ChannelCursor] = {}
    for channel in channels:
        seq, _, sent = parts.get(channel, "0.0").partition(".")
        cursors_by_channel[channel] = ChannelCursor(_cursor_number(seq), _cursor_number(sent or "0"))
    return cursors_by_channel


def _cursor_parts(given: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in filter(None, given.split(",")):
        channel, colon, position = part.rpartition(":")
        if not colon or not channel:
            raise schema_error("must be like `train:12,val:9`, as the last answer's cursors say", "query", "cursor")
        parts[channel.strip()] = position
    return parts


def _cursor_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise schema_error("must hold whole numbers, as the last answer's cursors do", "query", "cursor")
    return int(text)


def _query_number(request: Request, name: str, default: int, *, low: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18 or int(text) < low:
        raise schema_error(f"must be a whole number, {low} or more", "query", name)
    return int(text)


# Entries


def trajectories(group: Group) -> Iterator[dict[str, Any]]:
    """One entry for each rollout of a group."""
    for rollout in group.rollouts:
        versions = [version for step in rollout.steps for version in step.versions]
        yield {
            "trajectory_uid": rollout.ref.id,
            "prompt_uid": prompt_uid(group),
            "group_id": group.id,
            "channel": group.channel,
            "status": rollout.end or "running",
            "complete": rollout.end is not None,
            "reward": reward_of(rollout),
            "steps": len(rollout.steps),
            "tokens": sum(len(step.completion_ids) for step in rollout.steps),
            "policy_version": max(versions, default=None),
            "trainable": not rollout.curated_out,
            "message": rollout.message,
        }


def steps(group: Group, *, with_ids: bool = False) -> Iterator[dict[str, Any]]:
    """One entry for each step of a group's rollouts."""
    for rollout in group.rollouts:
        graph, sizes = TokenGraph(rollout) if with_ids else None, _prompt_sizes(rollout)
        marks: dict[int | None, Mark] = {mark.step: mark for mark in rollout.marks}
        rewards: dict[int | None, float] = {}
        for grade in rollout.grades:
            rewards[grade.step] = rewards.get(grade.step, 0) + grade.reward
        out, last = rollout.curated_out, max((step.index for step in rollout.steps), default=-1)
        for step in rollout.steps:
            yield _step(step, marks.get(step.index) or Mark(rollout_id=rollout.ref.id), out=out) | {
                "reward": rewards.get(step.index),
                "prompt_uid": prompt_uid(group),
                "channel": group.channel,
                "prompt_length": sizes[step.index],
                "is_last": rollout.end is not None and step.index == last,
                **({} if graph is None else _ids(graph, step)),
            }


def _prompt_sizes(rollout: Rollout) -> dict[int, int]:
    """Length of each step's prompt in tokens."""
    nodes = {node.id: node for node in rollout.nodes}
    sizes: dict[int, int] = {}
    ends: dict[int | None, int] = {None: 0}
    for step in rollout.steps:
        node = nodes[step.node]
        sizes[step.index] = ends[node.parent] + len(node.token_ids)
        ends[step.index] = sizes[step.index] + len(step.completion_ids)
    return sizes


def _ids(graph: TokenGraph, step: Step) -> dict[str, Any]:
    known = step.logprobs if step.behaviour_known else None
    return {"prompt_ids": graph.prompt(step.node), "response_ids": step.completion_ids, "rollout_log_probs": known}


def _step(step: Step, mark: Mark, *, out: bool) -> dict[str, Any]:
    """The step with its mark; `out`: its whole rollout is excluded from training."""
    return {
        "key": f"{step.rollout_id}:{step.index}",
        "trajectory_uid": step.rollout_id,
        "step_index": step.index,
        "response_length": len(step.completion_ids),
        "policy_version": step.versions[-1] if step.versions else None,
        "finish": step.finish,
        "transcript": step.transcript,
        **({"policy": step.policy} if step.policy else {}),
        "text": (step.message.get("content") or "")[:MAX_TEXT_CHARACTERS],
        "trainable": mark.trainable and not out,
        "quality": mark.quality,
        "note": mark.note,
    }


def event(change: Change) -> dict[str, Any]:
    name = "trajectory_uid" if change.kind in ROLLOUT_CHANGES else "group_id"
    return {"cursor": change.position, "kind": change.kind, "channel": change.channel, name: change.id}


def stats(counts: PoolStats) -> dict[str, Any]:
    """The counts of a channel, under our names and under those of the Claw-R1 API."""
    ready = counts.groups_complete - counts.groups_trained - counts.groups_leased - counts.groups_stale
    ready -= counts.groups_dropped + counts.groups_short
    return asdict(counts) | {
        "total_steps": counts.steps,
        "total_produced": counts.steps,
        "total_consumed": counts.groups_trained,
        "total_dropped": counts.groups_dropped + counts.groups_stale,
        "total_trajectories": counts.rollouts,
        "complete_trajectories": sum(counts.ends.values()),
        "total_prompt_groups": counts.groups,
        "consumed_prompt_groups": counts.groups_trained,
        "pending_prompt_groups": counts.groups - counts.groups_complete,
        "ready_prompt_groups": ready,
        "queue_size": counts.groups - counts.groups_trained - counts.groups_dropped - counts.groups_stale,
    }


def total(counts: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The sums over channels, of the counts that can be added."""
    summed: dict[str, int] = {}
    for channel in counts:
        for name, value in channel.items():
            if isinstance(value, int) and not name.startswith("last_"):
                summed[name] = summed.get(name, 0) + value
    return summed


def prompt_uid(group: Group) -> str:
    """The prompt uid that the flow gave, else the group's id."""
    return str((group.task.metadata or {}).get("prompt_uid") or group.id)


def reward_of(rollout: Rollout) -> float | None:
    """The reward; of a running rollout the sum of its steps' grades so far."""
    if rollout.end is not None or not rollout.grades:
        return rollout.reward
    return sum(grade.reward for grade in rollout.grades if grade.step is not None)
