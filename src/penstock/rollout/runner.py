"""Runs one rollout from start to end: a session on the gateway, the workflow, the grader, and exactly one end."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.config import RolloutSection, run_secrets
from penstock.errors import EngineError, GraderError, PoolError, PoolFailed, WorkerLost, WorkflowError
from penstock.events import Events
from penstock.pool.base import AFTER_ALL, Pool
from penstock.pool.rules import graded_before
from penstock.records import VOID, End, Grade, Mark, Message, Rollout, RolloutRef, Sampling, Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import Executor, ExecutorContext, GatewaySession, ScratchFolders
from penstock.rollout.in_process import REMEDY, Reward, WorkflowResult
from penstock.rollout.transcripts import Transcript, make_samples, misreported, transcripts
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import RolloutSample
from penstock.system.async_tools import finish_shielded
from penstock.system.redaction import Redactor

if TYPE_CHECKING:
    from starlette.types import ASGIApp

NO_CALL = "the workflow made no model call through penstock"
STOPPED = "stopped before it ended"
FORGED_GRADE = "it was graded by something else than the run's grader and does not count"

Slot = AbstractAsyncContextManager[Any]
"""A concurrency limit, such as a semaphore: held while the agent and its grader run."""


class GatewayPort(Protocol):
    """The part of the gateway that the runner calls."""

    @property
    def app(self) -> "ASGIApp | None":
        """Serves its routes, for agents in the same event loop; None if there is no such thing."""
        ...

    def open(self, rollout: RolloutRef, sampling: Sampling, *, fresh: bool) -> GatewaySession:
        """Lets the rollout call the model. `sampling` holds the defaults of its calls. `fresh`: nothing is stored of it yet."""
        ...

    def close(self, rollout_id: str) -> Rollout | None:
        """Refuses its calls from now on. Returns its stored nodes and steps, or None if the gateway does not have them all."""
        ...


class RolloutOutcome(NamedTuple):
    """How a rollout ended, before it is stored."""

    end: End
    message: str = ""
    rewards: tuple[Reward, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs rollouts of one agent. A failed rollout is stored with its end and does not raise; a failing pool does."""

    executor: Executor
    grader: str
    """The grader's name, as its grades carry it."""
    gateway: GatewayPort
    pool: Pool
    events: Events
    limits: RolloutSection
    sole_grader: bool = False
    """Whether grades count only if this runner's grader gave them. Not so for flows, which submit their own rewards."""
    redactor: Redactor = field(default_factory=lambda: Redactor(run_secrets()))
    """Removes secrets from authors' error messages before they are stored."""

    async def run(self, rollout: RolloutRef, task: Task, sampling: Sampling, *, slot: Slot | None = None) -> End | None:
        """Runs an opened rollout and returns its end. If cancelled, it ends as CANCELLED before the cancellation is passed on.

        It waits for `slot`, and stays as it was if it is cancelled there. The slot is free as soon as the agent and its grader
        are done, while the end is being stored. WorkerLost goes to the caller, who either replaces the rollout or ends it: if
        it were ended here and replaced later, its group would count as complete in between.
        """
        async with slot or nullcontext():
            started = time.perf_counter()
            self.events.emit(
                "rollout.start", rollout_id=rollout.id, group_id=rollout.group_id, channel=rollout.channel, task_id=task.id
            )
            try:
                outcome = await self._attempt(rollout, task, sampling)
            except asyncio.CancelledError:
                await finish_shielded(self._end(rollout, RolloutOutcome(End.CANCELLED, STOPPED), started))
                raise
            except WorkerLost as lost:
                self._emit_end(rollout, Rollout(ref=rollout, end=End.LOST, message=str(lost)), started)
                raise
        return await finish_shielded(self._end(rollout, outcome, started))

    async def compute_reward(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> float:
        """Returns the grader's reward for a conversation of a running rollout; nothing is recorded.

        `fields` are added to the task's metadata; `ground_truth` among them is the label if the task has none. Raises GraderError
        or TimeoutError if there is no reward.
        """
        if not rollout_id:
            raise GraderError("nothing says whose conversation it is; name the rollout")
        task, attempt = await self.pool.task(rollout_id), await self.pool.rollout(rollout_id)
        steps = tuple(step.index for step in attempt.steps)
        replies = deepcopy([message for message in messages if message.get("role") == "assistant"])
        sample = RolloutSample(id=MAIN, messages=messages, transcript=deepcopy(messages), replies=replies, steps=steps)
        label = task.label if task.label is not None else fields.get("ground_truth")
        task = replace(task, label=None if label is None else str(label), metadata={**fields, **(task.metadata or {})})
        name = f"{rollout_id}.judge"  # its artifacts must not mix with those of the rollout's own grading
        rewards = await self.executor.grade(task, {MAIN: sample}, rollout_id=name, timeout_s=self.limits.grader_timeout_s)
        reward = Rollout(ref=attempt.ref, end=End.COMPLETED, grades=self._grades(rollout_id, rewards)).reward
        if reward is None:
            raise GraderError(f"grader {self.grader!r} gave no reward for rollout {rollout_id}")
        return reward

    def _grades(self, rollout_id: str, rewards: Iterable[Reward]) -> tuple[Grade, ...]:
        return tuple(each.as_grade(rollout_id, self.grader) for each in rewards)

    async def _attempt(self, rollout: RolloutRef, task: Task, sampling: Sampling) -> RolloutOutcome:
        session, limit_s = self.gateway.open(rollout, sampling, fresh=True), self.limits.agent_timeout_s
        failed: RolloutOutcome | None = None
        result = WorkflowResult({})
        try:
            result = await self.executor.run(task, session, rollout_id=rollout.id, timeout_s=limit_s)
        except TimeoutError:
            text = f"the workflow ran longer than rollout.agent_timeout_s = {limit_s:g}; raise it or do less"
            failed = RolloutOutcome(End.TIMEOUT, text)
        except EngineError as error:
            failed = RolloutOutcome(End.ENGINE_ERROR, str(error))
        except WorkflowError as error:
            failed = RolloutOutcome(End.AGENT_ERROR, str(error))
        finally:
            recorded = self.gateway.close(rollout.id)
        if rollout.branch is not None and (problem := session.branch_problem(ended=failed is None)):
            return RolloutOutcome(End.BRANCH_DIVERGED, problem)
        if failed is not None:
            return failed
        if result.direct_calls:
            self.events.emit("rollout.direct_calls", rollout_id=rollout.id, providers=list(result.direct_calls))
        if recorded is None:
            recorded = await self.pool.rollout(rollout.id)
        return await self._grade(rollout, task, result, recorded)

    async def _grade(self, rollout: RolloutRef, task: Task, result: WorkflowResult, attempt: Rollout) -> RolloutOutcome:
        recorded, limit_s = transcripts(attempt), self.limits.grader_timeout_s
        if not recorded:
            return RolloutOutcome(End.AGENT_ERROR, no_call_message(result))
        if attempt.grades and not self.sole_grader:  # a flow has submitted its own rewards to the gateway
            return RolloutOutcome(End.COMPLETED)
        samples = make_samples(recorded, result.samples, result.returned)
        if names := misreported(samples, result.samples):
            self.events.emit("rollout.misreported", rollout_id=rollout.id, transcripts=names)
        self.events.emit("rollout.grade", rollout_id=rollout.id)
        try:
            rewards = await self.executor.grade(task, samples, rollout_id=rollout.id, timeout_s=limit_s)
        except TimeoutError:
            return RolloutOutcome(
                End.GRADER_ERROR, f"the grader ran longer than rollout.grader_timeout_s = {limit_s:g}; raise it or do less"
            )
        except (GraderError, EngineError) as error:
            return RolloutOutcome(End.GRADER_ERROR, str(error))
        return RolloutOutcome(End.COMPLETED, rewards=tuple(rewards))

    async def _forged_grade(self, rollout_id: str) -> str:
        """Says which grade is in the pool that our grader did not give, while its own were refused; empty if there is none."""
        attempt = await self.pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)
        if not attempt.grades or attempt.end is not None:  # a forged end is found later
            return ""
        self._emit_forged(attempt)
        other = attempt.grades[0]
        return (
            f"{FORGED_GRADE}: the pool has a reward of {other.reward:g} from {other.source!r}; find out how its agent writes there"
        )

    async def _end(self, rollout: RolloutRef, outcome: RolloutOutcome, started: float) -> End | None:
        grades, message = self._grades(rollout.id, outcome.rewards), self.redactor.text(outcome.message)
        attempt = Rollout(ref=rollout, end=outcome.end, message=message, grades=grades)
        try:
            stored = await self._store_end(rollout.id, outcome.end, message, grades)
        except PoolFailed:
            raise
        except PoolError as refused:  # it has ended meanwhile and takes no grades, or something else has graded it
            forged = await self._forged_grade(rollout.id) if self.sole_grader else ""
            await self.pool.end(rollout.id, End.GRADER_ERROR, self.redactor.text(forged) or str(refused))
            stored = False
        if not stored and self.sole_grader:
            await self._void_forged_end(rollout.id)
        if not stored or (not grades and outcome.end is End.COMPLETED):  # ended before, or graded through the gateway
            attempt = await self.pool.rollout(rollout.id)
        self._emit_end(rollout, attempt, started)
        return attempt.end

    async def _store_end(self, rollout_id: str, end: End, message: str, grades: tuple[Grade, ...]) -> bool:
        if not (self.sole_grader and grades):
            return await self.pool.end(rollout_id, end, message, grades)
        if _takes_only_grades(type(self.pool)):
            return await self.pool.end(rollout_id, end, message, grades, only_grades=True)
        if (await self.pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)).grades:
            raise graded_before(rollout_id)
        return await self.pool.end(rollout_id, end, message, grades)

    async def _void_forged_end(self, rollout_id: str) -> None:
        """Takes a rollout out of everything that counts if something else has completed it, and not a group's deadline."""
        attempt = await self.pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)
        if attempt.end is End.COMPLETED:
            await self.pool.mark(Mark(rollout_id=rollout_id, trainable=False, quality=0.0, note=VOID))
            self._emit_forged(attempt)

    def _emit_forged(self, attempt: Rollout) -> None:
        name, sources = attempt.ref.id, sorted({grade.source for grade in attempt.grades})
        self.events.emit("rollout.forged", rollout_id=name, sources=sources, text=f"rollout {name}: {FORGED_GRADE}")

    def _emit_end(self, rollout: RolloutRef, attempt: Rollout, started: float) -> None:
        self.events.emit(
            "rollout.end",
            rollout_id=rollout.id,
            group_id=rollout.group_id,
            channel=rollout.channel,
            end=attempt.end,
            message=attempt.message,
            reward=attempt.reward,
            seconds=round(time.perf_counter() - started, 3),
        )


@cache
def _takes_only_grades(kind: type[Pool]) -> bool:
    """Whether its `end` can refuse; pools of plug-ins from before it could are asked for grades first."""
    return "only_grades" in signature(kind.end).parameters


def no_call_message(result: WorkflowResult) -> str:
    """Says why there is nothing to grade or train on, and what to do about it."""
    direct = f", but called {', '.join(result.direct_calls)} directly" if result.direct_calls else ""
    return f"{NO_CALL}{direct}; {REMEDY}"


@asynccontextmanager
async def open_runner(
    agent: Agent,
    *,
    gateway: GatewayPort,
    pool: Pool,
    events: Events,
    limits: RolloutSection,
    section: Any = None,
    artifacts: Path | None = None,
    hidden: Sequence[Path] = (),
) -> AsyncGenerator[Runner, None]:
    """Yields a runner for `agent` on the executor that `limits` names; `section` holds that executor's settings.

    `hidden` are files and folders that the agent must not read; see `ExecutorContext`.
    """

    async def load_transcripts(rollout_id: str) -> dict[str, Transcript]:
        return transcripts(await pool.rollout(rollout_id))

    author_tasks = AuthorTasks(agent.entry.parent, events)
    context = ExecutorContext(
        agent=agent,
        author_tasks=author_tasks,
        section=section,
        load_transcripts=load_transcripts,
        artifacts=artifacts,
        grader_timeout_s=limits.grader_timeout_s,
        events=events,
        hidden=tuple(hidden),
        scratch=ScratchFolders(events),
        app=gateway.app,
    )
    async with EXECUTORS.load(limits.executor)(context) as executor:
        yield Runner(
            executor=executor,
            grader=agent.grader_name,
            gateway=gateway,
            pool=pool,
            events=events,
            limits=limits,
            sole_grader=agent.graded_by_run,
        )
