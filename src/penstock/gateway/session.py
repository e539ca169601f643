"""Sessions: the rollouts that this gateway serves, each with its token graph, sampling defaults and running calls.

Callers may name rollouts themselves, in a path or by a session id. The first request opens one in the pool.
"""

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from types import TracebackType
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import orjson

from penstock.chat.templates import Tool
from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.auth import GatewayTokens
from penstock.gateway.dialects.base import DialectTokenizer
from penstock.gateway.graph import TokenGraph, answer_number
from penstock.gateway.replay import BranchReplay
from penstock.gateway.request import GatewayLimits, LastRequest
from penstock.gateway.response import PendingResponse
from penstock.http.asgi import Headers, header
from penstock.pool.base import Pool
from penstock.records import ADHOC_CHANNEL, Message, Rollout, RolloutRef, Sampling, Task, make_rollout

SESSION_WEIGHT = 5_000
"""Bytes of memory of a session with an empty graph."""
MAX_TRANSCRIPTS = 8
"""Transcripts of a rollout whose last request is kept; any other is parsed in full."""
MAX_FAILED_REQUESTS = 1000
MAX_CLOSED = 10_000
"""Closed rollouts that are kept in memory; older ones are looked up in the pool."""
MAX_ADOPTED, MAX_ADOPTED_BYTES = 10_000, 256 << 20
"""Rollouts of other processes that are kept in memory, and what they may weigh; an idle one is read from the pool again when it
calls."""
COMPLETED_BY_FLOW = "completed by its flow"
"""The end message of a rollout that its flow completed."""


# One rollout


class AnswerNumbers(NamedTuple):
    """The pending answers to one request."""

    last: int
    """The highest of their numbers."""
    pending: int


class Session:
    """One open rollout. `stored` is what the pool holds of it, if that is known."""

    def __init__(
        self,
        rollout: RolloutRef,
        sampling: Sampling,
        *,
        tokens: GatewayTokens,
        base_url: str,
        limits: GatewayLimits,
        stored: Rollout | None = None,
        on_weight: "Callable[[Session], None] | None" = None,
        openings: MutableMapping[str, LastRequest] | None = None,
    ) -> None:
        self.rollout = rollout
        self.rollout_id = rollout.id
        self._tokens = tokens
        self.token = tokens.issue(rollout.id)
        """The model token: opens model routes for this rollout, nothing else."""
        self.base_url = base_url
        """The address of the OpenAI routes, ending in `/v1`."""
        self.sampling = sampling
        """Defaults for calls; its `max_tokens` is a cap too."""
        self.recording = asyncio.Lock()
        """Held while a step is stored, so that steps are numbered in the order in which they became durable."""
        self.pending: dict[str, PendingResponse] = {}
        """Responses in progress, by request digest: a retry joins the one of the same request."""
        self.failed_requests: dict[str, int] = {}
        """Requests whose last response was an error, with that answer's number: a retry gets no answer from before it."""
        self.pool_differs = False
        """Whether the pool holds what this process does not: a grade, or a text with its secrets removed."""
        self.closed = False
        self.counted_weight = 0
        """The part of `weight` that the cache of sessions has counted."""
        self._on_weight = on_weight
        self._limits = limits
        self._graph = TokenGraph(stored) if stored else None
        self._reading = asyncio.Lock()
        self._replay: BranchReplay | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._last_requests: dict[str, LastRequest] = {}
        self._openings: MutableMapping[str, LastRequest] = {} if openings is None else openings
        """By group, a request of one of its rollouts: they begin alike."""
        self._answer_numbers: dict[str, AnswerNumbers] = {}
        """By request digest."""
        self._allowance = limits.calls_per_s
        self._counted_at = time.monotonic()

    @property
    def flow_token(self) -> str:
        """Lets a flow submit, grade and complete this rollout."""
        return self._tokens.flow(self.rollout_id)

    @property
    def tasks(self) -> Set[asyncio.Task[Any]]:
        """The tasks of running calls."""
        return self._running

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes."""
        requests = sum(each.weight for each in self._last_requests.values())
        return SESSION_WEIGHT + requests + (self._graph.weight if self._graph else 0)

    async def graph(self, pool: Pool) -> TokenGraph:
        """The rollout's token graph, read from the pool on the first call."""
        if self._graph is None:
            async with self._reading:  # fair: calls continue in the order in which they came
                if self._graph is None:
                    rollout = await pool.rollout(self.rollout_id)
                    if rollout.end is not None:
                        raise over_error(rollout)
                    self._graph = TokenGraph(rollout)
                return self._graph
        return self._graph

    async def replay(self, pool: Pool, tokenizer: DialectTokenizer) -> BranchReplay | None:
        """What answers the calls of a branch up to its step; None for any other rollout."""
        point = self.rollout.branch
        if self._replay is None and point is not None:
            recorded, graph = await pool.rollout(point.rollout_id), await self.graph(pool)
            self._replay = self._replay or BranchReplay(recorded, point, graph, tokenizer)
        return self._replay

    def branch_problem(self, *, ended: bool) -> str:
        """Why a branch is void: how its requests left the record or, if it has `ended`, what it never asked; else empty."""
        if self._replay is None:
            return "its program made no model call" if ended else ""
        return self._replay.difference or (self._replay.unfinished if ended else "")

    async def catch_up(self, pool: Pool) -> None:
        """Reads what another gateway has recorded; RequestError 409 if it ended the rollout."""
        async with self.recording:  # else a step that is being stored here would be read too
            if (graph := self._graph) is None:
                return
            rollout = await pool.rollout(self.rollout_id, first_step=graph.next_step, first_node=graph.next_node)
            if rollout.end is not None:
                raise over_error(rollout)
            graph.add_stored(rollout)

    def recorded(self) -> Rollout | None:
        """The nodes and steps as they are stored; None if only the pool has all of them."""
        if self._graph is None or self.pool_differs:
            return None
        return Rollout(ref=self.rollout, nodes=tuple(self._graph.nodes.values()), steps=tuple(self._graph.steps.values()))

    def drop_graph(self) -> None:
        """Read the graph again before the next call: a write failed, so the pool may hold more or less than this process."""
        self._graph = None

    def last_request(self, transcript: str) -> LastRequest:
        """The transcript's last request; the least recently used transcript is dropped if there are too many."""
        last_request = self._last_requests.pop(transcript, None)
        if last_request is None:
            last_request = LastRequest(self._openings.get(self.rollout.group_id))
            self._openings.setdefault(self.rollout.group_id, last_request)
        while len(self._last_requests) >= MAX_TRANSCRIPTS:
            del self._last_requests[next(iter(self._last_requests))]
        self._last_requests[transcript] = last_request
        return last_request

    def forget_request(self, transcript: str) -> None:
        """The transcript's request was refused: none is likely to continue it."""
        self._last_requests.pop(transcript, None)

    def report_weight(self) -> None:
        """A request or a step was added to what it holds."""
        if self._on_weight is not None:
            self._on_weight(self)

    def mark_failed(self, response: PendingResponse) -> None:
        """Remembers that the response to a request was an error."""
        if len(self.failed_requests) >= MAX_FAILED_REQUESTS:
            self.failed_requests.clear()
        self.failed_requests[response.request] = answer_number(response.name)

    def start_call(self, response: PendingResponse, task: "asyncio.Task[Any]") -> None:
        """Name the answer and let retries join it; RequestError if the rollout is over a limit or closed."""
        self._check_limits()
        request = response.request
        last, pending = self._answer_numbers.get(request, AnswerNumbers(-1, 0))
        stored = self._graph.last_number(request) if self._graph else -1
        number = max(stored, last) + 1
        self._answer_numbers[request] = AnswerNumbers(number, pending + 1)
        response.name = f"{request}-{number}"
        self.pending[request] = response
        self._running.add(task)

    def end_call(self, response: PendingResponse, name: str, task: "asyncio.Task[Any]") -> None:
        """End a call that started under `name`; a replayed answer has changed the response's own."""
        request = name.rpartition("-")[0]
        last, pending = self._answer_numbers.pop(request)
        if pending > 1:
            self._answer_numbers[request] = AnswerNumbers(last, pending - 1)
        self._running.discard(task)
        if self.pending.get(response.request) is response:
            del self.pending[response.request]
        self.report_weight()

    def _check_limits(self) -> None:
        if self.closed:
            raise ended_error(self.rollout_id)
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
        """Take one call from a token bucket that refills with `calls_per_s`."""
        rate, now = self._limits.calls_per_s, time.monotonic()
        self._allowance = min(max(rate, 1.0), self._allowance + (now - self._counted_at) * rate)
        self._counted_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def close(self) -> None:
        """Refuse further calls and cancel the running ones."""
        self.closed = True
        for task in self._running:
            task.cancel()


class RunningCall:
    """Registers the current task as a call of the session. Closing the session ends the body with RequestError 409."""

    __slots__ = ("_name", "_response", "_session", "_task")

    def __init__(self, session: Session, response: PendingResponse) -> None:
        self._session = session
        self._response = response

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._session.start_call(self._response, task)
        self._name = self._response.name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.end_call(self._response, self._name, self._task)
        if isinstance(error, asyncio.CancelledError) and self._session.closed:
            self._task.uncancel()  # it was `Session.close` that cancelled: the task continues and sends the refusal
            raise ended_error(self._session.rollout_id) from None


class SessionHistory(NamedTuple):
    """See `ConversationHistory`."""

    last_request: LastRequest
    graph: TokenGraph

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        return self.graph.messages(answer)

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        return self.graph.tools(answer)


# Refusals


def ended_error(rollout_id: str, end: str | None = None) -> RequestError:
    how = f" as {end}" if end else ""
    return RequestError(f"rollout {rollout_id} has ended{how}; its calls are no longer served", status=409, code="rollout_ended")


def completed_error(rollout_id: str) -> RequestError:
    """For a rollout that its flow has completed."""
    return RequestError(f"rollout {rollout_id} is complete; begin another one for more calls", status=410, code="rollout_complete")


def over_error(rollout: Rollout) -> RequestError:
    """For a rollout that the pool says has ended."""
    is_complete = rollout.message == COMPLETED_BY_FLOW
    return completed_error(rollout.ref.id) if is_complete else ended_error(rollout.ref.id, rollout.end)


@contextmanager
def pool_refusals(*, status: int, code: str) -> Generator[None]:
    """Turn a refusal of the pool into this status. A pool that fails (PoolFailed) becomes a 503, which may be retried."""
    try:
        yield
    except PoolFailed:
        raise
    except PoolError as error:
        raise RequestError(str(error), status=status, code=code) from error


# All rollouts


class Sessions:
    """The rollouts that this gateway serves. One that was not opened here is adopted from the pool.

    `defaults` are by channel, "" for all others.
    """

    def __init__(
        self,
        pool: Pool,
        tokens: GatewayTokens,
        *,
        defaults: Mapping[str, Sampling],
        limits: GatewayLimits,
        base_url: str,
    ) -> None:
        self.base_url = base_url
        self._pool = pool
        self._tokens = tokens
        self._defaults = defaults
        self._limits = limits
        self._open: dict[str, Session] = {}
        self._adopted = OrderedDict[str, Session]()
        """Least recent caller first."""
        self._adopted_bytes = 0
        self._evicted = WeakValueDictionary[str, Session]()
        """Dropped from `_adopted`. A call that began before may still use one: the rollout's next call must find the same."""
        self._openings = WeakValueDictionary[str, LastRequest]()
        self._resampled = OrderedDict[str, Sampling]()
        """Sampling that this process alone knows of."""
        self._closed = OrderedDict[str, bool]()
        """Rollout id, to whether its flow completed it."""
        self.stopping = False
        """Whether new calls are refused."""

    def __len__(self) -> int:
        return len(self._open) + len(self._adopted)

    def open(self, rollout: RolloutRef, sampling: Sampling, *, fresh: bool = False) -> Session:
        """Let the rollout call the model. With `fresh`, nothing of it is stored yet, so the pool is not read."""
        session = self._open[rollout.id] = self._make(rollout, sampling, stored=Rollout(ref=rollout) if fresh else None)
        self._closed.pop(rollout.id, None)
        self._forget(rollout.id)
        return session

    def is_open_here(self, rollout_id: str) -> bool:
        """Whether a runner in this process has opened it, and will end it."""
        return rollout_id in self._open

    def note_grade(self, rollout_id: str) -> None:
        """A route grades the rollout: the grade goes to the pool only, so `Session.recorded` would lack it."""
        session = self._open.get(rollout_id) or self._adopted.get(rollout_id) or self._evicted.get(rollout_id)
        if session is not None:
            session.pool_differs = True

    def resample(self, session: Session, sampling: Sampling) -> None:
        """Change the defaults of a rollout's calls, in this process only."""
        session.sampling = sampling
        while len(self._resampled) >= MAX_CLOSED:
            self._resampled.popitem(last=False)
        self._resampled[session.rollout_id] = sampling

    def is_complete(self, rollout_id: str) -> bool:
        """Whether its flow has completed it, as far as this process knows."""
        return self._closed.get(rollout_id, False)

    def close(self, rollout_id: str, *, complete: bool = False) -> Rollout | None:
        """Refuse the rollout's calls from now on and cancel the running ones; an unknown rollout is ignored.

        Returns what it recorded, or None if only the pool has all of it or a cancelled call may still add to it.
        """
        complete = complete or self.is_complete(rollout_id)
        session = self._open.pop(rollout_id, None) or self._forget(rollout_id)
        self._resampled.pop(rollout_id, None)
        while len(self._closed) >= MAX_CLOSED:
            self._closed.popitem(last=False)
        self._closed[rollout_id] = complete
        if session is None:
            return None
        session.close()
        return None if session.tasks else session.recorded()

    async def drain(self, within_s: float) -> None:
        """Refuse new calls and wait up to `within_s` for the running ones."""
        self.stopping = True
        running = {task for session in self._all() for task in session.tasks}
        if running:
            await asyncio.wait(running, timeout=within_s)

    def close_all(self) -> None:
        for session in self._all():
            self.close(session.rollout_id)

    def _all(self) -> list[Session]:
        return [*self._open.values(), *self._adopted.values(), *self._evicted.values()]

    async def get(self, rollout_id: str, *, is_retry: bool = False) -> Session:
        """The rollout's session; RequestError 409 or 410 if it has ended, 404 if the pool does not know it, 503 while stopping.

        `is_retry`: another gateway may have answered the call before, so what it recorded is read first.
        """
        if self.stopping:
            raise RequestError("the gateway is stopping; try again at the next one", status=503, code="stopping")
        if (complete := self._closed.get(rollout_id)) is not None:
            raise completed_error(rollout_id) if complete else ended_error(rollout_id)
        session = self._open.get(rollout_id)
        if session is None and (session := self._forget(rollout_id)) is not None:
            self._keep(session)
            if is_retry:
                await session.catch_up(self._pool)
        if session is None:
            session = await self._adopt(rollout_id)
        return session

    async def _adopt(self, rollout_id: str) -> Session:
        with pool_refusals(status=404, code="unknown_rollout"):
            rollout = await self._pool.rollout(rollout_id)
            task = await self._pool.task(rollout_id)
        if rollout.end is not None:
            raise over_error(rollout)
        default = self._defaults.get(rollout.ref.channel) or self._defaults.get("") or Sampling()
        sampling = self._resampled.get(rollout_id) or sampling_of(task, default)
        session = self._forget(rollout_id) or self._make(rollout.ref, sampling, stored=rollout)
        self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        """Make an adopted session the most recent caller."""
        self._adopted[session.rollout_id] = session
        self._weigh(session)

    def _forget(self, rollout_id: str) -> Session | None:
        """Take an adopted session out of the cache."""
        session = self._adopted.pop(rollout_id, None)
        if session is None:
            return self._evicted.pop(rollout_id, None)
        self._adopted_bytes -= session.counted_weight
        session.counted_weight = 0
        return session

    def _weigh(self, session: Session) -> None:
        """Count what a session has grown by."""
        if self._adopted.get(session.rollout_id) is session:
            weight = session.weight
            self._adopted_bytes += weight - session.counted_weight
            session.counted_weight = weight
            self._evict()

    def _evict(self) -> None:
        """Drop the least recent callers if they weigh too much; one with running calls moves to the end instead."""
        running = 0
        while running < 2 and (self._adopted_bytes > MAX_ADOPTED_BYTES or len(self._adopted) > MAX_ADOPTED):
            oldest = next(iter(self._adopted))
            if self._adopted[oldest].tasks:
                self._adopted.move_to_end(oldest)
                running += 1
            elif (session := self._forget(oldest)) is not None:
                self._evicted[oldest] = session

    def _make(self, rollout: RolloutRef, sampling: Sampling, *, stored: Rollout | None) -> Session:
        return Session(
            rollout,
            sampling,
            tokens=self._tokens,
            base_url=self.base_url,
            limits=self._limits,
            stored=stored,
            on_weight=self._weigh,
            openings=self._openings,
        )


# Rollouts without a dataset row

RESERVED_PREFIX = "penstock."
"""Begins the names of our own entries in a task's metadata."""
_SAMPLING = f"{RESERVED_PREFIX}sampling"


def make_task(task_id: str, sampling: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Task:
    """A task without a prompt; `sampling` are the fields of `Sampling` that its rollouts change."""
    kept = dict(metadata or {}) | ({_SAMPLING: dict(sampling)} if sampling else {})
    return Task(id=task_id, prompt=(), metadata=kept or None)


def sampling_of(task: Task, default: Sampling) -> Sampling:
    """The sampling defaults of the task's rollouts, the same in every process."""
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
) -> RolloutRef:
    """Make a rollout, unless one with that id exists; PoolError if the id belongs to another group."""
    group_id = group_id or rollout_id or f"{channel}-{secrets.token_hex(4)}"
    rollout = make_rollout(group_id, task_id, 0, channel=channel)
    rollout = replace(rollout, id=rollout_id or rollout.id)
    await pool.open_group(make_task(task_id, sampling, metadata), [rollout], seq=None)
    return rollout


PROMPT_KEY = "prompt_uid"
"""In the metadata of a task: the caller's name for the group."""
NAMED_KEY = f"{RESERVED_PREFIX}flow"
"""In the metadata of a task: a caller named its rollout."""
DEFAULT_CHANNEL, DEFAULT_TASK = "train", "flow"
ROLLOUT_NAME = re.compile(r"(?![mfca]k-)[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
"""Safe in paths, and never mistaken for a token."""
MAX_PROMPT_UID = 1000
"""Characters."""


class NamedRollouts:
    def __init__(self, pool: Pool, sessions: Sessions) -> None:
        self._pool = pool
        self._sessions = sessions

    async def session(self, rollout_id: str, prompt_uid: str | None, *, is_retry: bool = False) -> Session:
        """See `Sessions.get`. With a `prompt_uid`, an unknown rollout is opened."""
        try:
            return await self._sessions.get(rollout_id, is_retry=is_retry)
        except RequestError as error:
            if prompt_uid is None or error.code != "unknown_rollout":
                raise
        await self.open(rollout_id, prompt_uid, channel=ADHOC_CHANNEL if prompt_uid == SESSION_PROMPT else DEFAULT_CHANNEL)
        return await self._sessions.get(rollout_id)

    async def open(
        self,
        rollout_id: str,
        prompt_uid: str = "",
        *,
        channel: str = DEFAULT_CHANNEL,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the rollout in the pool; RequestError 422 if its name cannot be used, 409 if the pool refuses it."""
        if not ROLLOUT_NAME.fullmatch(rollout_id):
            text = f"{rollout_id[:60]!r} cannot name a trajectory; use up to 200 letters, digits and . _ : -"
            raise RequestError(text, status=422, code="invalid_value", param="trajectory_uid")
        if len(prompt_uid) > MAX_PROMPT_UID:
            text = f"prompt_uid is longer than {MAX_PROMPT_UID} characters"
            raise RequestError(text, status=422, code="invalid_value", param="prompt_uid")
        with pool_refusals(status=409, code="rollout_exists"):
            await open_adhoc(
                self._pool,
                rollout_id=rollout_id,
                task_id=prompt_uid or DEFAULT_TASK,
                channel=channel,
                sampling=sampling or {},
                metadata={**(metadata or {}), PROMPT_KEY: prompt_uid, NAMED_KEY: True},
            )


# Sessions of clients

SESSION_PROMPT = "penstock-session"
"""The prompt's uid of rollouts that a session opens."""
SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"conversation-id",
    b"conversation_id",
)
"""Headers of clients that hold a session's id: verifiers, Claude Code, Codex, opencode, and what others use."""
SESSION_FIELDS = ("metadata.session_id", "metadata.user_id of Claude Code", "session_id", "prompt_cache_key")
"""Where a body holds one, for the error."""
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,150}")
CLAUDE_CODE_USER = re.compile(r"_session_([0-9a-f-]{36})$")
"""The end of `metadata.user_id` of older versions of Claude Code."""


def session_rollout(headers: Headers, body: bytes) -> str:
    """The rollout of a request: `session-` and the session's id, or a digest of an id that is not safe in a path."""
    found = next((value for name in SESSION_HEADERS if (value := header(headers, name))), "") or next(_in_body(body), "")
    if not found:
        names, fields = ", ".join(name.decode() for name in SESSION_HEADERS), ", ".join(SESSION_FIELDS)
        text = f"the session key needs a session id, in one of the headers {names}, or a field of the body: {fields}"
        raise RequestError(f"{text}; or use a rollout's model token", code="unknown_caller")
    safe = found if SAFE_ID.fullmatch(found) else sha256(found.encode("utf-8", "replace")).hexdigest()[:32]
    return f"session-{safe}"


def _in_body(body: bytes) -> Iterator[str]:
    try:
        request = _object(orjson.loads(body))
    except orjson.JSONDecodeError:
        return  # the dialect says what is wrong with it
    metadata = _object(request.get("metadata"))
    user = metadata.get("user_id")
    if isinstance(user, str):
        if session := CLAUDE_CODE_USER.search(user):
            yield session[1]
        if user.startswith("{"):  # newer versions of Claude Code
            with suppress(orjson.JSONDecodeError):
                metadata = {**_object(orjson.loads(user)), **metadata}
    for value in (metadata.get("session_id"), request.get("session_id"), request.get("prompt_cache_key")):
        if isinstance(value, str) and value:
            yield value


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
