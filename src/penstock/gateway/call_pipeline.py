"""A watchdog over one request to an engine: silence that lasts too long ends it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import EngineError, PenstockError, boundary
from penstock.events import Events
from penstock.gateway.call import Call, Caller, Limits, Prompt
from penstock.gateway.observability import Metrics
from penstock.gateway.pending_response import PendingResponse
from penstock.gateway.recorder import Label, Recorder
from penstock.gateway.reply import Delta, ReplyBuilder, deltas_of
from penstock.gateway.session import Session, SessionPast
from penstock.gateway.sources import Source
from penstock.pool.base import Pool
from penstock.records import Sampling, Step
from penstock.system.async_tools import settled
from penstock.system.redaction import Redactor


class Watch:
    """Cancels the task that it is made in when the engine is silent for too long; `beat` says that it is not."""

    def __init__(self, *, first_s: float, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stall_s = stall_s
        self._allowed_s = first_s
        self._last = self._loop.time()
        self._timer = self._loop.call_at(self._last + min(first_s, stall_s), self._look)  # one timer, whatever comes first
        self._barked = False
        self._began = self._last
        self.first_s: float | None = None
        """How long the engine took to say something; None while it has not."""

    def beat(self) -> None:
        """The engine has said something."""
        self._last = self._loop.time()
        if self.first_s is None:
            self.first_s = self._last - self._began
            self._allowed_s = self._stall_s

    def stop(self) -> None:
        self._timer.cancel()

    def stalled(self) -> EngineError | None:
        """Why the task was cancelled, if it was this watchdog that did; the cancellation is then taken back."""
        if not self._barked or self._task is None:
            return None
        self._task.uncancel()
        return EngineError(f"the engine was silent for {self._allowed_s:g} s; the call was given up")

    def _look(self) -> None:
        due = self._last + self._allowed_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        elif self._task is not None:
            self._barked = True
            self._task.cancel()


NAMES, NAME_CHARACTERS = 500, 100
"""Of what is counted by name: how many different things, and how long a name may be."""


class ResponseWriter(Protocol):
    """Where an answer goes. What says that a choice or the answer is complete may be sent from `close` and `done` only."""

    async def open(self, prompt: Prompt) -> None:
        """The engine has begun to answer."""
        ...

    async def add(self, choice: int, deltas: list[Delta], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """A choice has grown by these tokens (with log-probabilities of the plain distribution), and what they make visible."""
        ...

    async def close(self, choice: int, step: Step) -> None:
        """A choice is complete and durable."""
        ...

    async def done(self, prompt: Prompt, steps: list[Step]) -> None:
        """All choices are, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """What all choices of one call share."""

    session: Session
    caller: Caller
    call: Call
    prompt: Prompt
    outlet: ResponseWriter
    flight: PendingResponse


class Service:
    def __init__(self, source: Source, pool: Pool, events: Events, *, limits: Limits, redactor: Redactor | None = None) -> None:
        self.source = source
        self.engine = source.engine
        self.metrics = Metrics()
        self._pool = pool
        self._events = events
        self._limits = limits
        self._crossing = boundary(EngineError, f"engine {self.engine.model}")
        self._recorder = Recorder(pool, redactor or Redactor(), self.metrics.breaks)

    async def answer(self, session: Session, caller: Caller, call: Call, outlet: ResponseWriter, flight: PendingResponse) -> None:
        """Answer one call. A retry whose answer was recorded but may not have arrived is given it again."""
        for name in call.ignored:
            self.count(f"ignored:{name}")
        prompt = await self._prompt(session, caller, call)
        samplings = self._samplings(call, session.sampling, prompt)
        errand = CallContext(session, caller, call, prompt, outlet, flight)
        steps = (await session.graph(self._pool)).answer(flight.request, call.choices) if caller.is_retry else None
        if steps is not None:
            await self._say_again(errand, steps)
        elif len(samplings) == 1:
            steps = [await self._sample(errand, samplings[0], 0)]
        else:
            steps = await self._sample_all(errand, samplings)
        await outlet.done(prompt, steps)

    async def past(self, session: Session, transcript: str) -> SessionPast:
        """What a dialect may know of the rollout's earlier calls."""
        return SessionPast(session.talk(transcript), await session.graph(self._pool))

    async def count_tokens(self, session: Session, caller: Caller, call: Call) -> int:
        """How many tokens the call's prompt has."""
        return self.source.length(await self._prompt(session, caller, call))

    async def _prompt(self, session: Session, caller: Caller, call: Call) -> Prompt:
        graph = await session.graph(self._pool)
        chains = session.talk(caller.transcript).chains(call.messages, call.tools)
        return await self.source.prompt(graph, call, chains)

    def count(self, name: str) -> None:
        """Count what was not done as asked; the first time, tell it as an event. Callers choose names: there is an end to them."""
        counts, name = self.metrics.notices, name[:NAME_CHARACTERS]
        if name not in counts and len(counts) >= NAMES:
            name = "other"
        counts[name] += 1
        if counts[name] == 1:
            self._events.emit("gateway.notice", name=name)

    def _samplings(self, call: Call, defaults: Sampling, prompt: Prompt) -> list[Sampling]:
        """How each choice is sampled: within the run's cap, and what the source allows."""
        samplings = self.source.samplings(call, defaults.max_tokens, prompt)
        if samplings[0].max_tokens < call.sampling.max_tokens:
            self.count("capped:max_tokens")
        return samplings

    async def _sample_all(self, errand: CallContext, samplings: list[Sampling]) -> list[Step]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample(errand, each, choice)) for choice, each in enumerate(samplings)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _sample(self, errand: CallContext, sampling: Sampling, choice: int) -> Step:
        """Sample one choice and record it, also where it breaks off: then it is kept, and never trained."""
        prompt = errand.prompt
        seed = f"{errand.session.rollout_id} {prompt.chain} {errand.flight.name.rpartition('-')[2]} {choice}"
        reply = self.source.reply(errand.call, prompt, sampling, seed=seed)
        started = time.perf_counter()
        errand.flight.account.prompt_tokens = len(prompt.ids)
        try:
            await self._generate(errand, sampling, reply, choice)
        except asyncio.CancelledError:
            reply.end("cancelled")
            await self._keep(errand, sampling, reply, started, choice)
            raise
        except EngineError:
            reply.end("error")
            await self._keep(errand, sampling, reply, started, choice)
            raise
        step = await self._record(errand, sampling, reply, started, choice)
        await errand.outlet.close(choice, step)
        return step

    async def _generate(self, errand: CallContext, sampling: Sampling, reply: ReplyBuilder, choice: int) -> None:
        watch = Watch(first_s=self._limits.first_token_s, stall_s=self._limits.stall_s)
        try:
            asked = self.source.generate(errand.call, errand.prompt, sampling, rollout_id=errand.session.rollout_id)
            async with aclosing(asked) as stream:
                while reply.finish is None:
                    with self._crossing:
                        chunk = await anext(stream, None)
                    if chunk is None:
                        break
                    watch.beat()
                    size = len(reply.ids)
                    deltas = reply.take(chunk)
                    await errand.outlet.open(errand.prompt)
                    await errand.outlet.add(choice, deltas, reply.ids[size:], reply.full_logprobs[size:])
        except asyncio.CancelledError:
            if stalled := watch.stalled():
                raise stalled from None
            raise
        finally:
            watch.stop()
            account = errand.flight.account
            account.first_token_s = account.first_token_s or watch.first_s
        if reply.finish not in ("stop", "length"):
            raise EngineError(f"engine {self.engine.model} broke off a reply after {len(reply.ids)} tokens")

    async def _say_again(self, errand: CallContext, steps: list[Step]) -> None:
        self.count("replayed_call")
        errand.flight.name, errand.flight.created = steps[0].answer, steps[0].created
        await errand.outlet.open(errand.prompt)
        for choice, step in enumerate(steps):
            logprobs = step.full_logprobs or step.logprobs
            await errand.outlet.add(choice, deltas_of(step.message), step.completion_ids, logprobs)
            await errand.outlet.close(choice, step)

    async def _record(self, errand: CallContext, sampling: Sampling, reply: ReplyBuilder, started: float, choice: int) -> Step:
        label = Label(
            sampling=sampling,
            transcript=errand.caller.transcript,
            answer=errand.flight.name,
            choice=choice,
            created=errand.flight.created,
            seconds=round(time.perf_counter() - started, 4),
        )
        account = errand.flight.account
        account.sampled_tokens += len(reply.ids)
        if reply.usage is not None:
            account.prompt_tokens += reply.usage.prompt_tokens
            account.sampled_tokens += reply.usage.completion_tokens
            if not reply.usage.completion_tokens:
                self.count("usage_not_told")
        step = await self._recorder.record(errand.session, errand.prompt, reply, label)
        account.steps.append(step)
        return step

    async def _keep(self, errand: CallContext, sampling: Sampling, reply: ReplyBuilder, started: float, choice: int) -> None:
        """Record what there is of a broken reply; a store that cannot take it is counted, the break itself matters more."""
        if reply.is_empty:
            return
        try:
            await settled(self._record(errand, sampling, reply, started, choice))
        except PenstockError:
            self.count("partial_reply_not_recorded")
