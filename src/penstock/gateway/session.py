"""One open rollout: its token graph, its sampling defaults and its running calls."""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

from penstock.chat.templates import Tool
from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.auth import Tokens
from penstock.gateway.call import Limits
from penstock.gateway.graph import TokenGraph
from penstock.gateway.last_request import LastRequest
from penstock.gateway.pending_response import PendingResponse
from penstock.gateway.shared_counters import Peers
from penstock.pool.base import Pool
from penstock.records import Attempt, Message, Rollout, Sampling, Task, make_rollout


class Named(NamedTuple):
    """Answers to one request that are on their way."""

    last: int
    """The highest of their numbers."""
    flying: int


class Session:
    """One rollout's way into the gateway; `stored` is what the pool holds of it, where that is known."""

    def __init__(
        self,
        rollout: Rollout,
        sampling: Sampling,
        *,
        tokens: Tokens,
        base_url: str,
        limits: Limits,
        peers: Peers,
        stored: Attempt | None = None,
        heard: tuple[int, ...] | None = None,
    ) -> None:
        self.rollout = rollout
        self.rollout_id = rollout.id
        self._tokens = tokens
        self.token = tokens.issue(rollout.id)
        """The model token: opens model routes for this rollout, nothing else."""
        self.base_url = base_url
        """Of the OpenAI routes, ending in `/v1`."""
        self.sampling = sampling
        """What holds for calls that do not say otherwise; its `max_tokens` is a cap too."""
        self.recording = asyncio.Lock()
        """Held while a step is stored, so that steps are numbered in the order in which they became durable."""
        self.flights: dict[str, PendingResponse] = {}
        """Calls that are being answered, by the digest of their request: a retry joins the one that it repeats."""
        self.refused: set[str] = set()
        """Requests whose last answer was an error: sent again they are sampled, whatever was answered before."""
        self.partial = False
        """Whether the pool holds of it what is not known here: a grade, or a text without its secrets."""
        self.closed = False
        self._limits = limits
        self.shared = peers.of > 1
        """Whether other workers may record steps of it."""
        self._peers = peers
        self._heard = heard
        """What the other workers had told when the pool was last asked."""
        self._graph = TokenGraph(stored) if stored else None
        self._running: set[asyncio.Task[Any]] = set()
        self._talks: dict[str, LastRequest] = {}
        self._named: dict[str, Named] = {}
        """Digest of a request, to its answers on their way."""
        self._allowance = limits.calls_per_s
        self._counted_at = time.monotonic()

    @property
    def flow_token(self) -> str:
        """Lets a flow submit, grade and complete this rollout."""
        return self._tokens.flow(self.rollout_id)

    @property
    def tasks(self) -> Set[asyncio.Task[Any]]:
        """The calls that run."""
        return self._running

    async def graph(self, pool: Pool) -> TokenGraph:
        """The rollout's token graph, read from the pool on the first call."""
        if self._graph is None:
            attempt = await pool.attempt(self.rollout_id)
            if attempt.end is not None:
                raise over(attempt)
            self._graph = self._graph or TokenGraph(attempt)
        return self._graph

    async def catch_up(self, pool: Pool) -> None:
        """Take in what other workers have recorded; RequestError 409 where one of them ended the rollout."""
        if (graph := self._graph) is None:
            return
        attempt = await pool.attempt(self.rollout_id, first_step=graph.next_step, first_node=graph.next_node)
        if attempt.end is not None:
            raise over(attempt)
        graph.grow(attempt)

    async def hear(self, pool: Pool, *, again: bool) -> None:
        """Catch up where another worker has told something new; `again`, in any case: one that died may not have come to tell."""
        told = self._peers.look(self.rollout_id)
        if again or told is None or told != self._heard:
            await self.catch_up(pool)
            self._heard = told

    def tell(self) -> None:
        """Let the other workers know that a step is stored."""
        self._peers.tell(self.rollout_id)

    def recorded(self) -> Attempt | None:
        """Its nodes and steps as they are stored; None where only the pool knows them all."""
        if self._graph is None or self.shared or self.partial:
            return None
        return Attempt(rollout=self.rollout, nodes=tuple(self._graph.nodes.values()), steps=tuple(self._graph.steps.values()))

    def forget(self) -> None:
        """Read the graph again before the next call: a write failed, so the pool may know more or less than we do."""
        self._graph = None

    def talk(self, transcript: str) -> LastRequest:
        """What the transcript's last call said; the least recent one is forgotten where there are many."""
        talk = self._talks.pop(transcript, None) or LastRequest()
        while len(self._talks) >= TALKS:
            del self._talks[next(iter(self._talks))]
        self._talks[transcript] = talk
        return talk

    def refuse(self, request: str) -> None:
        """Remember that a request got an error for an answer."""
        if len(self.refused) >= 1000:
            self.refused.clear()
        self.refused.add(request)

    def carrying(self, flight: PendingResponse) -> "Carrying":
        """Count the current task as one of the rollout's calls while it carries `flight`."""
        return Carrying(self, flight)

    def begin(self, flight: PendingResponse, task: "asyncio.Task[Any]") -> None:
        """Name the flight's answer, and let retries of its request join it; RequestError where it would be one too many."""
        self._check_limits()
        request, named = flight.request, self._named.get(flight.request, Named(-1, 0))
        stored = self._graph.last_number(request) if self._graph else -1
        times = max(stored // self._peers.of, named.last) + 1  # of workers each has numbers of its own
        self._named[request] = Named(times, named.flying + 1)
        flight.name = f"{request}-{times * self._peers.of + self._peers.number}"
        self.flights[request] = flight
        self._running.add(task)

    def finish(self, flight: PendingResponse, name: str, task: "asyncio.Task[Any]") -> None:
        """The flight that was begun under `name` is over."""
        request = name.rpartition("-")[0]
        last, flying = self._named.pop(request)
        if flying > 1:
            self._named[request] = Named(last, flying - 1)
        self._running.discard(task)
        if self.flights.get(flight.request) is flight:
            del self.flights[flight.request]

    def _check_limits(self) -> None:
        """Refuse a call that would be one too many, saying of what."""
        if self.closed:
            raise has_ended(self.rollout_id)
        limits, who = self._limits, f"rollout {self.rollout_id}"
        if len(self._running) >= limits.concurrent_calls:
            text = f"{who} has {len(self._running)} calls running; wait for one to end"
            raise RequestError(text, status=429, code="too_many_calls")
        if not self._spend():
            text = f"{who} makes more than {limits.calls_per_s:g} calls a second; slow down"
            raise RequestError(text, status=429, code="rate_limit_exceeded")
        if self._graph and self._graph.next_step >= limits.steps:
            raise RequestError(f"{who} has made {limits.steps} calls; end it", code="too_many_steps")
        if self._graph and self._graph.tokens >= limits.tokens:
            raise RequestError(f"{who} has sampled {self._graph.tokens} tokens; end it", code="too_many_tokens")

    def _spend(self) -> bool:
        """Take one call off the allowance, which fills up again with time."""
        rate, now = self._limits.calls_per_s, time.monotonic()
        self._allowance = min(max(rate, 1.0), self._allowance + (now - self._counted_at) * rate)
        self._counted_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def close(self) -> None:
        """Refuse further calls and cancel those that run."""
        self.closed = True
        for task in self._running:
            task.cancel()


class Carrying:
    """See `Session.carrying`. Closing the session ends what runs inside with RequestError 409."""

    __slots__ = ("_flight", "_name", "_session", "_task")

    def __init__(self, session: Session, flight: PendingResponse) -> None:
        self._session = session
        self._flight = flight

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._session.begin(self._flight, task)
        self._name = self._flight.name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.finish(self._flight, self._name, self._task)
        if isinstance(error, asyncio.CancelledError) and self._session.closed:
            self._task.uncancel()
            raise has_ended(self._session.rollout_id) from None


class SessionPast(NamedTuple):
    talk: LastRequest
    graph: TokenGraph

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        return self.graph.messages(answer)

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        return self.graph.tools(answer)


TALKS = 8
"""How many transcripts' last calls a rollout keeps; one that is forgotten is read from the beginning again."""


def has_ended(rollout_id: str, end: str | None = None) -> RequestError:
    """A call that came too late."""
    how = f" as {end}" if end else ""
    return RequestError(f"rollout {rollout_id} has ended{how}; its calls are no longer served", status=409, code="rollout_ended")


COMPLETE = "completed by its flow"
"""What is kept with the end of a rollout that its flow completed."""


def is_gone(rollout_id: str) -> RequestError:
    """A call to a rollout that its flow has completed."""
    return RequestError(f"rollout {rollout_id} is complete; begin another one for more calls", status=410, code="rollout_complete")


def over(attempt: Attempt) -> RequestError:
    """A call to a rollout that has ended, in whatever process."""
    return is_gone(attempt.rollout.id) if attempt.message == COMPLETE else has_ended(attempt.rollout.id, attempt.end)


class Sessions:
    """The rollouts that this gateway serves. One that nobody opened here is taken over from the pool.

    `defaults` are by channel, "" for the others; `peers` are the other workers.
    """

    def __init__(
        self,
        pool: Pool,
        tokens: Tokens,
        *,
        defaults: Mapping[str, Sampling],
        limits: Limits,
        base_url: str,
        peers: Peers,
    ) -> None:
        self.base_url = base_url
        self._pool = pool
        self._tokens = tokens
        self._defaults = defaults
        self._limits = limits
        self._peers = peers
        self._open: dict[str, Session] = {}
        self._taken = OrderedDict[str, Session]()
        """The one that called last comes last."""
        self._closed = OrderedDict[str, bool]()
        """Whether it was its flow that completed it."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._open) + len(self._taken)

    def open(self, rollout: Rollout, sampling: Sampling, *, fresh: bool = False) -> Session:
        """Let the rollout call the model; of a `fresh` one nothing is stored yet, so the pool is not asked."""
        session = self._open[rollout.id] = self._make(rollout, sampling, stored=Attempt(rollout=rollout) if fresh else None)
        self._closed.pop(rollout.id, None)
        self._taken.pop(rollout.id, None)
        return session

    def runs(self, rollout_id: str) -> bool:
        """Whether a runner in this process has it open, and will end it."""
        return rollout_id in self._open

    @property
    def stopping(self) -> bool:
        """Whether no more calls are taken."""
        return self._stopping

    def graded(self, rollout_id: str) -> None:
        """A grade of it comes by a route, and goes to the pool alone."""
        session = self._open.get(rollout_id) or self._taken.get(rollout_id)
        if session is not None:
            session.partial = True

    def is_complete(self, rollout_id: str) -> bool:
        """Whether it is known here that its flow has completed it."""
        return self._closed.get(rollout_id, False)

    def close(self, rollout_id: str, *, complete: bool = False) -> Attempt | None:
        """Refuse its calls from now on and cancel those that run; an unknown rollout is nothing to close.

        What it recorded, where that is known here and nothing runs that could add to it.
        """
        complete = complete or self.is_complete(rollout_id)
        session = self._open.pop(rollout_id, None) or self._taken.pop(rollout_id, None)
        while len(self._closed) >= REMEMBERED:
            self._closed.popitem(last=False)
        self._closed[rollout_id] = complete
        self._peers.tell(rollout_id)
        if session is None:
            return None
        session.close()
        return None if session.tasks else session.recorded()

    async def drain(self, within_s: float) -> None:
        """Take no more calls and wait for those that run, but not longer than that."""
        self._stopping = True
        running = {task for session in [*self._open.values(), *self._taken.values()] for task in session.tasks}
        if running:
            await asyncio.wait(running, timeout=within_s)

    def close_all(self) -> None:
        """Refuse all calls and cancel those that run."""
        for rollout_id in [*self._open, *self._taken]:
            self.close(rollout_id)

    async def get(self, rollout_id: str, *, again: bool = False) -> Session:
        """The rollout's session; RequestError 409 where it has ended, 404 where the pool does not know it, 503 when we stop.

        `again` is for a call that may have been made before, at another worker.
        """
        if self._stopping:
            raise RequestError("the gateway is stopping; try again at the next one", status=503, code="stopping")
        if (complete := self._closed.get(rollout_id)) is not None:
            raise is_gone(rollout_id) if complete else has_ended(rollout_id)
        session = self._open.get(rollout_id)
        if session is None and (session := self._taken.get(rollout_id)) is not None:
            self._taken.move_to_end(rollout_id)
        if session is None:
            session = await self._take_over(rollout_id)
        elif session.shared:
            await self._hear(session, again)
        if again:
            session.tell()  # what a worker stored and did not come to tell is about to be answered from here
        return session

    async def _hear(self, session: Session, again: bool) -> None:
        try:
            await session.hear(self._pool, again=again)
        except RequestError as error:
            self.close(session.rollout_id, complete=error.status == 410)
            raise

    async def _take_over(self, rollout_id: str) -> Session:
        heard = self._peers.look(rollout_id)
        try:
            attempt = await self._pool.attempt(rollout_id)
            task = await self._pool.task(rollout_id)
        except PoolFailed:
            raise
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error
        if attempt.end is not None:
            raise over(attempt)
        default = self._defaults.get(attempt.rollout.channel) or self._defaults.get("") or Sampling()
        taken = self._make(attempt.rollout, sampling_of(task, default), stored=attempt, heard=heard)
        session = self._taken.setdefault(rollout_id, taken)
        self._make_room()
        if session is not taken and session.shared:  # another call was faster, and may have asked the pool before us
            await self._hear(session, again=False)
        return session

    def _make_room(self) -> None:
        """Where there are too many, forget those that called longest ago; one that runs calls has its turn again later."""
        for _ in range(min(2, len(self._taken) - TAKEN)):
            rollout_id, oldest = self._taken.popitem(last=False)
            if oldest.tasks:
                self._taken[rollout_id] = oldest

    def _make(
        self, rollout: Rollout, sampling: Sampling, *, stored: Attempt | None, heard: tuple[int, ...] | None = None
    ) -> Session:
        return Session(
            rollout,
            sampling,
            tokens=self._tokens,
            base_url=self.base_url,
            limits=self._limits,
            peers=self._peers,
            stored=stored,
            heard=heard,
        )


REMEMBERED = 100_000
"""How many closed rollouts are known by heart; the pool knows the others."""
TAKEN = 10_000
"""How many rollouts of other processes are kept; an idle one is read again when it calls."""


ADHOC_CHANNEL = "adhoc"
OURS = "penstock."
"""What the names of our own entries in a task's metadata begin with."""
_SAMPLING = f"{OURS}sampling"


def make_task(task_id: str, sampling: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Task:
    """A task that nobody wrote a prompt for; `sampling` are the fields of `Sampling` that its rollouts change."""
    kept = dict(metadata or {}) | ({_SAMPLING: dict(sampling)} if sampling else {})
    return Task(id=task_id, prompt=(), metadata=kept or None)


def sampling_of(task: Task, default: Sampling) -> Sampling:
    """How calls of the task's rollouts are sampled where they do not say otherwise, whichever process serves them."""
    return replace(default, **changed_sampling(task))


def changed_sampling(task: Task) -> dict[str, Any]:
    """The fields of `Sampling` that the task's rollouts change."""
    return (task.metadata or {}).get(_SAMPLING, {})


async def open_adhoc(
    pool: Pool,
    *,
    rollout_id: str = "",
    group_id: str = "",
    task_id: str = ADHOC_CHANNEL,
    channel: str = ADHOC_CHANNEL,
    sampling: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """Make a rollout, unless one of that id is there; PoolError where the id belongs to another group."""
    group_id = group_id or rollout_id or f"{channel}-{secrets.token_hex(4)}"
    rollout = make_rollout(group_id, task_id, 0, channel=channel)
    rollout = replace(rollout, id=rollout_id or rollout.id)
    await pool.open_group(make_task(task_id, sampling, metadata), [rollout], seq=None)
    return rollout
