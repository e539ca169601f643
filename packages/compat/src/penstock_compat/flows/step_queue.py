"""A queue of submitted steps in memory, by group: a batch is fetched once enough of its groups are complete.

For programs that move steps themselves. Runs keep theirs in the pool, which is durable.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from penstock_compat.flows.step import SubmittedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQueueConfig:
    n_rollouts: int = 1
    """Trajectories of a group that must be complete before it is fetched."""
    scheduling_policy: str = "fifo"

    def __post_init__(self) -> None:
        if self.n_rollouts < 1 or self.scheduling_policy != "fifo":
            raise ValueError("n_rollouts must be 1 or more, and scheduling_policy 'fifo', the only one there is")


class StepConverter(Protocol):
    def convert(self, steps: list[SubmittedStep]) -> Any:
        """Turns the steps of a batch into what a trainer takes."""
        ...


@dataclass(slots=True)
class _StepChannel:
    groups: dict[str, dict[str, list[SubmittedStep]]] = field(default_factory=dict[str, dict[str, list[SubmittedStep]]])
    """By prompt, in the order of its first step; then by trajectory."""
    complete: set[str] = field(default_factory=set[str])
    closed: bool = False
    produced: int = 0
    consumed: int = 0
    dropped: int = 0
    fetches: int = 0

    def is_ready(self, prompt: str, rollouts: int) -> bool:
        return sum(uid in self.complete for uid in self.groups[prompt]) >= rollouts


class StepQueue:
    """Independent channels. Groups that are ready are fetched oldest first; one that is not holds up nobody."""

    def __init__(
        self,
        config: StepQueueConfig | None = None,
        training_backend: StepConverter | None = None,
        max_queue_size: int | None = None,
    ) -> None:
        self._config = config or StepQueueConfig()
        self._backend = training_backend
        self._max_groups = max_queue_size
        self._channels: dict[str, _StepChannel] = {}
        self._changed = asyncio.Condition()
        self._validations: deque[Any] = deque()

    async def submit_step(self, step: SubmittedStep, channel: str = "train") -> None:
        await self.submit_steps([step], channel)

    async def submit_steps(self, steps: Sequence[SubmittedStep], channel: str = "train") -> int:
        """Append steps; one with `is_last` completes its trajectory. Returns how many were taken."""
        own = self._channel(channel)
        for step in steps:
            own.groups.setdefault(step.prompt_uid, {}).setdefault(step.trajectory_uid, []).append(step)
            own.produced += 1
            if step.is_last:
                own.complete.add(step.trajectory_uid)
        while channel == "train" and self._max_groups is not None and len(own.groups) > self._max_groups:
            self._remove(own, next(iter(own.groups)))
            own.dropped += 1
        await self._notify()
        return len(steps)

    async def complete_trajectory(self, trajectory_uid: str, reward: float | None = None, channel: str = "train") -> bool:
        """Mark the last step of a trajectory, with its reward. Returns whether the trajectory is known."""
        own = self._channel(channel)
        for trajectories in own.groups.values():
            if steps := trajectories.get(trajectory_uid):
                steps[-1] = replace(steps[-1], is_last=True, reward=steps[-1].reward if reward is None else reward)
                own.complete.add(trajectory_uid)
                await self._notify()
                return True
        return False

    async def fetch_batch(self, batch_size: int, n_rollouts: int | None = None, channel: str = "train") -> Any:
        """Wait for `batch_size` groups that are ready, and return their steps, converted; None once shut down with fewer."""
        own, rollouts = self._channel(channel), n_rollouts or self._config.n_rollouts

        def ready() -> list[str]:
            return [prompt for prompt in own.groups if own.is_ready(prompt, rollouts)][:batch_size]

        async with self._changed:
            await self._changed.wait_for(lambda: own.closed or len(ready()) == batch_size)
            prompts = ready()
            if len(prompts) < batch_size:
                return None
            steps = [step for prompt in prompts for step in self._remove(own, prompt)]
            own.consumed += len(prompts)
            own.fetches += 1
        return self._backend.convert(steps) if self._backend else steps

    async def shutdown(self, channel: str | None = None) -> None:
        """Let waiting fetches end; groups that are ready can still be fetched."""
        for own in self._channels.values() if channel is None else [self._channel(channel)]:
            own.closed = True
        await self._notify()

    async def put_validate(self, result: Any) -> None:
        self._validations.append(result)

    async def get_validate(self) -> Any:
        """Returns the oldest result of a validation; None if there is none."""
        return self._validations.popleft() if self._validations else None

    async def get_statistics(self, channel: str = "train") -> dict[str, Any]:
        own = self._channel(channel)
        ready = sum(own.is_ready(prompt, self._config.n_rollouts) for prompt in own.groups)
        return {
            "total_steps": sum(len(steps) for group in own.groups.values() for steps in group.values()),
            "total_trajectories": sum(map(len, own.groups.values())),
            "complete_trajectories": len(own.complete),
            "total_produced": own.produced,
            "total_consumed": own.consumed,
            "total_dropped": own.dropped,
            "fetch_count": own.fetches,
            "queue_size": len(own.groups),
            "ready_prompt_groups": ready,
            "max_queue_size": self._max_groups,
            "shutdown": own.closed,
        }

    stats = get_statistics

    async def list_steps(self, channel: str = "train", limit: int = 200, offset: int = 0) -> list[dict[str, Any]]:
        found = [step for group in self._channel(channel).groups.values() for steps in group.values() for step in steps]
        return [asdict(step) for step in found[offset : offset + limit]]

    def _channel(self, name: str) -> _StepChannel:
        return self._channels.setdefault(name, _StepChannel())

    def _remove(self, own: _StepChannel, prompt: str) -> list[SubmittedStep]:
        """Take a group out; its steps by trajectory and index."""
        trajectories = own.groups.pop(prompt)
        own.complete -= trajectories.keys()
        return [step for uid in sorted(trajectories) for step in sorted(trajectories[uid], key=lambda step: step.step_index)]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
