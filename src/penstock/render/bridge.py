"""The bridge: what comes between a sampled reply and the next one, found without touching what came before.

A chat template only knows how to render a whole conversation. To learn what new messages add, it is rendered twice over a
short conversation, a probe question and the reply, with and without them; the difference, after the text that closes a reply, is
the glue. Whether the same text would have followed *any* history is checked once per model, over many histories, replies and
kinds of messages, down to the token ids. Where a template rewrites history (drops reasoning, moves the tools), the check
fails for that situation and the call is rendered from scratch instead.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.errors import RenderError
from penstock.records import Message
from penstock.render.chat import ChatTemplate, Tool, flatten
from penstock.render.tokenizer import Tokenizer

ReplyKind = Literal["text", "reasoning", "calls"]


class Situation(NamedTuple):
    """What a template may treat in a way of its own."""

    tools: bool
    """Whether the conversation has tools that the template renders."""
    reply: ReplyKind
    """What kind of reply is being continued."""
    follows: str
    """Role of the first new message; empty where there is none."""


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    """What the start-up check found."""

    close: str | None
    """The text after a reply's own, such as `<|im_end|>` and a line break; None where a reply cannot be told from its frame."""
    proven: frozenset[Situation]
    unproven: dict[Situation, str]
    """Situations in which calls are rendered from scratch, with the first thing that went wrong."""


class Bridge:
    """Glue for one model; `check` runs when it is made."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, native_tools: bool) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._native_tools = native_tools
        self._close = self._find_close()
        self.close_ids = tuple(tokenizer.encode(self._close or ""))
        """Tokens that close a reply; the first special one is how a reply of this model ends."""
        self.result = self.check()

    def glue(self, reply: Message, new: Sequence[Message], *, last_id: int | None, tools: bool) -> tuple[int, ...] | None:
        """Tokens from the end of a sampled reply to where the next one begins; None where that is not proven.

        `last_id` is the reply's last token. A reply that ended its turn itself is not closed twice; one that was cut is closed.
        """
        situation = Situation(tools, _kind(reply), new[0]["role"] if new else "")
        if situation not in self.result.proven:
            return None
        try:
            text = self._added(reply, new)
        except RenderError:
            return None
        return self._after(last_id, text) if text is not None else None

    def check(self) -> BridgeCheck:
        """Compare the glue with whole renderings over every situation; a situation is proven if it always agrees."""
        agreed: set[Situation] = set()
        failed: dict[Situation, str] = {}
        for situation, history, reply, new in _cases(self._native_tools):
            try:
                trouble = self._compare(situation, history, reply, new)
            except RenderError as refusal:
                if situation not in failed and situation not in agreed:
                    failed[situation] = f"refused: {refusal}"
                continue
            if trouble is None:
                agreed.add(situation)
            elif situation not in failed or failed[situation].startswith("refused"):
                failed[situation] = trouble
        broken = {s: why for s, why in failed.items() if s not in agreed or not why.startswith("refused")}
        return BridgeCheck(self._close, frozenset(agreed - broken.keys()), broken)

    def _find_close(self) -> str | None:
        text = PROBE_REPLIES["text"]["content"]
        try:
            prompt = self._template.render([PROBE_USER], generate=True)
            whole = self._template.render([PROBE_USER, PROBE_REPLIES["text"]], generate=False)
        except RenderError:
            return None
        return whole[len(prompt + text) :] if whole.startswith(prompt + text) else None

    def _added(self, reply: Message, new: Sequence[Message]) -> str | None:
        """Text that follows a reply: its close, the new messages, the head of the next reply."""
        before = self._template.render([PROBE_USER, reply], generate=False)
        after = self._template.render([PROBE_USER, reply, *new], generate=True)
        if self._close is None or not before.endswith(self._close) or not after.startswith(before):
            return None
        return self._close + after[len(before) :]

    def _after(self, last_id: int | None, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text)
        if last_id in self._tokenizer.special_ids and last_id in self.close_ids:
            return tuple(ids[ids.index(last_id) + 1 :])
        return tuple(ids)

    def _compare(self, situation: Situation, history: list[Message], reply: Message, new: list[Message]) -> str | None:
        """What differs between the glue and the whole rendering; None where nothing does."""
        tools = PROBE_TOOLS if situation.tools else ()
        prompt = self._template.render(history, tools, generate=True)
        alone = self._template.render([*history, reply], tools, generate=False)
        whole = self._template.render([*history, reply, *new], tools, generate=True)
        added = self._added(reply, new)
        if self._close is None or added is None:
            return "the frame around a reply depends on what follows it"
        if not alone.startswith(prompt) or not alone.endswith(self._close):
            return "a reply in the history does not begin where the prompt ended, or is not closed as usual"
        body = alone[len(prompt) : len(alone) - len(self._close)]
        if situation.reply != "calls" and body != reply["content"]:
            return "the reply's text is changed"
        if whole != prompt + body + added:
            return "the history is rewritten once more messages follow"
        head, ids = tuple(self._tokenizer.encode(prompt + body)), tuple(self._tokenizer.encode(whole))
        ends = [i for i in self.close_ids if i in self._tokenizer.special_ids][:1]
        if head + self._after(None, added) != ids or any((*head, end, *self._after(end, added)) != ids for end in ends):
            return "the glue's tokens merge with those of the reply"
        return None


PROBE_USER: Message = {"role": "user", "content": "What is 6 times 7?"}
PROBE_TOOLS: tuple[Tool, ...] = (
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
)


def _call(ordinal: int) -> dict[str, object]:
    arguments = json.dumps({"a": 6, "b": ordinal})
    return {"id": f"call{ordinal:05d}", "type": "function", "function": {"name": "multiply", "arguments": arguments}}


def _result(ordinal: int, content: str = "42") -> Message:
    return {"role": "tool", "tool_call_id": f"call{ordinal:05d}", "name": "multiply", "content": content}


PROBE_REPLIES: dict[ReplyKind, Message] = {
    "text": {"role": "assistant", "content": "It is 42."},
    "reasoning": {"role": "assistant", "content": "<think>\nSix sevens.\n</think>\n\nIt is 42."},
    "calls": {"role": "assistant", "content": "", "tool_calls": [_call(0)]},
}

HISTORIES: tuple[list[Message], ...] = (
    [PROBE_USER],
    [{"role": "system", "content": "Be brief."}, PROBE_USER],
    [PROBE_USER, PROBE_REPLIES["text"], {"role": "user", "content": "Sûr? 日本 🙂"}],
    [PROBE_USER, PROBE_REPLIES["calls"], _result(0), PROBE_REPLIES["text"], {"role": "user", "content": ""}],
)

FOLLOWERS: tuple[list[Message], ...] = (
    [],
    [{"role": "user", "content": "And 8 times 9?"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  e\u0301 🙂\r\n\n"}],
    [{"role": "user", "content": "Good."}, PROBE_REPLIES["text"], {"role": "user", "content": "More."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}],
    [PROBE_REPLIES["text"], {"role": "user", "content": "Go on."}],
    [_result(0)],
    [_result(0, ""), _result(1, '{"π": "é"}')],
    [_result(0), {"role": "user", "content": "Go on."}],
)


def _kind(reply: Message) -> ReplyKind:
    if "</think>" in flatten(reply.get("content")):
        return "reasoning"
    return "calls" if reply.get("tool_calls") else "text"


def _reply_before(new: list[Message], kind: ReplyKind) -> Message:
    """A reply of this kind that the new messages may follow: as many calls as there are results."""
    if kind != "calls":
        return PROBE_REPLIES[kind]
    results = sum(message["role"] == "tool" for message in new)
    return {**PROBE_REPLIES["calls"], "tool_calls": [_call(place) for place in range(max(results, 1))]}


def _cases(native_tools: bool) -> Iterator[tuple[Situation, list[Message], Message, list[Message]]]:
    """Every situation with the conversations that it is tried on.

    Tool results follow calls only, and a template that knows no tools never sees either.
    """
    kinds: tuple[ReplyKind, ...] = ("text", "reasoning", "calls") if native_tools else ("text", "reasoning")
    histories = HISTORIES if native_tools else HISTORIES[:-1]
    for tools in (False, True) if native_tools else (False,):
        for history in histories:
            for kind in kinds:
                for new in FOLLOWERS:
                    follows = new[0]["role"] if new else ""
                    if follows != "tool" or kind == "calls":
                        yield Situation(tools, kind, follows), history, _reply_before(new, kind), new
