"""Recorded steps to transcripts: each agent's conversation at the end of a rollout, and the samples that a grader sees."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.records import Attempt, Message, Step
from penstock.sdk.samples import RolloutSample, fast_copy


class Transcript(NamedTuple):
    """One agent's conversation, as the gateway recorded it."""

    messages: list[Message]
    """Up to and with its last reply."""
    tools: list[dict[str, Any]]
    """Schemas of the tools in its last call."""
    steps: tuple[int, ...]
    """Indices of its calls."""


def transcripts(attempt: Attempt) -> dict[str, Transcript]:
    """Returns the transcripts by name, in the order of their first calls.

    A transcript ends with its last complete call; a call that broke off counts only if there is no complete one.
    """
    last: dict[str, Step] = {}
    indices: dict[str, list[int]] = {}
    for step in sorted(attempt.steps, key=lambda step: step.index):
        complete = step.finish in ("stop", "length")
        indices.setdefault(step.transcript, []).append(step.index)
        if complete or step.transcript not in last:
            last[step.transcript] = step
    return {name: _transcript(attempt, step, indices[name]) for name, step in last.items()}


def make_samples(recorded: Mapping[str, Transcript], reported: Mapping[str, list[Message]]) -> dict[str, RolloutSample]:
    """Returns the grader's samples: each transcript once, with the messages that its agent reported, else the recorded ones."""
    samples: dict[str, RolloutSample] = {}
    for name in {**recorded, **reported}:
        known = recorded.get(name, Transcript([], [], ()))
        messages = fast_copy(reported.get(name, known.messages))
        transcript, tools = fast_copy(known.messages), fast_copy(known.tools)
        samples[name] = RolloutSample(id=name, messages=messages, transcript=transcript, tools=tools, steps=known.steps)
    return samples


def _transcript(attempt: Attempt, step: Step, indices: list[int]) -> Transcript:
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    node, messages = nodes[step.node], [*nodes[step.node].messages, step.message]
    while node.parent is not None:  # from the last call back to the first
        parent = steps[node.parent]
        node = nodes[parent.node]
        messages[:0] = [*node.messages, parent.message]
    return Transcript(messages, list(node.tools), tuple(indices))
