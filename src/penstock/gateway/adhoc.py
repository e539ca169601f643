"""Rollouts that a runner elsewhere makes by itself: each in a group of its own, with how it is sampled kept in its task."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.pool.base import Pool
from penstock.records import Rollout, Sampling, Task, make_rollout

CHANNEL = "adhoc"
OURS = "penstock."
"""What the names of our own entries in a task's metadata begin with."""
_SAMPLING = f"{OURS}sampling"


def make_task(task_id: str, sampling: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Task:
    """A task that nobody wrote a prompt for; `sampling` are the fields of `Sampling` that its rollouts change."""
    kept = dict(metadata or {}) | ({_SAMPLING: dict(sampling)} if sampling else {})
    return Task(id=task_id, prompt=(), metadata=kept or None)


def sampling_of(task: Task, default: Sampling) -> Sampling:
    """How calls of the task's rollouts are sampled where they do not say otherwise, whichever process serves them."""
    return replace(default, **changed_sampling(task))


def changed_sampling(task: Task) -> dict[str, Any]:
    """The fields of `Sampling` that the task's rollouts change."""
    return (task.metadata or {}).get(_SAMPLING, {})


async def open_adhoc(
    pool: Pool,
    *,
    rollout_id: str = "",
    group_id: str = "",
    task_id: str = CHANNEL,
    channel: str = CHANNEL,
    sampling: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """Make a rollout, unless one of that id is there; PoolError where the id belongs to another group."""
    group_id = group_id or rollout_id or f"{channel}-{secrets.token_hex(4)}"
    rollout = make_rollout(group_id, task_id, 0, channel=channel)
    rollout = replace(rollout, id=rollout_id or rollout.id)
    await pool.open_group(make_task(task_id, sampling, metadata), [rollout], seq=None)
    return rollout
