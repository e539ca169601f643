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
        graph, sizes = TokenGraph(attempt) if with_ids else None, _prompt_sizes(attempt)
        marks: dict[int | None, Mark] = {mark.step: mark for mark in attempt.marks}
        rewards: dict[int | None, float] = {}
        for grade in attempt.grades:
            rewards[grade.step] = rewards.get(grade.step, 0) + grade.reward
        out, last = attempt.curated_out, max((step.index for step in attempt.steps), default=-1)
        for step in attempt.steps:
            yield _step(step, marks.get(step.index) or Mark(rollout_id=attempt.rollout.id), out=out) | {
                "reward": rewards.get(step.index),
                "prompt_uid": prompt_uid(group),
                "channel": group.channel,
                "prompt_length": sizes[step.index],
                "is_last": attempt.end is not None and step.index == last,
                **({} if graph is None else _ids(graph, step)),
            }


def _prompt_sizes(attempt: Attempt) -> dict[int, int]:
    """How many tokens the prompt of each step has."""
    nodes = {node.id: node for node in attempt.nodes}
    sizes: dict[int, int] = {}
    ends: dict[int | None, int] = {None: 0}
    for step in attempt.steps:
        node = nodes[step.node]
        sizes[step.index] = ends[node.parent] + len(node.token_ids)
        ends[step.index] = sizes[step.index] + len(step.completion_ids)
    return sizes


def _ids(graph: TokenGraph, step: Step) -> dict[str, Any]:
    return {"prompt_ids": graph.prompt(step.node), "response_ids": step.completion_ids, "rollout_log_probs": step.logprobs}


def _step(step: Step, mark: Mark, *, out: bool) -> dict[str, Any]:
    """What the step itself says, and its mark; `out` where its whole rollout was taken out of training."""
    return {
        "key": f"{step.rollout_id}:{step.index}",
        "trajectory_uid": step.rollout_id,
        "step_index": step.index,
        "response_length": len(step.completion_ids),
        "policy_version": step.versions[-1] if step.versions else None,
        "finish": step.finish,
        "transcript": step.transcript,
        "text": (step.message.get("content") or "")[:SHOWN],
        "trainable": mark.trainable and not out,
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
