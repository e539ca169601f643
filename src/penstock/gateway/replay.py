"""The replay of a recorded rollout: a branch's calls get the stored replies while its requests are those of the record.

A request is compared as canonical JSON of its choices, policy, tools and messages, then by the tokens of its prompt. Calls are
found by what they say, not by their order, as those of sub-agents may come in another one.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from penstock.chat.templates import Tool
from penstock.codec import pack_ints
from penstock.errors import RequestError
from penstock.gateway.dialects.base import DialectTokenizer
from penstock.gateway.graph import TokenGraph, is_complete
from penstock.records import BranchPoint, Message, Rollout, Step

BEFORE, AFTER = 30, 50
"""Bytes that an error shows before and after the first one that differs."""


class CallRequest(NamedTuple):
    """What a call asks, as far as it is recorded."""

    text: bytes
    """Canonical JSON."""
    prompt: tuple[int, ...]
    """The tokens that its reply is sampled after; none at an endpoint that gives text."""

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[Tool], prompt: Sequence[int], *, choices: int, policy: str
    ) -> "CallRequest":
        fields = {"choices": choices, "policy": policy, "tools": tools, "messages": messages}
        return cls(_canonical(fields), tuple(prompt))


class RecordedCall(NamedTuple):
    """One call of the recorded rollout."""

    name: str
    """The name of its answer (`Step.answer`)."""
    request: CallRequest
    steps: list[Step]
    """By choice."""


class BranchReplay:
    """Answers the calls of one branch; `graph` is what the branch has recorded so far, in this process or an earlier one."""

    def __init__(self, recorded: Rollout, point: BranchPoint, graph: TokenGraph, tokenizer: DialectTokenizer) -> None:
        self.difference = ""
        """How the branch left the record; empty while it follows it."""
        self._rollout_id, self._step = point.rollout_id, point.step
        self._tokenizer = tokenizer
        calls = _recorded_calls(recorded, point.step)
        self._last = calls[-1] if calls else None
        """The call to sample again; its request is compared, its reply is not given."""
        self._calls = calls[:-1]
        self._by_text = defaultdict[bytes, list[RecordedCall]](list)
        for call in self._calls:
            self._by_text[_digest(call.request)].append(call)
        self._used = {call.name for call in self._calls if graph.answer(call.name)}
        self._reached = any(not step.replayed for step in graph.steps.values())

    def find(self, asked: CallRequest, *, is_retry: bool) -> RecordedCall | None:
        """The recorded call that a request repeats; None if its reply is to be sampled. RequestError 409 if it left the record."""
        if self.difference:
            raise self._refusal()
        same = self._by_text.get(_digest(asked), ())
        for call in same:
            if call.name not in self._used:
                self._used.add(call.name)
                return call
        if is_retry and same:
            return same[-1]
        if self._last is not None and asked == self._last.request:
            self._reached = True
        if self._reached:
            return None
        self.difference = self._describe(asked)
        raise self._refusal()

    def give_back(self, call: RecordedCall) -> None:
        """The call's reply could not be given: a retry gets it."""
        self._used.discard(call.name)

    @property
    def unfinished(self) -> str:
        """What the branch has not repeated of the record; empty if it has left it where it should."""
        if self._last is None:
            return f"{self._rollout_id} has no step {self._step}"
        left = [call for call in self._calls if call.name not in self._used]
        if self._reached and not left:
            return ""
        first = (left or [self._last])[0].steps[0].index
        return f"its program ended without the call of step {first} of {self._rollout_id}"

    def _refusal(self) -> RequestError:
        return RequestError(self.difference, status=409, code="branch_diverged")

    def _describe(self, asked: CallRequest) -> str:
        """Compares a request with the recorded one that it has most in common with, of those that are still to come."""
        left = [call for call in self._calls if call.name not in self._used]
        left += [self._last] if self._last else []
        if not left:
            return f"{self._rollout_id} has no step {self._step} to branch from"
        nearest = max(left, key=lambda call: (_common(call.request.text, asked.text), -call.steps[0].index))
        step = nearest.steps[0].index
        where = f"the request of step {step} differs from that of {self._rollout_id}"
        recorded, now = nearest.request.text, asked.text
        if recorded == now:  # the same messages, rendered in another way: another template or tokenizer, or a date in the prompt
            where = f"step {step} has the messages of that of {self._rollout_id}, but another prompt, which differs"
            recorded, now = (self._tokenizer.decode(each.prompt).encode("utf-8", "replace") for each in (nearest.request, asked))
        at = _common(recorded, now)
        return f"{where} at byte {at}: recorded {_window(recorded, at)}, now {_window(now, at)}"


def _recorded_calls(recorded: Rollout, step: int) -> list[RecordedCall]:
    """The calls up to that of `step`, in order; the last is that one. None if there is no such step.

    A reply that broke off is left out, unless it is the step itself: its caller asked again.
    """
    graph, found = TokenGraph(recorded), dict[str, list[Step]]()
    if step not in graph.steps:
        return []
    for each in sorted(graph.steps.values(), key=lambda each: each.index):
        if is_complete(each) or each.index == step:
            found.setdefault(each.answer or f"step-{each.index}", []).append(each)
    calls: list[RecordedCall] = []
    for name, steps in found.items():
        node, chosen = graph.nodes[steps[0].node], sorted(steps, key=lambda each: each.choice)
        messages = (*graph.conversation(node.parent), *node.messages)
        request = CallRequest.of(
            messages, graph.path_tools(node), graph.prompt(node.id), choices=len(steps), policy=steps[0].policy
        )
        calls.append(RecordedCall(name, request, chosen))
        if any(each.index == step for each in steps):
            return calls
    return calls


def _canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _digest(request: CallRequest) -> bytes:
    return blake2b(request.text + b"\0" + pack_ints(request.prompt), digest_size=16).digest()


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _window(text: bytes, at: int) -> str:
    start, end = max(0, at - BEFORE), at + AFTER
    shown = text[start:end].decode("utf-8", "replace")
    return repr(f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}")
