"""What a reader is shown of groups, rollouts and steps, in the words of a flow's API."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from penstock.gateway.graph import TokenGraph
from penstock.pool.base import Change, PoolStats
from penstock.records import Attempt, Group, Mark, Step

SHOWN = 2_000
"""Characters of a reply's text."""
OF_ROLLOUTS = ("ended", "graded", "marked")


def trajectories(group: Group) -> Iterator[dict[str, Any]]:
    """One entry for each rollout of a group."""
    for attempt in group.attempts:
        versions = [version for step in attempt.steps for version in step.versions]
        yield {
            "trajectory_uid": attempt.rollout.id,
            "prompt_uid": prompt_uid(group),
            "group_id": group.id,
            "channel": group.channel,
            "status": attempt.end or "running",
            "complete": attempt.end is not None,
            "reward": reward_of(attempt),
            "steps": len(attempt.steps),
            "tokens": sum(len(step.completion_ids) for step in attempt.steps),
            "policy_version": max(versions, default=None),
            "trainable": not attempt.curated_out,
            "message": attempt.message,
        }


def steps(group: Group, *, with_ids: bool = False) -> Iterator[dict[str, Any]]:
    """One entry for each step of a group's rollouts."""
    for attempt in group.attempts:
        graph, last = TokenGraph(attempt), max((step.index for step in attempt.steps), default=-1)
        for step in attempt.steps:
            prompt = graph.prompt(step.node)
            told = {"prompt_uid": prompt_uid(group), "channel": group.channel, "prompt_length": len(prompt)}
            ids = {"prompt_ids": prompt, "response_ids": step.completion_ids, "rollout_log_probs": step.logprobs}
            is_last = attempt.end is not None and step.index == last
            yield _step(attempt, step) | told | {"is_last": is_last} | (ids if with_ids else {})


def _step(attempt: Attempt, step: Step) -> dict[str, Any]:
    marks: dict[int | None, Mark] = {mark.step: mark for mark in attempt.marks}
    mark = marks.get(step.index) or Mark(rollout_id=attempt.rollout.id)
    rewards = [grade.reward for grade in attempt.grades if grade.step == step.index]
    return {
        "key": f"{attempt.rollout.id}:{step.index}",
        "trajectory_uid": attempt.rollout.id,
        "step_index": step.index,
        "response_length": len(step.completion_ids),
        "reward": sum(rewards) if rewards else None,
        "policy_version": step.versions[-1] if step.versions else None,
        "finish": step.finish,
        "transcript": step.transcript,
        "text": (step.message.get("content") or "")[:SHOWN],
        "trainable": mark.trainable and not attempt.curated_out,
        "quality": mark.quality,
        "note": mark.note,
    }


def event(change: Change) -> dict[str, Any]:
    """One thing that happened."""
    name = "trajectory_uid" if change.kind in OF_ROLLOUTS else "group_id"
    return {"cursor": change.position, "kind": change.kind, "channel": change.channel, name: change.id}


def stats(counts: PoolStats) -> dict[str, Any]:
    """The counts of a channel: under our names, and beside them under a flow's."""
    ready = counts.groups_complete - counts.groups_trained - counts.groups_leased - counts.groups_stale
    ready -= counts.groups_dropped + counts.groups_short
    return asdict(counts) | {
        "total_steps": counts.steps,
        "total_produced": counts.steps,
        "total_consumed": counts.groups_trained,
        "total_dropped": counts.groups_dropped + counts.groups_stale,
        "total_trajectories": counts.rollouts,
        "complete_trajectories": sum(counts.ends.values()),
        "total_prompt_groups": counts.groups,
        "consumed_prompt_groups": counts.groups_trained,
        "pending_prompt_groups": counts.groups - counts.groups_complete,
        "ready_prompt_groups": ready,
        "queue_size": counts.groups - counts.groups_trained - counts.groups_dropped - counts.groups_stale,
    }


def total(counts: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The sums of those counts that add up."""
    summed: dict[str, int] = {}
    for channel in counts:
        for name, value in channel.items():
            if isinstance(value, int) and not name.startswith("last_"):
                summed[name] = summed.get(name, 0) + value
    return summed


def prompt_uid(group: Group) -> str:
    """What a flow calls the group: by its prompt where it said so."""
    return str((group.task.metadata or {}).get("prompt_uid") or group.id)


def reward_of(attempt: Attempt) -> float | None:
    """The reward; of one that runs, the sum of what its steps have so far."""
    if attempt.end is not None or not attempt.grades:
        return attempt.reward
    return sum(grade.reward for grade in attempt.grades if grade.step is not None)
