"""One accepted rollout on its way: waits its turn, is run by the back end, and each of its two results is kept, then delivered."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.rollout.author_tasks import Slots, one_line
from penstock.rollout.server.backend import ExecutionBackend, ExecutionRequest, ExecutionResult
from penstock.rollout.server.bodies import checked, completion_body, failure, grade_body
from penstock.rollout.server.delivery import Courier, read_reply
from penstock.rollout.server.journal import UNENDED, Journal, Part
from penstock.rollout.server.protocol import (
    CompletionReply,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutStatus,
    State,
)
from penstock.sdk.clients import NO_KEY, Clients
from penstock.sdk.routing import RolloutContext

SILENT = "the back end ended without saying how the workflow ended"
UNGRADED = "the back end ended without saying how the grader ended"
STOPPED = "the server was stopped while it ran"
STOPPED_GRADING = "the server was stopped before it was graded"
UNSENT = "it was not sent, since the completion before it was refused"
LEAVE_S = 10.0
"""How long a back end has to let go of a rollout when the server ends; longer than it gives its own guests."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What all rollouts of a server share."""

    backend: ExecutionBackend
    journal: Journal
    courier: Courier
    clients: Clients
    slots: Slots
    """Places of workflows."""


class RolloutTask:
    """Nothing of it raises but a journal that fails, and its own cancellation."""

    def __init__(self, request: RolloutInitRequest, means: Means) -> None:
        self.id = request.rollout_id
        self.request = request
        self._means = means
        self._place = AsyncExitStack()
        self._work: asyncio.Task[None] | None = None
        self._late = False
        """Whether a delivery was given up: the rest waits for the server's next start."""

    async def run(self) -> None:
        """Run it and deliver what came of it. What cannot be delivered stays in the journal."""
        self._work = asyncio.create_task(self._run())
        try:
            await asyncio.wait({self._work})
        except asyncio.CancelledError:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=LEAVE_S)
            raise
        if not self._work.cancelled():
            self._work.result()
        await self.deliver()

    async def resume(self) -> None:
        """After a restart: run it if that was not begun, else fail what was under way; then deliver."""
        if (await self._means.journal.entry(self.id)).state is State.QUEUED:
            await self.run()
            return
        await self._conclude(STOPPED, STOPPED_GRADING)
        await self.deliver()

    async def deliver(self) -> None:
        """Deliver the results that are kept and were not taken, the completion first."""
        await self._deliver("completion")
        await self._deliver("grade")
        await self._means.journal.settle(self.id, keep=self._late)

    async def end(self, state: State, message: str) -> bool:
        """Keep that it ended in this way; False where it has ended before. Results that are there stay."""
        told = failure(message, RolloutErrorCategory.AGENT_ERROR)
        grade = grade_body(self.request, told) if self.request.grader_callback_url else None
        return await self._means.journal.end(self.id, state, message, completion_body(self.request, told), grade)

    def stop(self) -> None:
        """Break off whatever of it runs; results are still delivered."""
        if self._work is not None:
            self._work.cancel()

    async def _run(self) -> None:
        async with self._place:
            await self._place.enter_async_context(self._means.slots)
            if not await self._means.journal.start(self.id):
                return
            error = await self._execute()
        await self._conclude(error or SILENT, error or UNGRADED)

    async def _execute(self) -> str:
        """What the back end raised, as one line; empty where it raised nothing."""
        given = self.request
        request = ExecutionRequest(
            id=given.rollout_id,
            prompt=given.initial_messages,
            label=given.label,
            metadata=given.metadata,
            agent_timeout_sec=given.agent_timeout_sec,
            grader_timeout_sec=given.grader_timeout_sec,
        )
        context = RolloutContext(
            base_url=given.chat_completions_url.rstrip("/"),
            api_key=given.llm_api_key or given.controller_api_key or NO_KEY,
            rollout_id=given.rollout_id,
            clients=self._means.clients,
        )
        try:
            with context:
                await self._means.backend.execute(request, self._completed, self._graded if given.grader_callback_url else None)
        except Exception as error:  # whatever a back end raises ends this rollout alone
            log.error("the back end failed on rollout %s", self.id, exc_info=error)
            return f"the back end failed: {one_line(error)}"
        return ""

    async def _completed(self, result: ExecutionResult) -> CompletionReply:
        """The workflow has ended: its place is free, its end is kept and told. What the listener answers is for the grader."""
        await self._place.aclose()
        well = result.status is RolloutStatus.SUCCESS
        state = State.FAILURE if not well else State.GRADING if self.request.grader_callback_url else State.SUCCESS
        if not await self._means.journal.complete(self.id, state, result.err_message or "", completion_body(self.request, result)):
            log.warning("rollout %s: a second completion was dropped", self.id)
            return CompletionReply()
        reply = await self._deliver("completion")
        refused = (await self._means.journal.entry(self.id)).completion_sent
        if refused and await self.end(State.FAILURE, refused):
            self.stop()
            await asyncio.sleep(0)  # nobody wants a grade: this is where the back end is broken off
        return read_reply(reply, f"the completion of rollout {self.id}")

    async def _graded(self, result: ExecutionResult) -> None:
        """The grader has ended; that is told once the back end is done."""
        told = checked(result)
        state = State.SUCCESS if told.status is RolloutStatus.SUCCESS else State.FAILURE
        if not await self._means.journal.grade(self.id, state, told.err_message or "", grade_body(self.request, told)):
            log.warning("rollout %s: a grade without a completion, or a second one, was dropped", self.id)

    async def _conclude(self, unrun: str, ungraded: str) -> None:
        """Fail what a back end, or the last process, left open: `unrun` says why of a workflow, `ungraded` of a grader."""
        entry = await self._means.journal.entry(self.id)
        if entry.state in UNENDED:
            await self.end(State.FAILURE, unrun if entry.completion is None else ungraded)
        elif entry.completion and not entry.grade and self.request.grader_callback_url:
            told = RolloutCompleteRequest.model_validate_json(entry.completion)
            grade = failure(told.err_message or ungraded, told.err_category or RolloutErrorCategory.AGENT_ERROR)
            await self._means.journal.grade(self.id, entry.state, entry.message, grade_body(self.request, grade))

    async def _deliver(self, part: Part) -> bytes:
        """The reply to a result that is taken now; empty where there is nothing to deliver, or nobody took it."""
        entry = await self._means.journal.entry(self.id)
        body, sent = (entry.completion, entry.completion_sent) if part == "completion" else (entry.grade, entry.grade_sent)
        url = self.request.completion_callback_url if part == "completion" else self.request.grader_callback_url
        if body is None or url is None or sent is not None or self._late:
            return b""
        if part == "grade" and entry.completion_sent:
            await self._means.journal.sent(self.id, part, UNSENT)
            return b""
        what = f"the {part} of rollout {self.id}"
        ended = await self._means.courier.send(url, body, key=self.request.controller_api_key, what=what)
        if ended.reason:
            log.error("%s", ended.reason)
        self._late = ended.late
        if not ended.late:
            await self._means.journal.sent(self.id, part, ended.reason)
        return ended.reply
