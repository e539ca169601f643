"""Recorded steps to transcripts: each agent's conversation at the end of a rollout, and the samples that a grader sees."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.records import Message, Rollout, Step
from penstock.rollout.reported import sampled_messages, was_sampled
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import RolloutSample, fast_copy


class Transcript(NamedTuple):
    """One agent's conversation, as the gateway recorded it."""

    messages: list[Message]
    """Up to and with its last reply."""
    tools: list[dict[str, Any]]
    """Schemas of the tools in its last call."""
    steps: tuple[int, ...]
    """Indices of its calls."""
    replies: list[Message] | None = None
    """What the policy said, call by call, on every branch; None if that is not known."""


def transcripts(attempt: Rollout) -> dict[str, Transcript]:
    """Returns the transcripts by name, in the order of their first calls.

    A transcript ends with its last complete call; a call that broke off counts only if there is no complete one.
    """
    last: dict[str, Step] = {}
    indices: dict[str, list[int]] = {}
    replies: dict[str, list[Message]] = {}
    for step in sorted(attempt.steps, key=lambda step: step.index):
        complete = step.finish in ("stop", "length")
        indices.setdefault(step.transcript, []).append(step.index)
        replies.setdefault(step.transcript, []).append(step.message)
        if complete or step.transcript not in last:
            last[step.transcript] = step
    return {name: _transcript(attempt, step, indices[name], replies[name]) for name, step in last.items()}


def make_samples(
    recorded: Mapping[str, Transcript], reported: Mapping[str, list[Message]], returned: list[Message] | None = None
) -> dict[str, RolloutSample]:
    """Returns the grader's samples: each transcript once, as recorded.

    A conversation that an agent's framework reported takes its place, in the framework's form, if all that it says for the policy
    was sampled. What a workflow `returned` never does. Both are `reported_messages`.
    """
    claims = {**reported, **({MAIN: returned} if returned and not reported else {})}
    samples: dict[str, RolloutSample] = {}
    for name in {**recorded, **claims}:
        known = recorded.get(name, Transcript([], [], ()))
        replies = known.messages if known.replies is None else known.replies
        proven = name in reported and was_sampled(reported[name], known.messages, replies)
        samples[name] = RolloutSample(
            id=name,
            messages=fast_copy(reported[name] if proven else known.messages),
            transcript=fast_copy(known.messages),
            replies=fast_copy(sampled_messages(known.messages, replies)),
            reported_messages=fast_copy(claims.get(name, [])),
            tools=fast_copy(known.tools),
            steps=known.steps,
        )
    return samples


def unrecorded_samples(claims: Mapping[str, list[Message]]) -> dict[str, RolloutSample]:
    """Returns samples of what agents reported, for a grader whose controller does not say what was recorded."""
    return {
        name: RolloutSample(id=name, messages=fast_copy(messages), reported_messages=fast_copy(messages))
        for name, messages in claims.items()
    }


def misreported(samples: Mapping[str, RolloutSample], reported: Iterable[str]) -> list[str]:
    """Returns the transcripts whose agents reported another conversation than was sampled."""
    return [name for name in reported if samples[name].messages != samples[name].reported_messages]


def _transcript(attempt: Rollout, step: Step, indices: list[int], replies: list[Message]) -> Transcript:
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    node, messages = nodes[step.node], [*nodes[step.node].messages, step.message]
    while node.parent is not None:  # from the last call back to the first
        parent = steps[node.parent]
        node = nodes[parent.node]
        messages[:0] = [*node.messages, parent.message]
    return Transcript(messages, list(node.tools), tuple(indices), replies)
