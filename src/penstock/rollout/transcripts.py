"""Recorded steps to transcripts: what each agent of a rollout had said and been told by the end, and the samples a grader sees."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.records import Attempt, Message, Step
from penstock.sdk.samples import RolloutSample, copied


class Transcript(NamedTuple):
    """One agent's conversation, as the gateway recorded it."""

    messages: list[Message]
    """All up to its last reply."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that its last call offered."""
    steps: tuple[int, ...]
    """Indices of its calls."""


def transcripts(attempt: Attempt) -> dict[str, Transcript]:
    """By name, in the order in which the transcripts began. A call that broke off counts only where its transcript has no other."""
    last: dict[str, Step] = {}
    indices: dict[str, list[int]] = {}
    for step in sorted(attempt.steps, key=lambda step: step.index):
        whole = step.finish in ("stop", "length")
        indices.setdefault(step.transcript, []).append(step.index)
        if whole or step.transcript not in last:
            last[step.transcript] = step
    return {name: _transcript(attempt, step, indices[name]) for name, step in last.items()}


def make_samples(recorded: Mapping[str, Transcript], told: Mapping[str, list[Message]]) -> dict[str, RolloutSample]:
    """What a grader sees: each transcript once, with the messages that the agent told of it, else those recorded."""
    samples: dict[str, RolloutSample] = {}
    for name in {**recorded, **told}:
        seen = recorded.get(name, Transcript([], [], ()))
        own = copied(told.get(name, seen.messages))
        transcript, tools = copied(seen.messages), copied(seen.tools)
        samples[name] = RolloutSample(id=name, messages=own, transcript=transcript, tools=tools, steps=seen.steps)
    return samples


def _transcript(attempt: Attempt, step: Step, indices: list[int]) -> Transcript:
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    messages: list[Message] = []
    node, at = nodes[step.node], step
    messages[:0] = [*node.messages, at.message]
    while node.parent is not None:
        at = steps[node.parent]
        node = nodes[at.node]
        messages[:0] = [*node.messages, at.message]
    return Transcript(messages, list(node.tools), tuple(indices))
