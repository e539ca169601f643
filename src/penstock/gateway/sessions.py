"""Open rollouts: each with its token graph, its sampling defaults and its running calls."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import PoolError, RequestError
from penstock.gateway.auth import Tokens
from penstock.gateway.calls import Limits, Prompt
from penstock.gateway.graph import REWRITTEN, TokenGraph
from penstock.pool.base import Pool
from penstock.records import Message, Rollout, Sampling
from penstock.render.chat import Tool, flatten
from penstock.render.renderer import Renderer

LONG_TEXT = 8_000
"""Characters from which tokenizing (about 0.5 ms per thousand) is handed to a thread."""


class Session:
    """One rollout's way into the gateway."""

    def __init__(self, rollout: Rollout, sampling: Sampling, *, token: str, base_url: str, limits: Limits) -> None:
        self.rollout_id = rollout.id
        self.token = token
        """The model token: opens model routes for this rollout, nothing else."""
        self.base_url = base_url
        """Of the OpenAI routes, ending in `/v1`."""
        self.sampling = sampling
        """What holds for calls that do not say otherwise; its `max_tokens` is a cap too."""
        self.recording = asyncio.Lock()
        """Held while a step is stored, so that steps are numbered in the order in which they became durable."""
        self.refused: set[bytes] = set()
        """Calls that got an error for an answer: sent again, they are sampled, not answered from the record."""
        self.closed = False
        self._limits = limits
        self._graph: TokenGraph | None = None
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return not self._running

    async def graph(self, pool: Pool) -> TokenGraph:
        """The rollout's token graph, read from the pool on the first call."""
        if self._graph is None:
            attempt = await pool.attempt(self.rollout_id)
            if attempt.end is not None:
                raise has_ended(self.rollout_id, attempt.end)
            self._graph = self._graph or TokenGraph(attempt)
        return self._graph

    def forget(self) -> None:
        """Read the graph again before the next call: a write failed, so the pool may know more or less than we do."""
        self._graph = None

    def refuse(self, call: bytes) -> None:
        """Remember that a call got an error for an answer."""
        if len(self.refused) >= 1000:
            self.refused.clear()
        self.refused.add(call)

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Count the current task as one of the rollout's calls: closing the session cancels it."""
        if self.closed:
            raise has_ended(self.rollout_id)
        if len(self._running) >= self._limits.concurrent_calls:
            text = f"rollout {self.rollout_id} has {len(self._running)} calls running; wait for one to end"
            raise RequestError(text, status=429, code="too_many_calls")
        if self._graph and self._graph.next_step >= self._limits.steps:
            raise RequestError(f"rollout {self.rollout_id} has made {self._limits.steps} calls; end it", code="too_many_steps")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def close(self) -> None:
        """Refuse further calls and cancel those that run."""
        self.closed = True
        for task in self._running:
            task.cancel()


class Sessions:
    """The rollouts that this gateway serves. One that nobody opened here is taken over from the pool."""

    def __init__(self, pool: Pool, tokens: Tokens, *, defaults: Mapping[str, Sampling], limits: Limits, base_url: str) -> None:
        self.base_url = base_url
        self._pool = pool
        self._tokens = tokens
        self._defaults = defaults
        self._limits = limits
        self._open: dict[str, Session] = {}
        self._taken: dict[str, Session] = {}
        self._closed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._taken)

    def open(self, rollout: Rollout, sampling: Sampling) -> Session:
        """Let the rollout call the model."""
        session = self._open[rollout.id] = self._make(rollout, sampling)
        self._closed.pop(rollout.id, None)
        self._taken.pop(rollout.id, None)
        return session

    def close(self, rollout_id: str) -> None:
        """Refuse its calls from now on and cancel those that run; an unknown rollout is nothing to close."""
        session = self._open.pop(rollout_id, None) or self._taken.pop(rollout_id, None)
        if session is not None:
            session.close()
        _bound(self._closed, REMEMBERED)
        self._closed[rollout_id] = None

    def close_all(self) -> None:
        """Refuse all calls: the gateway stops."""
        for rollout_id in [*self._open, *self._taken]:
            self.close(rollout_id)

    async def get(self, rollout_id: str) -> Session:
        """The rollout's session; RequestError 409 where it has ended, 404 where the pool does not know it."""
        if rollout_id in self._closed:
            raise has_ended(rollout_id)
        session = self._open.get(rollout_id) or self._taken.get(rollout_id)
        return session or await self._take_over(rollout_id)

    async def _take_over(self, rollout_id: str) -> Session:
        try:
            attempt = await self._pool.attempt(rollout_id)
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error
        if attempt.end is not None:
            raise has_ended(rollout_id, attempt.end)
        sampling = self._defaults.get(attempt.rollout.channel, Sampling())
        for idle in [key for key, session in self._taken.items() if session.is_idle][: max(0, len(self._taken) - TAKEN)]:
            del self._taken[idle]
        return self._taken.setdefault(rollout_id, self._make(attempt.rollout, sampling))

    def _make(self, rollout: Rollout, sampling: Sampling) -> Session:
        return Session(rollout, sampling, token=self._tokens.model(rollout.id), base_url=self.base_url, limits=self._limits)


REMEMBERED = 100_000
"""How many closed rollouts are known by heart; the pool knows the others."""
TAKEN = 10_000
"""How many rollouts of other processes are kept; an idle one is read again when it calls."""


async def make_prompt(graph: TokenGraph, renderer: Renderer, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Prompt:
    """The prompt of a call: the tokens of the longest known path and what is new, or a root rendered from scratch."""
    place = graph.match(messages, tools)
    reason = place.reason
    if place.step is not None:
        reply, new = graph.steps[place.step], messages[place.known :]
        last_id = reply.completion_ids[-1] if reply.completion_ids else None
        added = await _work(new, renderer.extend, reply.message, new, last_id=last_id, tools=bool(tools))
        if added is not None:
            ids = graph.context(place.step) + added
            return Prompt(ids=ids, parent=place.step, added=added, messages=new, tools=(), chain=place.chain)
        reason = REWRITTEN
    root = await _work(messages, renderer.root, messages, tools)
    return Prompt(ids=root, parent=None, added=root, messages=messages, tools=tools, chain=place.chain, reason=reason)


async def _work(messages: Sequence[Message], render: Any, *arguments: Any, **options: Any) -> Any:
    """Run `render` here, or in a thread where there is much to tokenize."""
    if sum(len(flatten(message.get("content"))) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(render, *arguments, **options)
    return render(*arguments, **options)


def has_ended(rollout_id: str, end: str | None = None) -> RequestError:
    """A call that came too late."""
    how = f" as {end}" if end else ""
    return RequestError(f"rollout {rollout_id} has ended{how}; its calls are no longer served", status=409, code="rollout_ended")


def _bound(table: dict[str, None], size: int) -> None:
    while len(table) >= size:
        del table[next(iter(table))]
