"""The tokens of a path, end to end: a prompt is made of the parts that the graph keeps, and copies none of them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, overload

from penstock.chat.templates import Tool, flatten, has_reasoning, message_digest, tools_digest
from penstock.codec import ids_hash
from penstock.records import Attempt, Message, Node, Step

if TYPE_CHECKING:
    from hashlib import blake2b


class TokenPath(Sequence[int]):
    """What a tuple of all these tokens would be, made in a time that does not depend on how many they are.

    >>> prompt = TokenPath((1, 2), (3,))
    >>> prompt.then((4, 5)) == (1, 2, 3, 4, 5), prompt[-2:], len(prompt)
    (True, (2, 3), 3)
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, *parts: tuple[int, ...]) -> None:
        self._parts = parts
        ends, end = [0], 0
        for part in parts:
            ends.append(end := end + len(part))
        self._ends = tuple(ends)
        """Where each part ends, after where the first one begins."""

    def then(self, added: tuple[int, ...]) -> "TokenPath":
        longer = TokenPath()
        longer._parts, longer._ends = (*self._parts, added), (*self._ends, self._ends[-1] + len(added))
        return longer

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice) and index.step not in (None, 1):
            return tuple(self)[index]
        place = range(len(self))[index]
        first = place if isinstance(place, int) else place.start
        which = bisect_right(self._ends, first) - 1
        before = self._ends[which]
        if isinstance(place, int):
            return self._parts[which][place - before]
        return tuple(islice(chain.from_iterable(self._parts[which:]), first - before, max(first, place.stop) - before))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenPath | tuple | list):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TokenPath({tuple(self)})"


HISTORY_EDITED = "history_edited"
"""The caller changed messages before a reply that it sent back."""
REPLY_EDITED = "reply_edited"
"""The caller went on from a known prompt with a reply that was not sampled."""
TOOLS_CHANGED = "tools_changed"
"""The caller went on with other tools, which stand at the head of the prompt."""
REWRITTEN = "template_rewrites_history"
"""The chat template renders earlier turns differently once others follow."""


class Place(NamedTuple):
    """Where a call's messages leave the known paths."""

    step: int | None
    """The last reply on the path; None opens a root."""
    known: int
    """How many of the messages lie on the path."""
    chain: str
    """Digest of all messages."""
    reason: str | None
    """What broke, if a root must be opened although replies were sent back, or a path goes on with other replies; or None."""


class RawPlace(NamedTuple):
    """Where an untemplated prompt leaves the known paths."""

    step: int | None
    """The last reply on the path; None opens a root."""
    known: int
    """How much of the prompt lies on the path, in characters or tokens."""


class TokenGraph:
    """Nodes and steps of one rollout, and the way back from a call's messages to them."""

    def __init__(self, attempt: Attempt) -> None:
        self.nodes: dict[int, Node] = {}
        self.steps: dict[int, Step] = {}
        self.tokens = 0
        """Sampled so far, in all steps."""
        self.next_node = 0
        """The id that the next node gets."""
        self.next_step = 0
        """The index that the next step gets."""
        self._step_after: dict[str, int] = {}
        """Chain digest of a path that ends with a reply, to the step that is that reply."""
        self._nodes_at: dict[str, list[int]] = {}
        """Chain digest of a path that ends with the caller's messages, to its nodes."""
        self._steps_of: dict[str, list[int]] = {}
        """Name of an answer, to its steps."""
        self._answers_to: dict[str, list[str]] = {}
        """Digest of a request, to the names of its answers."""
        self._numbers: dict[str, int] = {}
        """And to the highest number that one of them has."""
        self._raw: dict[int, str] = {}
        """Step on a path that no template touched, to the text that it and its node add."""
        self._raw_after: dict[int | None, list[int]] = {}
        """Such a step, None for none, to those that go on from it."""
        self._hashes: dict[int, blake2b] = {}
        """Step, to the running hash of all tokens up to its end."""
        self._thoughtful: set[int] = set()
        """Steps with tokens of reasoning on their path, their own included."""
        self._last_prompt = (-1, TokenPath())
        self._replies: set[str] = set()
        """Digests of all replies, wherever they stand."""
        self._tools: set[str] = set()
        """Digests of the tools of all roots."""
        self.grow(attempt)

    def grow(self, attempt: Attempt) -> None:
        """Take in what is stored: all of it, or what others added since, from `next_step` and `next_node` on."""
        unused = {node.id: node for node in attempt.nodes if node.id not in self.nodes}
        for step in sorted(attempt.steps, key=lambda step: step.index):
            self.add(step, unused.pop(step.node, None))

    def add(self, step: Step, node: Node | None, context: "blake2b | None" = None) -> None:
        """Take in a stored step, and the node that was stored with it; one that is here is left as it is.

        `context` is the running hash up to its end, where that is known.
        """
        if step.index in self.steps:
            return
        if node is not None:
            self.nodes[node.id] = node
            self.next_node = max(self.next_node, node.id + 1)
            self._nodes_at.setdefault(node.chain, []).append(node.id)
            if node.parent is None:
                self._tools.add(tools_digest(node.tools))
        self.steps[step.index] = step
        self.next_step = max(self.next_step, step.index + 1)
        self.tokens += step.sampled
        self._hashes[step.index] = context or self.context_hash(self.nodes[step.node], step.completion_ids)
        self._replies.add(message_digest(step.message))
        self._file(step)
        if self._thinks(step):
            self._thoughtful.add(step.index)
        before = self._step_after.get(step.chain)
        if before is None or whole(step) or not whole(self.steps[before]):
            self._step_after[step.chain] = step.index  # of two equal replies, the last whole one is what the agent saw

    def match(self, messages: Sequence[Message], chains: Sequence[str]) -> Place:
        """The longest known path that these messages continue; `chains` are their digests, from that of the tools on."""
        for known in range(len(messages), 0, -1):
            if (step := self._step_after.get(chains[known])) is not None:
                return Place(step, known, chains[-1], self._why_branch(messages[known:]))
        return Place(None, 0, chains[-1], self._why_root(messages, chains))

    def match_raw(self, raw: str | tuple[int, ...]) -> RawPlace:
        """The longest path that an untemplated prompt continues, by its text or by its tokens."""
        paths = [RawPlace(None, 0)]
        for before, known in paths:  # which grow meanwhile
            for step in self._raw_after.get(before, ()):
                added = self._raw[step] if isinstance(raw, str) else self._added(step)
                if raw[known : known + len(added)] == added:
                    paths.append(RawPlace(step, known + len(added)))
        said = [place for place in paths if place.known]
        return max(said, key=lambda place: (place.known, place.step or 0), default=paths[0])

    def find(self, parent: int | None, messages_chain: str, token_ids: Sequence[int]) -> Node | None:
        """The node that adds exactly these tokens there, if one does: the same call made again shares it."""
        for node_id in self._nodes_at.get(messages_chain, ()):
            node = self.nodes[node_id]
            if node.parent == parent and node.token_ids == tuple(token_ids):
                return node
        return None

    def last_number(self, request: str) -> int:
        """The highest number of an answer to a request, whole or not; -1 where there is none."""
        return self._numbers.get(request, -1)

    def answer(self, request: str, choices: int) -> list[Step] | None:
        """The last whole answer to a request, all its choices; None where there is none."""
        for name in reversed(self._answers_to.get(request, ())):
            steps = sorted((self.steps[index] for index in self._steps_of[name]), key=lambda step: step.choice)
            if len(steps) == choices and all(map(whole, steps)):
                return steps
        return None

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        """All messages on the path of an answer's first choice, that reply included; None where there is no such answer."""
        steps = self._steps_of.get(answer)
        parts: list[tuple[Message, ...]] = []
        at = steps[0] if steps else None
        while at is not None:
            step = self.steps[at]
            node = self.nodes[step.node]
            parts += [(step.message,), node.messages]
            at = node.parent
        return tuple(chain.from_iterable(reversed(parts))) or None

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        """The tools on that path, which stand at its root; None where there is no such answer."""
        steps = self._steps_of.get(answer)
        if not steps:
            return None
        node = self.nodes[self.steps[steps[0]].node]
        while node.parent is not None:
            node = self.nodes[self.steps[node.parent].node]
        return node.tools

    def thoughtful(self, step: int) -> bool:
        """Whether tokens of reasoning stand on the path up to the end of `step`'s reply: a template may drop them later."""
        return step in self._thoughtful

    def context(self, step: int) -> TokenPath:
        """All tokens up to the end of `step`'s reply."""
        reply = self.steps[step]
        node, prompt = self._last_prompt
        return (prompt if node == reply.node else self._path(reply.node)).then(reply.completion_ids)

    def keep_prompt(self, node: int, ids: TokenPath) -> None:
        """Remember the prompt that ends with `node`: the next call most likely goes on from a reply to it."""
        self._last_prompt = (node, ids)

    def context_hash(self, node: Node, completion_ids: Sequence[int]) -> "blake2b":
        """The running hash of all tokens up to the end of a reply to `node`; only what the two add is hashed."""
        before = None if node.parent is None else self._hashes[node.parent]
        return ids_hash(ids_hash(before, node.token_ids), completion_ids)

    def prompt(self, node: int) -> tuple[int, ...]:
        """The prompt that ends with `node`, as the engine saw it."""
        return tuple(self._path(node))

    def _path(self, node: int) -> TokenPath:
        parts: list[tuple[int, ...]] = []
        at: int | None = node
        while at is not None:
            parts.append(self.nodes[at].token_ids)
            parent = self.nodes[at].parent
            at = None if parent is None else self.steps[parent].node
            if parent is not None:
                parts.append(self.steps[parent].completion_ids)
        return TokenPath(*reversed(parts))

    def _added(self, step: int) -> tuple[int, ...]:
        """The tokens of a step and its node."""
        reply = self.steps[step]
        return self.nodes[reply.node].token_ids + reply.completion_ids

    def _file(self, step: Step) -> None:
        """Note which answer the step is part of, and the text that it adds if no template touched it."""
        steps = self._steps_of.setdefault(step.answer, [])
        if not steps:
            request, _, number = step.answer.rpartition("-")
            self._answers_to.setdefault(request, []).append(step.answer)
            self._numbers[request] = max(self.last_number(request), int(number) if number.isdecimal() else -1)
        steps.append(step.index)
        node = self.nodes[step.node]
        if node.chain.startswith(RAW):
            self._raw_after.setdefault(node.parent, []).append(step.index)
            self._raw[step.index] = flatten(node.messages[0]["content"]) + flatten(step.message["content"])

    def _thinks(self, step: Step) -> bool:
        node = self.nodes[step.node]
        unasked = takewhile(lambda message: message["role"] != "user", reversed(node.messages))
        replies = [step.message, *(message for message in unasked if message["role"] == "assistant")]
        return node.parent in self._thoughtful or any(map(has_reasoning, replies))

    def _why_branch(self, new: Sequence[Message]) -> str | None:
        """What broke, if replies are among the messages that a path goes on with: they are not the ones sampled there."""
        replies = [message_digest(message) for message in new if message["role"] == "assistant"]
        if not replies:
            return None
        return REPLY_EDITED if self._replies.isdisjoint(replies) else HISTORY_EDITED

    def _why_root(self, messages: Sequence[Message], chains: Sequence[str]) -> str | None:
        """What broke, if the messages send back a reply of ours or replace one; a conversation of its own breaks nothing."""
        if any(message["role"] == "assistant" and message_digest(message) in self._replies for message in messages):
            return HISTORY_EDITED if chains[0] in self._tools else TOOLS_CHANGED
        return REPLY_EDITED if any(each in self._nodes_at for each in chains[1:-1]) else None


RAW = "raw:"
"""What the chain digest of a prompt that no template touched begins with."""


def whole(step: Step) -> bool:
    """Whether the reply came to its own end, so that the agent got all of it."""
    return step.finish in ("stop", "length")


def prompts(attempt: Attempt) -> dict[int, tuple[int, ...]]:
    """The prompt of every step, read off the graph: what an audit of exactness compares with."""
    graph = TokenGraph(attempt)
    return {step.index: graph.prompt(step.node) for step in attempt.steps}
