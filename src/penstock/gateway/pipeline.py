"""The pipeline of one model call: prompt, sampling, recording, response.

A step is durable before any byte says that its reply is complete.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from penstock.errors import EngineError, PenstockError, RequestError, boundary
from penstock.events import Events
from penstock.gateway.dialects.base import UnsentTokens
from penstock.gateway.graph import HISTORY_EDITED, REPLY_EDITED
from penstock.gateway.observability import GatewayMetrics
from penstock.gateway.recorder import Recorder, StepMetadata
from penstock.gateway.replay import CallRequest
from penstock.gateway.reply import ReplyBuilder, deltas_of
from penstock.gateway.request import Caller, GatewayLimits, ModelCall, Prompt
from penstock.gateway.response import PendingResponse
from penstock.gateway.session import Session, SessionHistory
from penstock.gateway.sources import PolicySources, ReplySource
from penstock.pool.base import Pool
from penstock.records import NO_LIMIT, ReplyGrammar, Sampling, Step
from penstock.system.async_tools import finish_shielded
from penstock.system.redaction import Redactor

MAX_NOTICE_NAMES, MAX_NOTICE_CHARACTERS = 500, 100
"""Bounds on the names of notices, which callers choose by the fields they send."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What all choices of one call share."""

    session: Session
    caller: Caller
    call: ModelCall
    prompt: Prompt
    response: PendingResponse


class CallPipeline:
    def __init__(
        self,
        source: ReplySource,
        pool: Pool,
        events: Events,
        *,
        limits: GatewayLimits,
        redactor: Redactor | None = None,
        policies: PolicySources | None = None,
    ) -> None:
        self.source = source
        self.engine = source.engine
        self.policies = policies or PolicySources(source, {})
        self.metrics = GatewayMetrics()
        self._pool = pool
        self._events = events
        self._limits = limits
        self._engine_boundaries = {
            name: boundary(EngineError, f"engine {each.engine.model}") for name, each in self.policies.by_name.items()
        }
        self._recorder = Recorder(pool, redactor or Redactor(), self.metrics.breaks)

    async def answer(self, session: Session, caller: Caller, call: ModelCall, response: PendingResponse) -> None:
        """Answer one call. A retry whose answer is already recorded gets the recorded answer."""
        for name in self._source(call).unmet(call):
            self.count(f"ignored:{name}")
        prompt = await self._prompt(session, caller, call)
        for kind in prompt.omitted:
            self.count(f"placeholder:{kind}")
        context = CallContext(session, caller, call, prompt, response)
        if session.rollout.branch is not None and (repeated := await self._repeat_recorded(context)) is not None:
            await response.finish(prompt, [self._with_call_text(context, step) for step in repeated])
            return
        constrained = await self._constrain(call, prompt)
        samplings = self._samplings(call, session.sampling, prompt, constrained)
        steps = await self._find_answer(session, call, response) if caller.is_retry else None
        if steps is not None:
            await self._replay(context, steps, "replayed_call")
        elif len(samplings) == 1:
            steps = [await self._sample(context, samplings[0], 0)]
        else:
            steps = await self._sample_all(context, samplings)
        await response.finish(prompt, [self._with_call_text(context, step) for step in steps])

    async def _find_answer(self, session: Session, call: ModelCall, response: PendingResponse) -> list[Step] | None:
        """Returns the recorded answer to a request that is sent again; None if it has none, or failed since."""
        first = session.failed_requests.get(response.request, 0)
        return (await session.graph(self._pool)).find_answer(response.request, call.choices, first=first)

    def keep_call_text(self, call: ModelCall) -> ModelCall:
        """The call of an agent that parses tool calls itself: the answer has their text too, and so may the messages."""
        if not call.reads_calls:
            return call
        messages = tuple(self._source(call).parse_calls(message, call.tools) for message in call.messages)
        return replace(call, messages=messages, keeps_call_text=True)

    def _with_call_text(self, context: "CallContext", step: Step) -> Step:
        """The step as the agent sees it."""
        if not (context.call.keeps_call_text and step.message.get("tool_calls")):
            return step
        text = self._source(context.call).call_text(context.prompt, step)
        return replace(step, message={**step.message, "content": text or step.message["content"]})

    async def history(self, session: Session, transcript: str) -> SessionHistory:
        return SessionHistory(session.last_request(transcript), await session.graph(self._pool))

    async def count_tokens(self, session: Session, caller: Caller, call: ModelCall) -> int:
        """The length of the call's prompt."""
        return await self._source(call).count_tokens(call, await self._prompt(session, caller, call))

    def _source(self, call: ModelCall) -> ReplySource:
        return self.policies.by_name[call.policy]

    async def _prompt(self, session: Session, caller: Caller, call: ModelCall) -> Prompt:
        source, last, graph = self._source(call), session.last_request(caller.transcript), await session.graph(self._pool)
        known, prompt = graph.next_step, await source.prompt(graph, call, last)
        is_unknown = prompt.parent is None and any(message["role"] == "assistant" for message in call.messages)
        if is_unknown or prompt.reason in (HISTORY_EDITED, REPLY_EDITED):  # another gateway may have recorded the reply
            await session.catch_up(self._pool)
            graph = await session.graph(self._pool)
            if graph.next_step != known:  # read now, or meanwhile by another call
                prompt = await source.prompt(graph, call, last)
        return prompt

    def count(self, name: str) -> None:
        """Count something that was not done as the caller asked; the first of each name is also emitted as an event."""
        counts, name = self.metrics.notices, name[:MAX_NOTICE_CHARACTERS]
        if name not in counts and len(counts) >= MAX_NOTICE_NAMES:
            name = "other"
        counts[name] += 1
        if counts[name] == 1:
            self._events.emit("gateway.notice", name=name)

    async def _constrain(self, call: ModelCall, prompt: Prompt) -> ReplyGrammar | None:
        """The grammar of the reply. Compiling a large schema takes up to a second, hence the thread."""
        if call.format is None and call.forced is None and not call.strict and not call.allowed:
            return None
        grammar, ignored = await asyncio.to_thread(self._source(call).grammar, call, prompt)
        if grammar is not None and call.sampling.biased:
            text = "logit_bias and a schema that binds the reply exclude each other; leave one out"
            raise RequestError(text, code="unsupported_parameter", param="logit_bias")
        for name in ignored:
            self.count(f"ignored:{name}")
        return grammar

    def _samplings(self, call: ModelCall, defaults: Sampling, prompt: Prompt, grammar: ReplyGrammar | None) -> list[Sampling]:
        """The sampling of each choice, capped by the run's `max_tokens` and by the source."""
        if grammar is not None:
            call = replace(call, sampling=replace(call.sampling, grammar=grammar))
        samplings = self._source(call).samplings(call, defaults.max_tokens, prompt)
        if samplings[0].max_tokens < call.sampling.max_tokens < NO_LIMIT:
            self.count("capped:max_tokens")
        return samplings

    async def _sample_all(self, context: CallContext, samplings: list[Sampling]) -> list[Step]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample(context, each, choice)) for choice, each in enumerate(samplings)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _sample(self, context: CallContext, sampling: Sampling, choice: int) -> Step:
        """Sample one choice and record it. A reply that breaks off is recorded too, and never trained."""
        prompt = context.prompt
        seed = f"{context.session.rollout_id} {prompt.chain} {context.response.name.rpartition('-')[2]} {choice}"
        seed += f" {context.call.policy}" if context.call.policy else ""  # else two policies would give their tool calls equal ids
        reply = self._source(context.call).reply(context.call, prompt, sampling, seed=seed)
        started = time.perf_counter()
        context.response.summary.prompt_tokens = len(prompt.ids)
        try:
            await self._generate(context, sampling, reply, choice)
        except asyncio.CancelledError:
            reply.end("cancelled")
            await self._record_partial(context, sampling, reply, started, choice)
            raise
        except EngineError:
            reply.end("error")
            await self._record_partial(context, sampling, reply, started, choice)
            raise
        step = await self._record(context, sampling, reply, started, choice)
        await context.response.finish_choice(choice, self._with_call_text(context, step))
        return step

    async def _generate(self, context: CallContext, sampling: Sampling, reply: ReplyBuilder, choice: int) -> None:
        watchdog = StallWatchdog(first_token_s=self._limits.first_token_s, stall_s=self._limits.stall_s)
        source, engine_boundary = self._source(context.call), self._engine_boundaries[context.call.policy]
        try:
            chunks = source.generate(context.call, context.prompt, sampling, rollout_id=context.session.rollout_id)
            async with aclosing(chunks) as stream:
                while reply.finish is None:
                    with engine_boundary:
                        chunk = await anext(stream, None)
                    if chunk is None:
                        break
                    watchdog.reset()
                    size = len(reply.ids)
                    deltas = reply.add(chunk)
                    tokens = UnsentTokens(reply.ids[size:], reply.full_logprobs[size:], reply.most_likely[size:])
                    await context.response.add(context.prompt, choice, deltas, tokens)
        except asyncio.CancelledError:
            if error := watchdog.stall_error():
                raise error from None
            raise
        finally:
            watchdog.stop()
            summary = context.response.summary
            summary.first_token_s = summary.first_token_s or watchdog.first_token_s
        if reply.finish not in ("stop", "length"):
            raise EngineError(f"engine {source.engine.model} broke off a reply after {len(reply.ids)} tokens")

    async def _repeat_recorded(self, context: CallContext) -> list[Step] | None:
        """Give the reply of the recorded call that a branch's call repeats; None if it is to be sampled."""
        session, call, prompt, source = context.session, context.call, context.prompt, self._source(context.call)
        if (replay := await session.replay(self._pool, source.tokenizer)) is None:
            return None
        graph = await session.graph(self._pool)
        parent = None if prompt.parent is None else graph.nodes[graph.steps[prompt.parent].node]
        messages = (*graph.conversation(prompt.parent), *self._recorder.clean(prompt.messages))
        tools = prompt.tools if parent is None else graph.path_tools(parent)
        asked = CallRequest.of(messages, tools, tuple(prompt.ids), choices=call.choices, policy=call.policy)
        recorded = replay.find(asked, is_retry=context.caller.is_retry)
        if recorded is None:
            return None
        steps = graph.answer(recorded.name)
        try:
            for step in recorded.steps[len(steps) :]:
                named = replace(step, answer=recorded.name, transcript=context.caller.transcript)
                steps.append(await self._recorder.repeat(session, prompt, named))
        except BaseException:
            replay.give_back(recorded)
            raise
        await self._replay(context, steps, "branch_replayed_call")
        return steps

    async def _replay(self, context: CallContext, steps: list[Step], counted: str) -> None:
        self.count(counted)
        context.response.name, context.response.created = steps[0].answer, steps[0].created
        for choice, step in enumerate(steps):
            tokens = UnsentTokens(step.completion_ids, step.full_logprobs or step.logprobs, step.most_likely)
            await context.response.add(context.prompt, choice, deltas_of(step.message), tokens)
            await context.response.finish_choice(choice, self._with_call_text(context, step))

    async def _record(self, context: CallContext, sampling: Sampling, reply: ReplyBuilder, started: float, choice: int) -> Step:
        metadata = StepMetadata(
            sampling=sampling,
            transcript=context.caller.transcript,
            answer=context.response.name,
            choice=choice,
            created=context.response.created,
            seconds=round(time.perf_counter() - started, 4),
            policy=context.call.policy,
        )
        summary = context.response.summary
        summary.sampled_tokens += len(reply.ids)
        if reply.usage is not None:
            summary.prompt_tokens += reply.usage.prompt_tokens
            summary.sampled_tokens += reply.usage.completion_tokens
            if not reply.usage.completion_tokens:
                self.count("usage_not_told")
        if not reply.behaviour_known:
            self.count("behaviour_logprob_unknown")
        if sampling.top_logprobs and reply.ids and not reply.most_likely:
            self.count("ignored:top_logprobs")
        if reply.finish == "length":
            self.count("finish:length")
        if reply.is_cut:
            self.count("cut:parallel_tool_calls")
        step = await self._recorder.record(context.session, context.prompt, reply, metadata)
        summary.steps.append(step)
        return step

    async def _record_partial(
        self, context: CallContext, sampling: Sampling, reply: ReplyBuilder, started: float, choice: int
    ) -> None:
        """Record a reply that broke off. A failing store is only counted, so that the caller sees the first error."""
        if reply.is_empty:
            return
        try:
            # Shielded: the task may be cancelled already, and the store must still get what was sampled.
            await finish_shielded(self._record(context, sampling, reply, started, choice))
        except PenstockError:
            self.count("partial_reply_not_recorded")


class StallWatchdog:
    """Cancels the task that made it when the engine is silent for too long; `reset` restarts the wait.

    One timer serves the whole reply. It is not rescheduled for each chunk: when it fires, it checks when the last chunk came.
    """

    def __init__(self, *, first_token_s: float, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stall_s = stall_s
        self._allowed_s = first_token_s
        self._last = self._began = self._loop.time()
        self._timer = self._loop.call_at(self._last + min(first_token_s, stall_s), self._check)
        self._fired = False
        self.first_token_s: float | None = None
        """Seconds until the first chunk; None before it."""

    def reset(self) -> None:
        """The engine has sent a chunk."""
        self._last = self._loop.time()
        if self.first_token_s is None:
            self.first_token_s = self._last - self._began
            self._allowed_s = self._stall_s

    def stop(self) -> None:
        self._timer.cancel()

    def stall_error(self) -> EngineError | None:
        """The reason for the cancellation if this watchdog caused it, else None. Takes the cancellation back (`uncancel`)."""
        if not self._fired or self._task is None:
            return None
        self._task.uncancel()
        return EngineError(f"the engine was silent for {self._allowed_s:g} s; the call was given up")

    def _check(self) -> None:
        due = self._last + self._allowed_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._check)
        elif self._task is not None:
            self._fired = True
            self._task.cancel()
