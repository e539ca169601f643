"""The read API: what the pool holds, a page at a time, and what a curator says of it. No answer needs the whole pool in memory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.requests import Request
from starlette.responses import Response

from penstock.engines.base import Engine
from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway import views
from penstock.gateway.cursors import MOST, Place, read_channels, read_limit, read_offset, read_places, read_positions
from penstock.gateway.flow_bodies import read, wrong
from penstock.gateway.routes import reply
from penstock.gateway.trajectories import BEYOND
from penstock.pool.base import Pool
from penstock.pool.paging import every_group
from penstock.records import Attempt, Group, Mark

CHANGES = 1000
"""Of changes, how many are read at once."""
PAGES = 20
"""How often, for one answer."""
SCANNED = 1000
"""Of groups, how many are read for one answer at most: one that is asked for little may have to look at many."""

Entries = Callable[[Group], Iterable[dict[str, Any]]]
Marks = dict[int | None, Mark]
"""Of one rollout, by what they are about."""


class Update(BaseModel):
    """What a curator says of a step, or of a whole trajectory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: str = ""
    """`trajectory:step`"""
    trajectory_uid: str = ""
    step_index: int | None = Field(default=None, ge=0)
    trainable: bool | None = None
    quality: FiniteFloat | None = Field(default=None, ge=0)
    note: str | None = Field(default=None, max_length=2000)


class Updates(BaseModel):
    """`POST /api/curation`"""

    model_config = ConfigDict(extra="forbid", strict=True)

    updates: list[Update] = Field(max_length=1000)


class Reading:
    """Endpoints."""

    def __init__(self, pool: Pool, engine: Engine, *, mode: str, body_bytes: int) -> None:
        self._pool = pool
        self._engine = engine
        self._mode = mode
        self._body_bytes = body_bytes

    async def config(self, request: Request) -> Response:
        """What is served, and how it is read."""
        own = {"mode": self._mode, "model": self._engine.model, "policy_version": self._engine.version, "limit": MOST}
        return reply({**own, "channels": await self._pool.channels()})

    async def stats(self, request: Request) -> Response:
        """Counts of the channels that are asked for, and their sums."""
        channels = await self._channels(request)
        by_channel = {name: views.stats(await self._pool.stats(name)) for name in channels}
        cursor = await self._pool.position()
        return reply({**views.total(by_channel.values()), "channels": by_channel, "event_cursor": cursor})

    async def steps(self, request: Request) -> Response:
        """Steps, those of one trajectory where `trajectory_uid` names it; with `tokens=true` their ids too."""
        with_ids = request.query_params.get("tokens") in ("1", "true")
        return await self._page(request, "steps", lambda group: views.steps(group, with_ids=with_ids))

    async def trajectories(self, request: Request) -> Response:
        """Rollouts."""
        return await self._page(request, "trajectories", views.trajectories)

    async def events(self, request: Request) -> Response:
        """What happened since each channel's cursor, in order."""
        channels = await self._channels(request)
        after = read_positions(request, channels)
        at, limit = min(after.values(), default=0), read_limit(request)
        found: list[dict[str, Any]] = []
        more = False
        for _ in range(PAGES):
            page = await self._pool.changes(at, limit=CHANGES)
            for change in page:
                if len(found) == limit:
                    break
                at = change.position
                if change.channel in after and at > after[change.channel]:
                    found.append(views.event(change))
            more = len(page) == CHANGES or (bool(page) and at < page[-1].position)
            if not more or len(found) == limit:
                break
        cursors = {channel: max(at, position) for channel, position in after.items()}
        return reply({"events": found, "cursors": cursors, "cursor": at, "more": more})

    async def curate(self, request: Request) -> Response:
        """Take steps or rollouts out of training, or weigh them; it holds for groups that no trainer has taken yet."""
        body = await read(request, Updates, self._body_bytes)
        late: list[str] = []
        known: dict[str, Marks] = {}
        for place, update in enumerate(body.updates):
            mark = await self._mark(update, place, known)
            try:
                in_time = await self._pool.mark(mark)
            except PoolFailed:
                raise
            except PoolError as error:
                raise RequestError(str(error), status=404, code="unknown_step") from error
            known[mark.rollout_id][mark.step] = mark
            late += [] if in_time else [update.key or mark.rollout_id]
        return reply({"updated": len(body.updates) - len(late), "late": late})

    async def _mark(self, update: Update, place: int, known: dict[str, Marks]) -> Mark:
        """What stands on it now, with what the update says; `known` are the marks of rollouts that were asked for before."""
        rollout_id, index = update.trajectory_uid, update.step_index
        if update.key:
            rollout_id, _, step = update.key.rpartition(":")
            if not rollout_id or not step.isdecimal() or len(step) > 9:
                raise wrong("must be `trajectory:step`", "body", "updates", place, "key")
            index = int(step)
        if not rollout_id:
            raise wrong("say what is meant, by key or trajectory_uid", "body", "updates", place)
        if rollout_id not in known:
            attempt = await self._attempt(rollout_id, first=BEYOND)
            known[rollout_id] = {mark.step: mark for mark in attempt.marks}
        said = update.model_dump(include={"trainable", "quality", "note"}, exclude_none=True)
        return replace(known[rollout_id].get(index) or Mark(rollout_id=rollout_id, step=index), **said)

    async def _page(self, request: Request, name: str, entries: Entries) -> Response:
        limit, skip = read_limit(request), read_offset(request)
        if uid := request.query_params.get("trajectory_uid"):
            group = await self._alone(uid)
            told = list(islice(entries(group), skip, skip + limit + 1))
            return reply({name: told[:limit], "cursors": {}, "more": len(told) > limit})
        channels = await self._channels(request)
        places, found, more = read_places(request, channels), list[dict[str, Any]](), False
        for channel in channels:
            page = await self._read(channel, places[channel], entries, limit=limit - len(found), skip=skip)
            found += page.found
            places[channel], more, skip = page.place, page.more, page.skip
            if more:
                break
        return reply({name: found, "cursors": {channel: str(place) for channel, place in places.items()}, "more": more})

    async def _read(self, channel: str, place: Place, entries: Entries, *, limit: int, skip: int) -> "_Page":
        """Entries of one channel from a place on; the place behind them."""
        page, before, scanned = _Page(place, skip), place.told, 0
        async for group in every_group(self._pool, channel, first_seq=place.seq):
            scanned += 1
            if scanned > SCANNED:
                page.more = True
                return page
            if group.seq != page.place.seq:
                page.place = Place(group.seq)
            for entry in entries(group):
                if group.seq == place.seq and before:
                    before -= 1
                    continue
                if len(page.found) == limit:
                    page.more = True
                    return page
                page.take(entry)
        return page

    async def _alone(self, rollout_id: str) -> Group:
        """A rollout as if its group had no other."""
        attempt = await self._attempt(rollout_id)
        rollout, task = attempt.rollout, await self._pool.task(rollout_id)
        return Group(id=rollout.group_id, seq=0, task=task, channel=rollout.channel, attempts=(attempt,))

    async def _attempt(self, rollout_id: str, *, first: int = 0) -> Attempt:
        try:
            return await self._pool.attempt(rollout_id, first_step=first, first_node=first)
        except PoolFailed:
            raise
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error

    async def _channels(self, request: Request) -> list[str]:
        return read_channels(request, await self._pool.channels())


class _Page:
    """What was read of a channel, and where."""

    def __init__(self, place: Place, skip: int) -> None:
        self.place = place
        self.skip = skip
        """How many more entries are to be passed over."""
        self.found: list[dict[str, Any]] = []
        self.more = False

    def take(self, entry: dict[str, Any]) -> None:
        """One more entry was read."""
        self.place = self.place._replace(told=self.place.told + 1)
        if self.skip:
            self.skip -= 1
        else:
            self.found.append(entry)
