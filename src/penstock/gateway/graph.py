"""The token graph of one rollout: which tokens each message and reply adds, and which path a call continues.

A `Node` holds the tokens that a call's messages add after a reply (its parent step), a `Step` the tokens that were sampled after a
node. A root node has no parent.
"""

from collections.abc import Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from penstock.chat.templates import Tool, chain_digest, flatten, has_reasoning, message_digest
from penstock.codec import extend_ids_hash
from penstock.engines.base import TokenPath
from penstock.records import Message, Node, PlacedPicture, Rollout, Step

if TYPE_CHECKING:
    from hashlib import blake2b


HISTORY_EDITED = "history_edited"
"""The caller changed messages before a reply that it sent back."""
REPLY_EDITED = "reply_edited"
"""The caller continued a known prompt with a reply that was not sampled here."""
TOOLS_CHANGED = "tools_changed"
"""The caller continued with other tools; templates put tools at the head of the prompt."""
TEMPLATE_REWRITES = "template_rewrites_history"
"""The chat template renders earlier turns differently once others follow."""
RAW_CHAIN = "raw:"
"""Prefix of the chain digest of a prompt without a chat template."""


class PathMatch(NamedTuple):
    """The longest known path that a call's messages continue."""

    step: int | None
    """The last reply on the path; None opens a root."""
    known: int
    """How many of the messages lie on the path."""
    chain: str
    """Chain digest of all messages."""
    reason: str | None
    """Why earlier sampled tokens are not continued although the call sends replies back; None if nothing broke."""


class RawPathMatch(NamedTuple):
    """The longest known path that a prompt without a chat template continues."""

    step: int | None
    """The last reply on the path; None opens a root."""
    known: int
    """Length of the part of the prompt that lies on the path, in characters or tokens."""


class TokenGraph:
    """Nodes and steps of one rollout, with indexes to find them by messages, tokens, request and answer."""

    def __init__(self, rollout: Rollout) -> None:
        self.nodes: dict[int, Node] = {}
        self.steps: dict[int, Step] = {}
        self.tokens = 0
        """Sampled tokens of all steps."""
        self.next_node = 0
        self.next_step = 0
        self._step_after: dict[tuple[str, str], int] = {}
        """Policy and chain digest of a path that ends with a reply, to that reply's step. Policies never share a path."""
        self._nodes_at: dict[tuple[str, str], list[int]] = {}
        """Policy and chain digest of a path that ends with a call's messages, to its nodes."""
        self._steps_of: dict[str, list[int]] = {}
        """Answer name, to its steps."""
        self._answers_to: dict[str, list[str]] = {}
        """Request digest, to the names of its answers."""
        self._numbers: dict[str, int] = {}
        """Request digest, to the highest number of its answers."""
        self._raw: dict[int, str] = {}
        """Step of a prompt without a template, to the text that it and its node add."""
        self._raw_after: dict[tuple[str, int | None], list[int]] = {}
        """Policy and such a step (None: a root), to the steps that continue it."""
        self._hashes: dict[int, blake2b] = {}
        """Step, to the running hash of all tokens up to its end."""
        self._steps_with_reasoning: set[int] = set()
        """Steps with reasoning tokens on their path, their own included."""
        self._pictures: dict[int, tuple[PlacedPicture, ...]] = {}
        """Step, to the pictures on its path; lacks steps without any."""
        self._last_prompt = (-1, TokenPath())
        self._replies: set[tuple[str, str]] = set()
        """Policies and digests of all replies, on whatever path."""
        self._said: dict[int, str] = {}
        """Step, to the digest of all messages up to its end, whatever the tools; made when it is first asked for."""
        self._known_said: set[tuple[str, str]] = set()
        """Policies and these digests."""
        self._weight = 0
        self._unweighed: list[tuple[Step, Node | None]] = []
        """Steps that `_weight` lacks, each with the node stored with it."""
        self.add_stored(rollout)

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes. Few are asked for it, so that each part is weighed when one is."""
        self._weight += sum(step_weight(*each) for each in self._unweighed)
        self._unweighed.clear()
        return self._weight

    def add_stored(self, rollout: Rollout) -> None:
        """Add what the pool holds: all of it, or what was added from `next_step` and `next_node` on."""
        unused = {node.id: node for node in rollout.nodes if node.id not in self.nodes}
        for step in sorted(rollout.steps, key=lambda step: step.index):
            self.add(step, unused.pop(step.node, None))

    def add(self, step: Step, node: Node | None, context: "blake2b | None" = None) -> None:
        """Add a stored step and the node stored with it; does nothing for a known step.

        `context` is the running hash up to the step's end, if the caller has it.
        """
        if step.index in self.steps:
            return
        if node is not None:
            self.nodes[node.id] = node
            self.next_node = max(self.next_node, node.id + 1)
            self._nodes_at.setdefault((step.policy, node.messages_digest), []).append(node.id)
        self.steps[step.index] = step
        self.next_step = max(self.next_step, step.index + 1)
        self.tokens += step.sampled
        self._unweighed.append((step, node))
        self._hashes[step.index] = context or self.context_hash(self.nodes[step.node], step.completion_ids)
        self._replies.add((step.policy, message_digest(step.message)))
        self._index_answer(step)
        if self._reasons(step):
            self._steps_with_reasoning.add(step.index)
        if pictures := self._placed_pictures(self.nodes[step.node]):
            self._pictures[step.index] = pictures
        end = (step.policy, step.messages_digest)
        before = self._step_after.get(end)
        if before is None or is_complete(step) or not is_complete(self.steps[before]):
            self._step_after[end] = step.index  # of equal replies, the last complete one is what the agent saw

    def match(self, messages: Sequence[Message], chains: Sequence[str], policy: str = "") -> PathMatch:
        """The longest path of `policy` that these messages continue. `chains` are their digests, the tools' digest first."""
        for known in range(len(messages), 0, -1):
            if (step := self._step_after.get((policy, chains[known]))) is not None:
                return PathMatch(step, known, chains[-1], self._why_branch(messages, known, policy))
        return PathMatch(None, 0, chains[-1], self._why_root(messages, chains, policy))

    def match_raw(self, raw: str | tuple[int, ...], policy: str = "") -> RawPathMatch:
        """The longest path of `policy` that a prompt without a template continues, by text or by tokens."""
        paths = [RawPathMatch(None, 0)]
        for before, known in paths:  # grows in the loop: a breadth-first search
            for step in self._raw_after.get((policy, before), ()):
                added = self._raw[step] if isinstance(raw, str) else self._added(step)
                if raw[known : known + len(added)] == added:
                    paths.append(RawPathMatch(step, known + len(added)))
        continued = [path for path in paths if path.known]
        return max(continued, key=lambda path: (path.known, path.step or 0), default=paths[0])

    def find(self, parent: int | None, messages_chain: str, token_ids: Sequence[int], policy: str = "") -> Node | None:
        """The node that adds exactly these tokens after `parent`, or None. The same call made again shares the node."""
        for node_id in self._nodes_at.get((policy, messages_chain), ()):
            node = self.nodes[node_id]
            if node.parent == parent and node.token_ids == tuple(token_ids):
                return node
        return None

    def last_number(self, request: str) -> int:
        """The highest number of an answer to a request, complete or not; -1 if there is none."""
        return self._numbers.get(request, -1)

    def find_answer(self, request: str, choices: int, *, first: int = 0) -> list[Step] | None:
        """The steps of the last complete answer to a request from number `first` on, by choice; None if there is none."""
        for name in reversed(self._answers_to.get(request, ())):
            if answer_number(name) < first:
                continue
            steps = sorted((self.steps[index] for index in self._steps_of[name]), key=lambda step: step.choice)
            if len(steps) == choices and all(map(is_complete, steps)):
                return steps
        return None

    def answer(self, name: str) -> list[Step]:
        """The steps of an answer; empty if it is unknown."""
        return [self.steps[index] for index in self._steps_of.get(name, ())]

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        """All messages on the path of an answer's first choice, its reply included; None for an unknown answer."""
        steps = self._steps_of.get(answer)
        return self.conversation(steps[0]) if steps else None

    def conversation(self, step: int | None) -> tuple[Message, ...]:
        """All messages on the path up to a step, its reply included; none for None."""
        parts: list[tuple[Message, ...]] = []
        while step is not None:
            node = self.nodes[self.steps[step].node]
            parts += [(self.steps[step].message,), node.messages]
            step = node.parent
        return tuple(chain.from_iterable(reversed(parts)))

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        """The tools of that path, which its root holds; None for an unknown answer."""
        steps = self._steps_of.get(answer)
        return self.path_tools(self.nodes[self.steps[steps[0]].node]) if steps else None

    def path_tools(self, node: Node) -> tuple[Tool, ...]:
        """The tools of the path that ends with `node`."""
        while node.parent is not None:
            node = self.nodes[self.steps[node.parent].node]
        return node.tools

    def has_reasoning(self, step: int) -> bool:
        """Whether the path up to the end of `step`'s reply holds reasoning tokens, which a template may drop later."""
        return step in self._steps_with_reasoning

    def pictures(self, step: int) -> tuple[PlacedPicture, ...]:
        """Those on the path up to `step`, with their places in the whole prompt."""
        return self._pictures.get(step, ())

    def context(self, step: int) -> TokenPath:
        """All tokens up to the end of `step`'s reply."""
        reply = self.steps[step]
        node, prompt = self._last_prompt
        return (prompt if node == reply.node else self.path(reply.node)).then(reply.completion_ids)

    def keep_prompt(self, node: int, ids: TokenPath) -> None:
        """Keep the prompt that ends with `node`: the next call most likely continues a reply to it."""
        self._last_prompt = (node, ids)

    def context_hash(self, node: Node, completion_ids: Sequence[int]) -> "blake2b":
        """The running hash of all tokens up to the end of a reply to `node`; only the tokens that the two add are hashed."""
        before = None if node.parent is None else self._hashes[node.parent]
        return extend_ids_hash(extend_ids_hash(before, node.token_ids), completion_ids)

    def prompt(self, node: int) -> tuple[int, ...]:
        """The prompt that ends with `node`, as the engine got it."""
        return tuple(self.path(node))

    def path(self, node: int) -> TokenPath:
        """See `prompt`."""
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

    def _index_answer(self, step: Step) -> None:
        """Index the step by its answer, and by its text if its prompt had no template."""
        steps = self._steps_of.setdefault(step.answer, [])
        if not steps:
            request = step.answer.rpartition("-")[0]
            self._answers_to.setdefault(request, []).append(step.answer)
            self._numbers[request] = max(self.last_number(request), answer_number(step.answer))
        steps.append(step.index)
        node = self.nodes[step.node]
        if node.messages_digest.startswith(RAW_CHAIN):
            self._raw_after.setdefault((step.policy, node.parent), []).append(step.index)
            self._raw[step.index] = flatten(node.messages[0]["content"]) + flatten(step.message["content"])

    def _placed_pictures(self, node: Node) -> tuple[PlacedPicture, ...]:
        if node.parent is None or not node.pictures:
            return node.pictures if node.parent is None else self.pictures(node.parent)
        start = len(self.context(node.parent))
        return (*self.pictures(node.parent), *(picture.moved(start) for picture in node.pictures))

    def _reasons(self, step: Step) -> bool:
        node = self.nodes[step.node]
        since_user = takewhile(lambda message: message["role"] != "user", reversed(node.messages))
        replies = [step.message, *(message for message in since_user if message["role"] == "assistant")]
        return node.parent in self._steps_with_reasoning or any(map(has_reasoning, replies))

    def _why_branch(self, messages: Sequence[Message], known: int, policy: str) -> str | None:
        """Why a path is continued with replies that were not sampled there; None if no replies are among the new messages."""
        replies = [(policy, message_digest(message)) for message in messages[known:] if message["role"] == "assistant"]
        if not replies:
            return None
        if self._replies.isdisjoint(replies):
            return REPLY_EDITED
        return TOOLS_CHANGED if self._is_known_but_for_tools(messages, policy) else HISTORY_EDITED

    def _is_known_but_for_tools(self, messages: Sequence[Message], policy: str) -> bool:
        """Whether all messages up to the last reply are those of a path, whose tools must then be others."""
        for index in self.steps.keys() - self._said.keys():
            self._known_said.add((self.steps[index].policy, self._said_until(index)))
        last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        return (policy, _said_after(NOTHING_SAID, messages[: last + 1])) in self._known_said

    def _said_until(self, index: int) -> str:
        path: list[Step] = []
        at: int | None = index
        while at is not None and at not in self._said:
            path.append(self.steps[at])
            at = self.nodes[path[-1].node].parent
        for step in reversed(path):
            node = self.nodes[step.node]
            said = NOTHING_SAID if node.parent is None else self._said[node.parent]
            self._said[step.index] = _said_after(said, [*node.messages, step.message])
        return self._said[index]

    def _why_root(self, messages: Sequence[Message], chains: Sequence[str], policy: str) -> str | None:
        """Why the messages open a root although they repeat or replace a reply; None for a new conversation."""
        if not self.steps:
            return None
        if any(message["role"] == "assistant" and (policy, message_digest(message)) in self._replies for message in messages):
            return TOOLS_CHANGED if self._is_known_but_for_tools(messages, policy) else HISTORY_EDITED
        return REPLY_EDITED if any((policy, each) in self._nodes_at for each in chains[1:-1]) else None


NOTHING_SAID = ""


def _said_after(said: str, messages: Sequence[Message]) -> str:
    """The digest of a conversation after more messages."""
    for message in messages:
        said = chain_digest(said, message_digest(message))
    return said


def answer_number(name: str) -> int:
    """Returns which answer to its request a name (`Step.answer`) stands for; -1 if the name has no number."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def is_complete(step: Step) -> bool:
    """Whether the reply was sampled to its end, so that the agent got all of it."""
    return step.finish in ("stop", "length")


def prompts(rollout: Rollout) -> dict[int, tuple[int, ...]]:
    """The prompt of every step."""
    graph = TokenGraph(rollout)
    return {step.index: graph.prompt(step.node) for step in rollout.steps}


# Memory estimates

STEP_WEIGHT, PROMPT_TOKEN_WEIGHT, SAMPLED_TOKEN_WEIGHT = 3_000, 40, 110
"""Estimated bytes of memory: a step with its index entries; a prompt token; a sampled token with its columns."""


def step_weight(step: Step, node: Node | None) -> int:
    """Returns the bytes that a step and the node stored with it take in memory."""
    weight = STEP_WEIGHT + SAMPLED_TOKEN_WEIGHT * len(step.completion_ids) + json_weight(step.message)
    if node is not None:
        weight += PROMPT_TOKEN_WEIGHT * len(node.token_ids) + json_weight(node.messages) + json_weight(node.tools)
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
