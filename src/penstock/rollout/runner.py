"""One rollout from start to end: a session on the gateway, the workflow, the grader, and exactly one end."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.config import RolloutSection
from penstock.errors import EngineError, GraderError, WorkflowError
from penstock.events import Events
from penstock.gateway.recorder import settled
from penstock.pool.base import Pool
from penstock.records import Attempt, End, Grade, Rollout, Sampling, Task
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import Executor, Session
from penstock.rollout.grading import Judge, Reward
from penstock.rollout.guests import Guests
from penstock.sdk.discovery import Agent

NO_CALL = "the workflow made no model call through penstock; use ctx.openai(), or ctx.base_url and ctx.api_key with another client"
STOPPED = "stopped before it ended"


class Gateway(Protocol):
    """What the runner needs of the gateway."""

    def open(self, rollout: Rollout, sampling: Sampling) -> Session:
        """Let the rollout call the model; `sampling` holds for calls that do not say otherwise."""
        ...

    def close(self, rollout_id: str) -> None:
        """Refuse its calls from now on."""
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
    judge: Judge
    gateway: Gateway
    pool: Pool
    events: Events
    limits: RolloutSection

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> None:
        """Run an opened rollout to its one end. Cancelled, it ends as CANCELLED before the cancellation goes on."""
        started = time.perf_counter()
        self.events.emit(
            "rollout.start", rollout_id=rollout.id, group_id=rollout.group_id, channel=rollout.channel, task_id=task.id
        )
        try:
            verdict = await self._attempt(rollout, task, sampling)
        except asyncio.CancelledError:
            await settled(self._end(rollout, Verdict(End.CANCELLED, STOPPED), started))
            raise
        await settled(self._end(rollout, verdict, started))

    async def _attempt(self, rollout: Rollout, task: Task, sampling: Sampling) -> Verdict:
        session, limit_s = self.gateway.open(rollout, sampling), self.limits.agent_timeout_s
        try:
            await self.executor.run(task, session, rollout_id=rollout.id, timeout_s=limit_s)
        except TimeoutError:
            return Verdict(End.TIMEOUT, f"the workflow ran longer than rollout.agent_timeout_s = {limit_s:g}; raise it or do less")
        except EngineError as error:
            return Verdict(End.ENGINE_ERROR, str(error))
        except WorkflowError as error:
            return Verdict(End.AGENT_ERROR, str(error))
        finally:
            self.gateway.close(rollout.id)
        return await self._judge(rollout, task)

    async def _judge(self, rollout: Rollout, task: Task) -> Verdict:
        attempt, limit_s = await self.pool.attempt(rollout.id), self.limits.grader_timeout_s
        if not attempt.steps:
            return Verdict(End.AGENT_ERROR, NO_CALL)
        try:
            rewards = await self.judge.judge(task, attempt, timeout_s=limit_s)
        except TimeoutError:
            return Verdict(
                End.GRADER_ERROR, f"the grader ran longer than rollout.grader_timeout_s = {limit_s:g}; raise it or do less"
            )
        except (GraderError, EngineError) as error:
            return Verdict(End.GRADER_ERROR, str(error))
        return Verdict(End.COMPLETED, rewards=tuple(rewards))

    async def _end(self, rollout: Rollout, verdict: Verdict, started: float) -> None:
        grades = tuple(
            Grade(rollout_id=rollout.id, reward=value, source=self.judge.name, transcript=transcript)
            for transcript, value in verdict.rewards
        )
        for grade in grades:
            await self.pool.grade(grade)
        attempt = Attempt(rollout=rollout, end=verdict.end, message=verdict.message, grades=grades)
        if not await self.pool.end(rollout.id, verdict.end, verdict.message):
            attempt = await self.pool.attempt(rollout.id)
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


@asynccontextmanager
async def open_runner(
    agent: Agent, *, gateway: Gateway, pool: Pool, events: Events, limits: RolloutSection
) -> AsyncGenerator[Runner, None]:
    """A runner for `agent` on the executor that `limits` names; leaving lets go of its connections."""
    guests = Guests(agent.entry.parent, events)
    async with EXECUTORS.load(limits.executor)(agent, guests) as executor:
        yield Runner(executor=executor, judge=Judge(agent, guests), gateway=gateway, pool=pool, events=events, limits=limits)
