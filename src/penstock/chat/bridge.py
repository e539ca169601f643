"""The bridge: what comes between a sampled reply and the next one, found without touching what came before.

A chat template only knows how to render a whole conversation. To learn what new messages add, they are rendered once after a
probe question and a probe reply; the glue is everything from the token that ends the probe's turn on. Whether the same would
have followed *any* history and reply is checked once per model, over many of them, down to the token ids. Where a template
rewrites history (drops reasoning, moves the tools, ends a turn otherwise once more follows), the check fails for that situation
and the call is rendered from scratch instead.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from penstock.chat.bridge_check import (
    MARK,
    PROBE_TEXT,
    PROBE_TOOLS,
    PROBE_USER,
    BridgeCheck,
    BridgeTrial,
    ReplyKind,
    Situation,
    call_probe,
    kind_of,
    roles_of,
)
from penstock.chat.templates import ChatTemplate, reasons
from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RenderError
from penstock.records import Message

MOMENT = datetime(2025, 1, 1)
"""When glue is rendered. A date stands in what came before it; a template that writes one after a reply is not bridged."""

__all__ = ["PROBE_TOOLS", "PROBE_USER", "Bridge", "BridgeCheck", "Situation"]


class ReplyEnd(NamedTuple):
    """How a template ends the turn of a reply."""

    text: str
    token_id: int
    """The one token that `text` is."""
    final: int
    """The token that ends the last reply of a conversation. Where it is another one, a template that goes on rewrites it."""


class Frame(NamedTuple):
    """The text around a user's words, from the end of a reply before them to the head of the one after."""

    before: str
    after: str


WORDS = (
    "",
    " \n two spaces and lines \n\n",
    "é 日本 🙂 \r\n\t\u00a0",
    "<tool_response>\n42\n</tool_response>",
    "<think>\nhm\n</think>\n\nso",
    '[INST] {"name": "f", "arguments": {}} [/INST] {{ 1 }} {% x %}',
    "1. " * 300,
)
"""What users may say that a template might treat in a way of its own."""
PLAIN = {"role", "content"}


class Bridge:
    """Glue for one model; `check` runs when it is made."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, native_tools: bool) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._native_tools = native_tools
        self._start = len(self._probe([PROBE_USER], generate=False) or "")
        """Where the probe reply begins in a rendering: nothing before it can end its turn."""
        self._ends = self._find_ends()
        self.close_ids = tuple(dict.fromkeys(end.final for end in self._ends.values()))
        """The tokens at which replies of this model end: first that of plain text, then that of calls."""
        self._frame: Frame | None = None
        self._frame = self._find_frame()
        self.result = self.check()

    def glue(
        self,
        reply: Message,
        new: Sequence[Message],
        *,
        last_id: int | None,
        tools: bool,
        system: bool | None = None,
        thought: bool | None = None,
    ) -> tuple[int, ...] | None:
        """Tokens from the end of a sampled reply to where the next one begins; None where that is not proven.

        `last_id` is the reply's last token. A reply that ended its turn itself is not closed twice; one that was cut is closed.
        `system` says whether the conversation begins with a system text, `thought` whether an earlier reply whose tokens are on
        the path holds reasoning; with None, the glue must be proven both ways.
        """
        kind, follows, own = kind_of(reply), roles_of(new), reasons(reply)
        proven = self.result.proven
        for is_system in (False, True) if system is None else (system,):
            for is_thought in (True,) if own else (False, True) if thought is None else (thought,):
                if Situation(tools, is_system, is_thought, kind, follows) not in proven:
                    return None
        try:
            tail = self.tail(reply, kind, new)
        except RenderError:
            return None
        return None if tail is None else self.after(last_id, kind, tail)

    def check(self) -> BridgeCheck:
        """Compare the glue with whole renderings over every situation."""
        return BridgeTrial(self._template, self._tokenizer, self).run(native_tools=self._native_tools)

    def tail(self, reply: Message, kind: ReplyKind, new: Sequence[Message]) -> str | None:
        """Text from the end of a reply's turn on: the close, the new messages, the head of the next reply."""
        if kind not in self._ends:
            return None
        if self._frame is not None and kind == "text" and len(new) == 1 and new[0].keys() == PLAIN and new[0]["role"] == "user":
            return self._frame.before + new[0]["content"] + self._frame.after
        text = self._template.render([PROBE_USER, _stand_in(reply, kind), *new], generate=True, now=MOMENT)
        place = text.find(self._ends[kind].text, self._start)
        return text[place:] if place >= 0 else None

    def after(self, last_id: int | None, kind: ReplyKind, tail: str) -> tuple[int, ...] | None:
        """The tail's tokens after the reply's last one; None where the template would replace that one."""
        end = self._ends[kind]
        if last_id == end.final != end.token_id:
            return None
        ids = self._tokenizer.encode(tail)
        return tuple(ids[1:] if last_id == end.token_id else ids)

    def end_id(self, kind: ReplyKind) -> int:
        """The token that ends a reply's turn when more follows."""
        return self._ends[kind].token_id

    def _find_frame(self) -> "Frame | None":
        """What stands around a user's words, if the words change nothing in it: then most calls need no template."""
        if "text" not in self._ends:
            return None
        try:
            tails = {words: self._tail_of(words) for words in (MARK, *WORDS)}
        except RenderError:
            return None
        before, _, after = (tails[MARK] or "").partition(MARK)
        is_plain = all(tail == before + words + after for words, tail in tails.items())
        return Frame(before, after) if is_plain else None

    def _tail_of(self, words: str) -> str | None:
        return self.tail(PROBE_TEXT, "text", [{"role": "user", "content": words}])

    def _find_ends(self) -> dict[ReplyKind, ReplyEnd]:
        """How turns end, by kind of reply; nothing where no token does it."""
        text = self._find_end(PROBE_TEXT, PROBE_TEXT["content"], {"role": "user", "content": MARK})
        ends: dict[ReplyKind, ReplyEnd] = {} if text is None else {"text": text}
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "multiply", "content": MARK}
        call = self._find_end(call_probe(), MARK, result) if self._native_tools else None
        return ends if call is None else {**ends, "call": call, "calls": call, "text call": call, "text calls": call}

    def _find_end(self, reply: Message, said: str, follower: Message) -> ReplyEnd | None:
        """The first token after what was `said` that ends a text, or else is special."""
        final = (self._probe([PROBE_USER, reply], generate=False) or "").rpartition(said)[2]
        amid = (self._probe([PROBE_USER, reply, follower], generate=True) or "")[self._start :].partition(said)[2]
        token_id, last = self._first_end(amid.partition(MARK)[0]), self._first_end(final)
        text = None if token_id is None else self._tokenizer.core.id_to_token(token_id)
        return ReplyEnd(text, token_id, token_id if last is None else last) if text is not None and token_id is not None else None

    def _first_end(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text)
        sorts = (self._tokenizer.eos_ids, self._tokenizer.special_ids)
        return next((token_id for sort in sorts for token_id in ids if token_id in sort), None)

    def _probe(self, messages: Sequence[Message], *, generate: bool) -> str | None:
        try:
            return self._template.render(messages, generate=generate, now=MOMENT)
        except RenderError:
            return None


def _stand_in(reply: Message, kind: ReplyKind) -> Message:
    """A short reply of the same kind, with the names and ids of the calls, which results refer to."""
    if kind == "text":
        return PROBE_TEXT
    calls = [{**call, "function": {**call["function"], "arguments": "{}"}} for call in reply["tool_calls"]]
    return {"role": "assistant", "content": PROBE_TEXT["content"] if kind.startswith("text") else "", "tool_calls": calls}
