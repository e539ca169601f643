"""One rollout from start to end: a session on the gateway, the workflow, the grader, and exactly one end."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.config import RolloutSection, run_secrets
from penstock.errors import EngineError, GraderError, WorkerLost, WorkflowError
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.records import Attempt, End, Grade, Message, Rollout, Sampling, Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.execution import Reward, WorkflowResult
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import Executor, Given, Session
from penstock.rollout.transcripts import Transcript, make_samples, transcripts
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import RolloutSample
from penstock.system.async_tools import settled
from penstock.system.redaction import Redactor

NO_CALL = "the workflow made no model call through penstock"
REMEDY = "use ctx.openai() or ctx.anthropic(), an integration, or ctx.base_url and ctx.api_key with another client"
STOPPED = "stopped before it ended"

Room = AbstractAsyncContextManager[Any]
"""A place among those that run at once, such as a semaphore: held while the agent and its grader run."""


class Gateway(Protocol):
    """What the runner needs of the gateway."""

    def open(self, rollout: Rollout, sampling: Sampling, *, fresh: bool) -> Session:
        """Let it call the model; `sampling` holds for calls that do not say otherwise. Nothing is stored of a `fresh` one yet."""
        ...

    def close(self, rollout_id: str) -> Attempt | None:
        """Refuse its calls from now on. The nodes and steps that are stored of it, where the gateway knows them all."""
        ...


class Verdict(NamedTuple):
    """How a rollout ended, before it is written down."""

    end: End
    message: str = ""
    rewards: tuple[Reward, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs rollouts of one agent. A failed rollout comes back ended, it does not raise; a failing pool does."""

    executor: Executor
    grader: str
    """The grader's name, as its grades carry it."""
    gateway: Gateway
    pool: Pool
    events: Events
    limits: RolloutSection
    redactor: Redactor = field(default_factory=lambda: Redactor(run_secrets()))
    """What an author's error says is written down without secrets."""

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling, *, room: Room | None = None) -> End | None:
        """Run an opened rollout to its one end, and tell it. Cancelled, it ends as CANCELLED before the cancellation goes on.

        It waits for `room`, and is left as it was where it is cancelled there; the next one has the room as soon as the agent and
        its grader are done, while the end is written down. WorkerLost goes on to the caller, who gives the rollout a successor or
        an end: between the two, its group would count as complete.
        """
        async with room or nullcontext():
            started = time.perf_counter()
            self.events.emit(
                "rollout.start", rollout_id=rollout.id, group_id=rollout.group_id, channel=rollout.channel, task_id=task.id
            )
            try:
                verdict = await self._attempt(rollout, task, sampling)
            except asyncio.CancelledError:
                await settled(self._end(rollout, Verdict(End.CANCELLED, STOPPED), started))
                raise
            except WorkerLost as lost:
                self._tell(rollout, Attempt(rollout=rollout, end=End.LOST, message=str(lost)), started)
                raise
        return await settled(self._end(rollout, verdict, started))

    async def judge(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> float:
        """The grader's reward for a conversation that a running rollout tells; nothing is recorded.

        `fields` go beside the task's own metadata, and give the label where the task has none. GraderError or TimeoutError where
        there is no reward.
        """
        if not rollout_id:
            raise GraderError("nothing says whose conversation it is; name the rollout")
        task, attempt = await self.pool.task(rollout_id), await self.pool.attempt(rollout_id)
        steps = tuple(step.index for step in attempt.steps)
        sample = RolloutSample(id=MAIN, messages=messages, transcript=deepcopy(messages), steps=steps)
        label = task.label if task.label is not None else fields.get("ground_truth")
        asked = replace(task, label=None if label is None else str(label), metadata={**fields, **(task.metadata or {})})
        name, limit_s = f"{rollout_id}.judge", self.limits.grader_timeout_s  # its own folder for what the grader leaves
        rewards = await self.executor.grade(asked, {MAIN: sample}, rollout_id=name, timeout_s=limit_s)
        reward = Attempt(rollout=attempt.rollout, end=End.COMPLETED, grades=self._grades(rollout_id, rewards)).reward
        if reward is None:
            raise GraderError(f"grader {self.grader!r} gave no reward for rollout {rollout_id}")
        return reward

    def _grades(self, rollout_id: str, rewards: Iterable[Reward]) -> tuple[Grade, ...]:
        return tuple(
            Grade(rollout_id=rollout_id, reward=value, source=self.grader, transcript=transcript, step=step)
            for transcript, value, step in rewards
        )

    async def _attempt(self, rollout: Rollout, task: Task, sampling: Sampling) -> Verdict:
        session, limit_s = self.gateway.open(rollout, sampling, fresh=True), self.limits.agent_timeout_s
        try:
            told = await self.executor.run(task, session, rollout_id=rollout.id, timeout_s=limit_s)
        except TimeoutError:
            return Verdict(End.TIMEOUT, f"the workflow ran longer than rollout.agent_timeout_s = {limit_s:g}; raise it or do less")
        except EngineError as error:
            return Verdict(End.ENGINE_ERROR, str(error))
        except WorkflowError as error:
            return Verdict(End.AGENT_ERROR, str(error))
        finally:
            recorded = self.gateway.close(rollout.id)
        if told.strays:
            self.events.emit("rollout.strays", rollout_id=rollout.id, providers=list(told.strays))
        if recorded is None:
            recorded = await self.pool.attempt(rollout.id)
        return await self._judge(rollout, task, told, recorded)

    async def _judge(self, rollout: Rollout, task: Task, told: WorkflowResult, attempt: Attempt) -> Verdict:
        recorded, limit_s = transcripts(attempt), self.limits.grader_timeout_s
        if not recorded:
            return Verdict(End.AGENT_ERROR, no_call(told))
        if attempt.grades:  # a flow has graded itself through the gateway
            return Verdict(End.COMPLETED)
        samples = make_samples(recorded, told.samples)
        try:
            rewards = await self.executor.grade(task, samples, rollout_id=rollout.id, timeout_s=limit_s)
        except TimeoutError:
            return Verdict(
                End.GRADER_ERROR, f"the grader ran longer than rollout.grader_timeout_s = {limit_s:g}; raise it or do less"
            )
        except (GraderError, EngineError) as error:
            return Verdict(End.GRADER_ERROR, str(error))
        return Verdict(End.COMPLETED, rewards=tuple(rewards))

    async def _end(self, rollout: Rollout, verdict: Verdict, started: float) -> End | None:
        grades, message = self._grades(rollout.id, verdict.rewards), self.redactor.text(verdict.message)
        attempt = Attempt(rollout=rollout, end=verdict.end, message=message, grades=grades)
        first = await self.pool.end(rollout.id, verdict.end, message, grades)
        if not first or (not grades and verdict.end is End.COMPLETED):
            attempt = await self.pool.attempt(rollout.id)
        self._tell(rollout, attempt, started)
        return attempt.end

    def _tell(self, rollout: Rollout, attempt: Attempt, started: float) -> None:
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


def no_call(told: WorkflowResult) -> str:
    """Why there is nothing to grade or train on, and what to do about it."""
    past = f", but called {', '.join(told.strays)} directly" if told.strays else ""
    return f"{NO_CALL}{past}; {REMEDY}"


@asynccontextmanager
async def open_runner(
    agent: Agent,
    *,
    gateway: Gateway,
    pool: Pool,
    events: Events,
    limits: RolloutSection,
    section: Any = None,
    artifacts: Path | None = None,
) -> AsyncGenerator[Runner, None]:
    """A runner for `agent` on the executor that `limits` names, with its `section`; leaving lets go of what it holds."""

    async def recorded(rollout_id: str) -> dict[str, Transcript]:
        return transcripts(await pool.attempt(rollout_id))

    guests = AuthorTasks(agent.entry.parent, events)
    given = Given(
        agent=agent,
        guests=guests,
        section=section,
        recorded=recorded,
        artifacts=artifacts,
        grader_timeout_s=limits.grader_timeout_s,
        events=events,
    )
    async with EXECUTORS.load(limits.executor)(given) as executor:
        yield Runner(executor=executor, grader=agent.grader_name, gateway=gateway, pool=pool, events=events, limits=limits)
