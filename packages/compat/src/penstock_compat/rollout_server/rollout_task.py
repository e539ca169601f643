"""One accepted rollout: it waits for a slot, runs on the back end, and each of its two results is stored, then delivered."""

import asyncio
import json
import logging
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import orjson

from penstock.errors import GraderError, one_line
from penstock.rollout.author_tasks import Slots
from penstock.sdk.clients import Clients
from penstock.sdk.context import finite_reward
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample, to_json_values
from penstock_compat.rollout_server.backend import ExecutionBackend, ExecutionRequest, ExecutionResult
from penstock_compat.rollout_server.delivery import CallbackSender, read_reply
from penstock_compat.rollout_server.journal import UNFINISHED, Journal, Part
from penstock_compat.rollout_server.protocol import (
    CompletionReply,
    GraderCompleteRequest,
    GraderStatus,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutState,
    RolloutStatus,
    SampleBody,
)

SILENT = "the back end ended without saying how the workflow ended"
UNGRADED = "the back end ended without saying how the grader ended"
STOPPED = "the server was stopped while it ran"
STOPPED_GRADING = "the server was stopped before it was graded"
UNSENT = "it was not sent, since the completion before it was refused"
LEAVE_S = 10.0
"""How long a back end may take to stop a rollout when the server ends; longer than the grace that it gives the author's code."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResources:
    """What all rollouts of a server share."""

    backend: ExecutionBackend
    journal: Journal
    sender: CallbackSender
    clients: Clients
    slots: Slots
    """For workflows."""


class RolloutTask:
    """Its methods raise nothing but errors of the journal and their own cancellation."""

    def __init__(self, request: RolloutInitRequest, resources: ServerResources) -> None:
        self.id = request.rollout_id
        self.request = request
        self._resources = resources
        self._slot = AsyncExitStack()
        self._execution: asyncio.Task[None] | None = None
        self._gave_up = False
        """Whether a delivery was given up: what is left waits for the server's next start."""

    async def run(self) -> None:
        """Runs it and delivers its results. What cannot be delivered stays in the journal."""
        self._execution = asyncio.create_task(self._run())
        try:
            await asyncio.wait({self._execution})
        except asyncio.CancelledError:
            self._execution.cancel()
            await asyncio.wait({self._execution}, timeout=LEAVE_S)
            raise
        if not self._execution.cancelled():
            self._execution.result()
        await self.deliver()

    async def resume(self) -> None:
        """After a restart: runs it if it was not started, else fails it; then delivers its results."""
        if (await self._resources.journal.entry(self.id)).state is RolloutState.QUEUED:
            await self.run()
            return
        await self._fail_unfinished(STOPPED, STOPPED_GRADING)
        await self.deliver()

    async def deliver(self) -> None:
        """Delivers the stored results that were not delivered, the completion first."""
        await self._deliver("completion")
        await self._deliver("grade")
        await self._resources.journal.settle(self.id, keep=self._gave_up)

    async def end(self, state: RolloutState, message: str) -> bool:
        """Stores that it ended in this way; results that are stored stay. Returns False if it has ended before."""
        result = failure_result(message, RolloutErrorCategory.AGENT_ERROR)
        grade = grade_body(self.request, result) if self.request.grader_callback_url else None
        return await self._resources.journal.end(self.id, state, message, completion_body(self.request, result), grade)

    def stop(self) -> None:
        """Cancels its execution; results are still delivered."""
        if self._execution is not None:
            self._execution.cancel()

    async def _run(self) -> None:
        async with self._slot:
            await self._slot.enter_async_context(self._resources.slots)
            if not await self._resources.journal.start(self.id):
                return
            error = await self._execute()
        await self._fail_unfinished(error or SILENT, error or UNGRADED)

    async def _execute(self) -> str:
        """Returns what the back end raised, as one line, or an empty string."""
        request = ExecutionRequest(
            id=self.request.rollout_id,
            prompt=self.request.initial_messages,
            label=self.request.label,
            metadata=self.request.metadata,
            agent_timeout_sec=self.request.agent_timeout_sec,
            grader_timeout_sec=self.request.grader_timeout_sec,
            records=self.request.records,
        )
        context = RolloutContext(
            base_url=self.request.chat_completions_url.rstrip("/"),
            api_key=self.request.llm_api_key or self.request.controller_api_key or "",
            rollout_id=self.request.rollout_id,
            clients=self._resources.clients,
        )
        try:
            with context:
                await self._resources.backend.execute(
                    request, self._completed, self._graded if self.request.grader_callback_url else None
                )
        except Exception as error:  # whatever a back end raises ends this rollout alone
            log.error("the back end failed on rollout %s", self.id, exc_info=error)
            return f"the back end failed: {one_line(error)}"
        return ""

    async def _completed(self, result: ExecutionResult) -> CompletionReply:
        """Releases the slot, stores and delivers the workflow's result. Returns the controller's reply, for the grader."""
        await self._slot.aclose()
        succeeded = RolloutState.GRADING if self.request.grader_callback_url else RolloutState.SUCCESS
        state = succeeded if result.status is RolloutStatus.SUCCESS else RolloutState.FAILURE
        if not await self._resources.journal.complete(
            self.id, state, result.err_message or "", completion_body(self.request, result)
        ):
            log.warning("rollout %s: a second completion was dropped", self.id)
            return CompletionReply()
        reply = await self._deliver("completion")
        refused = (await self._resources.journal.entry(self.id)).completion_sent
        if refused and await self.end(RolloutState.FAILURE, refused):
            self.stop()
            await asyncio.sleep(0)  # the cancellation arrives here: nobody wants a grade
        return read_reply(reply, f"the completion of rollout {self.id}")

    async def _graded(self, result: ExecutionResult) -> None:
        """Stores the grade; it is delivered once the back end is done."""
        result = validate_grade(result)
        state = RolloutState.SUCCESS if result.status is RolloutStatus.SUCCESS else RolloutState.FAILURE
        if not await self._resources.journal.grade(self.id, state, result.err_message or "", grade_body(self.request, result)):
            log.warning("rollout %s: a grade without a completion, or a second one, was dropped", self.id)

    async def _fail_unfinished(self, workflow_message: str, grader_message: str) -> None:
        """Fails what a back end, or the last process, left without a result, with one message for the workflow or the grader."""
        entry = await self._resources.journal.entry(self.id)
        if entry.state in UNFINISHED:
            await self.end(RolloutState.FAILURE, workflow_message if entry.completion is None else grader_message)
        elif entry.completion and not entry.grade and self.request.grader_callback_url:
            completion = RolloutCompleteRequest.model_validate_json(entry.completion)
            category = completion.err_category or RolloutErrorCategory.AGENT_ERROR
            grade = failure_result(completion.err_message or grader_message, category)
            await self._resources.journal.grade(self.id, entry.state, entry.message, grade_body(self.request, grade))

    async def _deliver(self, part: Part) -> bytes:
        """Delivers a result. Returns the reply, which is empty if there is nothing to deliver or nobody accepted it."""
        entry = await self._resources.journal.entry(self.id)
        body, sent = (entry.completion, entry.completion_sent) if part == "completion" else (entry.grade, entry.grade_sent)
        url = self.request.completion_callback_url if part == "completion" else self.request.grader_callback_url
        if body is None or url is None or sent is not None or self._gave_up:
            return b""
        if part == "grade" and entry.completion_sent:
            await self._resources.journal.sent(self.id, part, UNSENT)
            return b""
        what = f"the {part} of rollout {self.id}"
        delivery = await self._resources.sender.send(url, body, key=self.request.controller_api_key, what=what)
        if delivery.reason:
            log.error("%s", delivery.reason)
        self._gave_up = delivery.gave_up
        if not delivery.gave_up:
            await self._resources.journal.sent(self.id, part, delivery.reason)
        return delivery.reply


# Bodies of callbacks

EXTENSION_FIELDS = ("strays", "reward", "step_rewards", "components", "filled", "misreported", "end")
"""Fields that other implementations of the protocol do not know: left out if unset."""


def completion_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    body = RolloutCompleteRequest(
        rollout_id=request.rollout_id,
        status=result.status,
        extra_fields=request.extra_fields,
        err_message=result.err_message,
        err_category=result.err_category,
        strays=list(result.direct_calls) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def grade_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """`result` must have passed `validate_grade`."""
    body = GraderCompleteRequest(
        rollout_id=request.rollout_id,
        status=GraderStatus(result.status),
        samples={name: _sample(sample) for name, sample in result.samples.items()},
        err_message=result.err_message,
        err_category=result.err_category,
        reward=result.reward,
        step_rewards=result.step_rewards or None,
        components=result.components or None,
        filled=list(result.filled) or None,
        misreported=list(result.misreported) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def validate_grade(result: ExecutionResult) -> ExecutionResult:
    """Returns `result` if all its rewards are finite numbers; else a failure with the reason, without rewards."""
    try:
        for sample in result.samples.values():
            sample.reward = None if sample.reward is None else finite_reward(sample.reward)
        result.reward = None if result.reward is None else finite_reward(result.reward)
        result.step_rewards = {step: finite_reward(value) for step, value in result.step_rewards.items()}
        return result
    except GraderError as error:
        for sample in result.samples.values():
            sample.reward = None
        return failure_result(str(error), RolloutErrorCategory.VALIDATION_ERROR, samples=result.samples)


def failure_result(
    message: str, category: RolloutErrorCategory, *, samples: dict[str, RolloutSample] | None = None
) -> ExecutionResult:
    return ExecutionResult(status=RolloutStatus.FAILURE, samples=samples or {}, err_message=message, err_category=category)


def encode(body: dict[str, Any]) -> bytes:
    """Encodes any value of an author's messages and metrics: NaN and infinity become null, lone surrogates a question mark."""
    fields = {name: value for name, value in body.items() if value is not None or name not in EXTENSION_FIELDS}
    try:
        return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # lone surrogates, integers beyond 64 bits, objects
        return json.dumps(_clean(fields), ensure_ascii=False, default=str).encode()


def _sample(sample: RolloutSample) -> SampleBody:
    return SampleBody(
        id=sample.id,
        messages=to_json_values(sample.messages),
        label=sample.label,
        reward=sample.reward,
        remove_sample=sample.remove_sample,
        metrics=cast("dict[str, Any]", to_json_values(sample.metrics)),
        extra_fields=cast("dict[str, Any]", to_json_values(sample.extra_fields)),
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in cast("list[Any]", value)]
    return value
