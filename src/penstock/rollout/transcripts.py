"""Recorded steps to transcripts: what each agent of a rollout had said and been told by the end."""

from penstock.records import Attempt, Message, Step


def transcripts(attempt: Attempt) -> dict[str, list[Message]]:
    """The messages of each transcript up to its last reply, in the order in which the transcripts began.

    A call that broke off counts only where its transcript has no other.
    """
    last: dict[str, Step] = {}
    for step in sorted(attempt.steps, key=lambda step: step.index):
        whole = step.finish in ("stop", "length")
        if whole or step.transcript not in last:
            last[step.transcript] = step
    return {name: path_messages(attempt, step) for name, step in last.items()}


def path_messages(attempt: Attempt, step: Step) -> list[Message]:
    """All messages on the path of `step`, its own reply last."""
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    messages: list[Message] = []
    at: Step | None = step
    while at is not None:
        node = nodes[at.node]
        messages[:0] = [*node.messages, at.message]
        at = None if node.parent is None else steps[node.parent]
    return messages
