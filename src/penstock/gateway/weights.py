"""Weights: how many bytes of memory a session's parts take, estimated when they are added. Caches are bounded by them."""

from typing import Any, cast

from penstock.records import Node, Step

SESSION = 5_000
"""A session with an empty graph."""
STEP = 3_000
"""The objects of a step and its entries in the graph's indexes."""
PROMPT_TOKEN = 40
"""A token id: a reference and an integer."""
SAMPLED_TOKEN = 110
"""A token id, two log-probabilities and a version."""


def step_weight(step: Step, node: Node | None) -> int:
    """Returns the bytes that a step and the node stored with it take in memory."""
    weight = STEP + SAMPLED_TOKEN * len(step.completion_ids) + json_weight(step.message)
    if node is not None:
        weight += PROMPT_TOKEN * len(node.token_ids) + json_weight(node.messages) + json_weight(node.tools)
    return weight


def json_weight(value: Any) -> int:
    weight, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            weight += 60 + len(item)
        elif isinstance(item, dict):
            weight += 250
            waiting += cast("dict[str, Any]", item).values()
        elif isinstance(item, list | tuple):
            weight += 60 + 8 * len(cast("list[Any]", item))
            waiting += cast("list[Any]", item)
        else:
            weight += 30
    return weight
