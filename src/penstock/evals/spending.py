"""The usage of rollouts: model calls, tokens, cost where prices are known, and time. Pure, but for reading durations back."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.evals.metrics import quantile
from penstock.records import Node, Rollout, Step


class Prices(NamedTuple):
    """Prices of a million tokens, in whatever currency the user wrote them."""

    prompt: float
    completion: float


class Latency(NamedTuple):
    """Quantiles of durations in seconds."""

    p50: float
    p95: float


class RolloutUsage(NamedTuple):
    """The usage of one rollout."""

    rollout_id: str
    call_s: Sequence[float]
    """Duration of each model call."""
    prompt_tokens: int
    completion_tokens: int
    tokens_known: bool
    """False if an endpoint did not report its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The usage of several rollouts together."""

    steps: int
    """Model calls."""
    prompt_tokens: int
    """Prompt tokens of every call: a conversation counts again with each call."""
    completion_tokens: int
    """What it sampled."""
    cost: float | None
    """By `engine.price_in` and `engine.price_out`; None where there are none, or if an endpoint did not report its tokens."""
    call_s: Latency | None
    """Latency of model calls; None if there were none."""
    rollout_s: Latency | None
    """Latency of rollouts, grading included; None if it is not known."""

    def as_json(self) -> dict[str, Any]:
        times = {"call_s": self.call_s and self.call_s._asdict(), "rollout_s": self.rollout_s and self.rollout_s._asdict()}
        return asdict(self) | times


def rollout_usage(rollout: Rollout) -> RolloutUsage:
    return RolloutUsage(
        rollout_id=rollout.ref.id,
        call_s=array("d", [step.seconds for step in rollout.steps]),
        prompt_tokens=sum(_prompts(rollout)),
        completion_tokens=sum(step.sampled for step in rollout.steps),
        tokens_known=all(step.usage is None or step.usage.prompt_tokens > 0 for step in rollout.steps),
    )


def spending(
    rollouts: Sequence[RolloutUsage], *, prices: Prices | None = None, seconds: Mapping[str, float] | None = None
) -> Spending:
    """Returns the sums; `seconds` are the rollouts' durations by id."""
    read, sampled = sum(each.prompt_tokens for each in rollouts), sum(each.completion_tokens for each in rollouts)
    tokens_known = all(each.tokens_known for each in rollouts)
    calls = [call_s for each in rollouts for call_s in each.call_s]
    return Spending(
        steps=len(calls),
        prompt_tokens=read,
        completion_tokens=sampled,
        cost=(read * prices.prompt + sampled * prices.completion) / 1e6 if prices and tokens_known else None,
        call_s=latency(calls),
        rollout_s=latency([seconds[each.rollout_id] for each in rollouts if each.rollout_id in seconds] if seconds else []),
    )


def latency(seconds: Sequence[float]) -> Latency | None:
    return Latency(quantile(seconds, 0.5), quantile(seconds, 0.95)) if seconds else None


def prices_of(config: Mapping[str, Any]) -> Prices | None:
    """Returns the prices of a run's settings; None where one is not set."""
    engine: Mapping[str, Any] = config.get("engine") or {}
    prompt, completion = engine.get("price_in"), engine.get("price_out")
    return None if prompt is None or completion is None else Prices(float(prompt), float(completion))


def rollout_seconds(events: Path) -> dict[str, float]:
    """Returns durations of rollouts by id, from a run's event log; empty if there is none."""
    if not events.exists():
        return {}
    with events.open("rb") as lines:
        ended = (_event(line) for line in lines if b'"rollout.end"' in line)
        return {each["rollout_id"]: each["seconds"] for each in ended if each.get("seconds") is not None}


def _event(line: bytes) -> dict[str, Any]:
    try:
        found: Any = orjson.loads(line)
        return found if found["kind"] == "rollout.end" else {}
    except (ValueError, LookupError, TypeError):  # a kill cut the line short
        return {}


def _prompts(rollout: Rollout) -> Iterable[int]:
    """Yields the tokens of each call's prompt; further choices of one call (`n` > 1) share it."""
    nodes, steps = {node.id: node for node in rollout.nodes}, {step.index: step for step in rollout.steps}
    lengths: dict[int, int] = {}
    for step in rollout.steps:
        if step.usage is not None:
            yield step.usage.prompt_tokens
        elif step.choice == 0:
            yield _path(step.node, nodes, steps, lengths)


def _path(node_id: int, nodes: Mapping[int, Node], steps: Mapping[int, Step], lengths: dict[int, int]) -> int:
    """Returns the tokens from the root to the end of a node; `lengths` caches them by node."""
    way: list[Node] = []
    at: int | None = node_id
    while at is not None and at not in lengths:
        way.append(nodes[at])
        at = None if way[-1].parent is None else steps[way[-1].parent].node
    for node in reversed(way):
        before = 0 if node.parent is None else lengths[steps[node.parent].node] + len(steps[node.parent].completion_ids)
        lengths[node.id] = before + len(node.token_ids)
    return lengths[node_id]
