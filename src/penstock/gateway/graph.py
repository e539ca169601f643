"""The token graph of one rollout: every prompt that the engine saw, each token kept once.

    node 0 ── step 0 ── node 1 ── step 2        an agent's two turns
       └───── step 1                            a second reply to the same prompt (a retry, or n = 2)
    node 2 ── step 3                            a sub-agent with a prompt of its own

A *node* is what the caller's messages add, a *step* is a sampled reply. A call is matched to the longest known path by the
digests of its messages; its prompt is the tokens of that path, exactly as they were sampled, and what the new messages add.
Sub-agents, retries, several choices, edited and compacted histories are branches and roots; there is no other case.

The graph changes only when a step has been stored, so it can be built again from the pool at any time, by any gateway.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from penstock.records import Attempt, Message, Node, Step
from penstock.render.chat import Tool, digest, link, tools_digest

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
    """Why a root must be opened although replies were sent back; None where nothing broke."""


class TokenGraph:
    """Nodes and steps of one rollout, and the way back from a call's messages to them."""

    def __init__(self, attempt: Attempt) -> None:
        self.nodes: dict[int, Node] = {}
        self.steps: dict[int, Step] = {}
        self._step_after: dict[str, int] = {}
        """Chain digest of a path that ends with a reply, to the step that is that reply."""
        self._nodes_at: dict[str, list[int]] = {}
        """Chain digest of a path that ends with the caller's messages, to its nodes."""
        self._replies: set[str] = set()
        """Digests of all replies, wherever they stand."""
        self._tools: set[str] = set()
        """Digests of the tools of all roots."""
        unused = {node.id: node for node in attempt.nodes}
        for step in sorted(attempt.steps, key=lambda step: step.index):
            self.add(step, unused.pop(step.node, None))

    @property
    def next_node(self) -> int:
        """The id that the next node gets."""
        return max(self.nodes, default=-1) + 1

    @property
    def next_step(self) -> int:
        """The index that the next step gets."""
        return max(self.steps, default=-1) + 1

    def add(self, step: Step, node: Node | None) -> None:
        """Take in a stored step, and the node that was stored with it."""
        if node is not None:
            self.nodes[node.id] = node
            self._nodes_at.setdefault(node.chain, []).append(node.id)
            if node.parent is None:
                self._tools.add(tools_digest(node.tools))
        self.steps[step.index] = step
        self._replies.add(digest(step.message))
        before = self._step_after.get(step.chain)
        if before is None or whole(step) or not whole(self.steps[before]):
            self._step_after[step.chain] = step.index  # of two equal replies, the last whole one is what the agent saw

    def match(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Place:
        """The longest known path that these messages continue."""
        digests = [digest(message) for message in messages]
        chains = [tools_digest(tools)]
        for each in digests:
            chains.append(link(chains[-1], each))
        for known in range(len(messages), 0, -1):
            if (step := self._step_after.get(chains[known])) is not None:
                return Place(step, known, chains[-1], None)
        replies = {each for each, message in zip(digests, messages, strict=True) if message["role"] == "assistant"}
        return Place(None, 0, chains[-1], self._why_root(chains, replies))

    def find(self, parent: int | None, messages_chain: str, token_ids: Sequence[int]) -> Node | None:
        """The node that adds exactly these tokens there, if one does: the same call made again shares it."""
        for node_id in self._nodes_at.get(messages_chain, ()):
            node = self.nodes[node_id]
            if node.parent == parent and node.token_ids == tuple(token_ids):
                return node
        return None

    def replies(self, node: Node) -> list[Step]:
        """The steps sampled after `node`, in order."""
        return [step for step in self.steps.values() if step.node == node.id]

    def context(self, step: int) -> tuple[int, ...]:
        """All tokens up to the end of `step`'s reply."""
        reply = self.steps[step]
        return self.prompt(reply.node) + reply.completion_ids

    def prompt(self, node: int) -> tuple[int, ...]:
        """The prompt that ends with `node`, as the engine saw it."""
        parts: list[tuple[int, ...]] = []
        at: int | None = node
        while at is not None:
            parts.append(self.nodes[at].token_ids)
            parent = self.nodes[at].parent
            at = None if parent is None else self.steps[parent].node
            if parent is not None:
                parts.append(self.steps[parent].completion_ids)
        return tuple(chain.from_iterable(reversed(parts)))

    def _why_root(self, chains: list[str], replies: set[str]) -> str | None:
        """What broke, if the messages send back a reply of ours or replace one; a conversation of its own breaks nothing."""
        if replies & self._replies:
            return HISTORY_EDITED if chains[0] in self._tools else TOOLS_CHANGED
        return REPLY_EDITED if any(each in self._nodes_at for each in chains[1:-1]) else None


def whole(step: Step) -> bool:
    """Whether the reply came to its own end, so that the agent got all of it."""
    return step.finish in ("stop", "length")


def prompts(attempt: Attempt) -> dict[int, tuple[int, ...]]:
    """The prompt of every step, read off the graph: what an audit of exactness compares with."""
    graph = TokenGraph(attempt)
    return {step.index: graph.prompt(step.node) for step in attempt.steps}
