"""The bridge: tokens that new messages add after a sampled reply, found without rendering the whole conversation again.

The glue is cut out of a rendering of two probe messages plus the new ones. That is only right if the template renders a turn
independently of what came before it, so it is checked at start-up against whole renderings. A template may treat apart whether
there are tools, a system text or reasoning, what the reply holds, and the roles that follow: each combination is a TurnPattern,
checked alone. Calls of a pattern that is not proven are rendered from scratch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, product
from typing import Literal, NamedTuple

from penstock.chat.templates import PROBE, ChatTemplate, Tool, flatten, has_reasoning, json_value
from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RenderError
from penstock.records import Message

ReplyKind = Literal["text", "call", "calls", "text call", "text calls"]
"""What a reply holds besides reasoning: text, one call, several."""


class TurnPattern(NamedTuple):
    """What a template may treat specially around one reply."""

    tools: bool
    """Whether the template renders tools for this conversation."""
    system: bool
    """Whether the conversation begins with a system text."""
    reasoning: bool
    """Whether the reply, or an earlier one whose tokens are on the path, holds reasoning."""
    reply: ReplyKind
    follows: str
    """Roles of the new messages, such as `tool user`; a role repeated in a row is named once. Empty if there are none."""

    def __str__(self) -> str:
        given = [name for name, here in (("tools", self.tools), ("system", self.system), ("reasoning", self.reasoning)) if here]
        return f"{self.reply}{' with ' + ', '.join(given) if given else ''}, then {self.follows or 'nothing'}"


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    proven: frozenset[TurnPattern]
    unproven: dict[TurnPattern, str]
    """Patterns whose calls are rendered from scratch, with the first difference found."""


class ProbeCase(NamedTuple):
    """One conversation that a pattern is checked with."""

    pattern: TurnPattern
    history: tuple[Message, ...]
    """The messages before the reply."""
    reply: Message
    new: tuple[Message, ...]
    earlier: str = ""
    """Reasoning of an earlier reply. If the prompt does not show it, the case is skipped."""


def reply_kind(reply: Message) -> ReplyKind:
    """The kind of a reply. White space does not count as text."""
    calls = reply.get("tool_calls")
    if not calls:
        return "text"
    has_text = bool(flatten(reply.get("content")).strip())
    if len(calls) == 1:
        return "text call" if has_text else "call"
    return "text calls" if has_text else "calls"


def roles_of(new: Sequence[Message]) -> str:
    """See `TurnPattern.follows`."""
    return " ".join(role for role, _ in groupby(message["role"] for message in new))


# Glue


GLUE_TIME = datetime(2025, 1, 1)
"""The time at which glue is rendered. A template that writes the date after a reply fails the check."""

TRICKY_TEXTS = (
    "",
    " \n two spaces and lines \n\n",
    "é 日本 🙂 \r\n\t\u00a0",
    "<tool_response>\n42\n</tool_response>",
    "<think>\nhm\n</think>\n\nso",
    '[INST] {"name": "f", "arguments": {}} [/INST] {{ 1 }} {% x %}',
    "1. " * 300,
)
"""User texts that a template might treat specially."""

PLAIN = {"role", "content"}


class ReplyEnd(NamedTuple):
    """How a template ends the turn of a reply."""

    text: str
    token_id: int
    """`text` as one token."""
    final: int
    """The token that ends the last reply of a conversation. If it differs, the template replaces it once messages follow."""


class UserTurnFrame(NamedTuple):
    """The text around a user message, from the end of the reply before it to the beginning of the next reply."""

    before: str
    after: str


class Bridge:
    """The glue of one model. The constructor runs `check`."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, native_tools: bool) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._native_tools = native_tools
        self._start = len(self._probe([PROBE_USER], generate=False) or "")
        """Where the probe reply begins in a rendering; the end of its turn is searched from here."""
        self._ends = self._find_ends()
        self.close_ids = tuple(dict.fromkeys(end.final for end in self._ends.values()))
        """The tokens that end replies: of plain text first, then of calls."""
        self._frame: UserTurnFrame | None = None
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
        """Tokens from the end of a sampled reply to the beginning of the next one; None if the pattern is not proven.

        `last_id` is the reply's last token: if it is the end of the turn, it is not repeated; a reply that was cut off gets one.
        `system` says whether the conversation begins with a system text, `thought` whether an earlier reply on the path has
        reasoning; if None, the glue must be proven both ways.
        """
        kind, follows, own = reply_kind(reply), roles_of(new), has_reasoning(reply)
        proven = self.result.proven
        for is_system in (False, True) if system is None else (system,):
            for is_thought in (True,) if own else (False, True) if thought is None else (thought,):
                if TurnPattern(tools, is_system, is_thought, kind, follows) not in proven:
                    return None
        try:
            tail = self.tail(reply, kind, new)
        except RenderError:
            return None
        return None if tail is None else self.after(last_id, kind, tail)

    def check(self) -> BridgeCheck:
        return BridgeChecker(self._template, self._tokenizer, self).run(native_tools=self._native_tools)

    def tail(self, reply: Message, kind: ReplyKind, new: Sequence[Message]) -> str | None:
        """Text from the end of a reply's turn on: its end token, the new messages, the head of the next reply."""
        if kind not in self._ends:
            return None
        if self._frame is not None and kind == "text" and _is_user_text(new):
            return self._frame.before + new[0]["content"] + self._frame.after
        text = self._template.render([PROBE_USER, _short_reply(reply, kind), *new], generate=True, now=GLUE_TIME)
        place = text.find(self._ends[kind].text, self._start)
        return text[place:] if place >= 0 else None

    def after(self, last_id: int | None, kind: ReplyKind, tail: str) -> tuple[int, ...] | None:
        """The tail's tokens after the reply's last one; None if the template would replace that one."""
        end = self._ends[kind]
        if last_id == end.final != end.token_id:
            return None
        ids = self._tokenizer.encode(tail)
        return tuple(ids[1:] if last_id == end.token_id else ids)

    def end_id(self, kind: ReplyKind) -> int:
        """The token that ends a reply's turn when more follows."""
        return self._ends[kind].token_id

    def _find_frame(self) -> "UserTurnFrame | None":
        """The frame of a user message, if its text never changes the frame: most calls then need no template."""
        if "text" not in self._ends:
            return None
        try:
            tails = {text: self._tail_of(text) for text in (MARK, *TRICKY_TEXTS)}
        except RenderError:
            return None
        before, _, after = (tails[MARK] or "").partition(MARK)
        is_plain = all(tail == before + text + after for text, tail in tails.items())
        return UserTurnFrame(before, after) if is_plain else None

    def _tail_of(self, text: str) -> str | None:
        return self.tail(PROBE_TEXT, "text", [{"role": "user", "content": text}])

    def _find_ends(self) -> dict[ReplyKind, ReplyEnd]:
        """How turns end, by kind of reply; kinds whose turns are not ended by a single token are left out."""
        text = self._find_end(PROBE_TEXT, PROBE_TEXT["content"], {"role": "user", "content": MARK})
        ends: dict[ReplyKind, ReplyEnd] = {} if text is None else {"text": text}
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "multiply", "content": MARK}
        call = self._find_end(call_probe(), MARK, result) if self._native_tools else None
        return ends if call is None else {**ends, "call": call, "calls": call, "text call": call, "text calls": call}

    def _find_end(self, reply: Message, content: str, follower: Message) -> ReplyEnd | None:
        """The first end-of-text token after `content`, or else the first special token."""
        final = (self._probe([PROBE_USER, reply], generate=False) or "").rpartition(content)[2]
        amid = (self._probe([PROBE_USER, reply, follower], generate=True) or "")[self._start :].partition(content)[2]
        token_id, last = self._first_end(amid.partition(MARK)[0]), self._first_end(final)
        text = None if token_id is None else self._tokenizer.core.id_to_token(token_id)
        return ReplyEnd(text, token_id, token_id if last is None else last) if text is not None and token_id is not None else None

    def _first_end(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text)
        sorts = (self._tokenizer.eos_ids, self._tokenizer.special_ids)
        return next((token_id for sort in sorts for token_id in ids if token_id in sort), None)

    def _probe(self, messages: Sequence[Message], *, generate: bool) -> str | None:
        try:
            return self._template.render(messages, generate=generate, now=GLUE_TIME)
        except RenderError:
            return None


def _is_user_text(new: Sequence[Message]) -> bool:
    return len(new) == 1 and new[0].keys() == PLAIN and new[0]["role"] == "user" and isinstance(new[0]["content"], str)


def _short_reply(reply: Message, kind: ReplyKind) -> Message:
    """A short reply of the same kind, with the same call names and ids, because results refer to them."""
    if kind == "text":
        return PROBE_TEXT
    calls = [{**call, "function": {**call["function"], "arguments": "{}"}} for call in reply["tool_calls"]]
    return {"role": "assistant", "content": PROBE_TEXT["content"] if kind.startswith("text") else "", "tool_calls": calls}


# The check


CHECK_TIME = datetime(2031, 12, 30, 23, 45)
"""The time at which the checker renders. It differs from GLUE_TIME, so that a date in the glue shows up as a difference."""


class BridgeChecker:
    """Compares glue with whole renderings. A pattern is proven if all of its conversations agree."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, bridge: "Bridge") -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._bridge = bridge
        shown = _render(template, [PROBE_USER, {**PROBE_TEXT, "reasoning_content": THOUGHT}])
        self._inline = THOUGHT not in (shown or "")
        """Whether the template ignores `reasoning_content`, so that reasoning can only be part of the text."""
        self._prompts: dict[str, str] = {}
        self._tails: dict[str, str | None] = {}
        self._joints: set[tuple[str, str]] = set()
        """(end of a reply, tail) pairs whose tokens were already compared."""

    def run(self, *, native_tools: bool) -> BridgeCheck:
        """Check all patterns.

        Conversations that the template refuses are skipped. If it refuses all of a pattern, that is the reason given.
        """
        proven: set[TurnPattern] = set()
        failed: dict[TurnPattern, str] = {}
        refused: dict[TurnPattern, str] = {}
        for case in cases(native_tools=native_tools):
            if case.pattern in failed:
                continue
            try:
                difference = self._compare(case)
            except RenderError as refusal:
                refused.setdefault(case.pattern, f"refused: {refusal}")
                continue
            if difference is None:
                proven.add(case.pattern)
            elif difference:
                failed[case.pattern] = difference
        unproven = {s: why for s, why in refused.items() if s not in proven} | failed
        return BridgeCheck(frozenset(proven - failed.keys()), unproven)

    def _compare(self, case: ProbeCase) -> str | None:
        """The difference between glue and whole rendering; None if there is none, empty if the case does not apply."""
        tools, kind = OTHER_TOOLS if case.pattern.tools else (), case.pattern.reply
        history = [self._as_rendered(message) for message in case.history]
        prompt = self._prompt(history, tools=case.pattern.tools)
        if case.earlier not in prompt:
            return ""
        tail = self._tail(case)
        if tail is None:
            return "no token ends a reply's turn"
        whole = self._template.render([*history, self._as_rendered(case.reply), *case.new], tools, generate=True, now=CHECK_TIME)
        if not whole.startswith(prompt):
            return "what came before a reply is rewritten once messages follow it"
        if not whole.endswith(tail) or len(whole) < len(prompt) + len(tail):
            return "what follows a reply depends on what came before it"
        body = whole[len(prompt) : len(whole) - len(tail)]
        if not _contains(body, case.reply):
            return "a part of the reply is dropped once messages follow it"
        return None if self._joins(prompt + body, kind, tail) else "the glue's tokens merge with those of the reply"

    def _joins(self, head: str, kind: ReplyKind, tail: str) -> bool:
        """Whether the head's tokens plus the glue are the tokens of the whole. Only the text near the joint matters."""
        joint = (head[-64:], tail)
        if joint in self._joints:
            return True
        before, whole, end = (
            tuple(self._tokenizer.encode(head)),
            tuple(self._tokenizer.encode(head + tail)),
            self._bridge.end_id(kind),
        )
        cut, ended = self._bridge.after(None, kind, tail), self._bridge.after(end, kind, tail)
        if cut is None or ended is None or before + cut != whole or (*before, end, *ended) != whole:
            return False
        self._joints.add(joint)
        return True

    def _prompt(self, history: list[Message], *, tools: bool) -> str:
        key = f"{tools} {history}"
        if key not in self._prompts:
            self._prompts[key] = self._template.render(history, OTHER_TOOLS if tools else (), generate=True, now=CHECK_TIME)
        return self._prompts[key]

    def _tail(self, case: ProbeCase) -> str | None:
        key = f"{case.pattern.reply} {case.reply.get('tool_calls')} {case.new}"
        if key not in self._tails:
            self._tails[key] = self._bridge.tail(case.reply, case.pattern.reply, case.new)
        return self._tails[key]

    def _as_rendered(self, message: Message) -> Message:
        """The message in the form this template takes: reasoning inside the text if it has no separate place."""
        thought = message.get("reasoning_content")
        if not thought or not self._inline:
            return message
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**plain, "content": f"<think>\n{thought}\n</think>\n\n{flatten(message['content'])}"}


def _render(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages, generate=False, now=CHECK_TIME)
    except RenderError:
        return None


def _contains(body: str, reply: Message) -> bool:
    """Whether `body` has all parts of a reply, in order."""
    parts = [reply.get("reasoning_content") or "", flatten(reply["content"]).strip()]
    for call in reply.get("tool_calls") or ():
        parts += [call["function"]["name"], *map(str, json_value(call["function"]["arguments"]).values())]
    for part in parts:
        place = body.find(part)
        if place < 0:
            return False
        body = body[place + len(part) :]
    return True


# Probe conversations


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call_probe(ordinal: int = 0, content: str = "") -> Message:
    """A reply that calls a tool; `ordinal` makes its id and arguments unique."""
    function = {"name": "multiply", "arguments": json.dumps({"a": MARK, "b": ordinal})}
    return {**_assistant(content), "tool_calls": [{"id": f"call{ordinal:05d}", "type": "function", "function": function}]}


def _result(ordinal: int = 0, content: str = "42") -> Message:
    return {"role": "tool", "tool_call_id": f"call{ordinal:05d}", "name": "multiply", "content": content}


MARK = "six"
"""In the arguments of every probe call, to find them in a rendering."""

THOUGHT = "Seven sixes, one by one."

EARLIER = "First I must ask."
"""Reasoning of an earlier reply."""

PROBE_USER = _user(PROBE)

PROBE_TEXT = _assistant("It is 42.")

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

OTHER_TOOLS = ({**PROBE_TOOLS[0], "function": {**PROBE_TOOLS[0]["function"], "description": "In the trial's tools alone."}},)
"""The checker's tools. Glue is rendered without tools, so that any tools in it show up as a difference."""

AFTER_TEXT: tuple[Message, ...] = (PROBE_USER, PROBE_TEXT, _user("Sûr? 日本 🙂"))

IN_LOOP: tuple[Message, ...] = (PROBE_USER, call_probe(), _result())

AFTER_LOOP: tuple[Message, ...] = (*IN_LOOP, PROBE_TEXT, _user(""))

PLAIN_FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    (),
    (_user("And 8 times 9?"),),
    (_user("Good."), PROBE_TEXT, _user("More.")),
    ({"role": "system", "content": "Be brief."},),
    ({"role": "system", "content": "Be brief."}, _user("Go on.")),
    (_user("Go on."), {"role": "system", "content": "Be brief."}),
    (PROBE_TEXT,),
    (PROBE_TEXT, _user("Go on.")),
)
"""What may follow any reply, one of each sequence of roles."""

CALLING_FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    (call_probe(7), _result(7)),
    (_user("Again."), call_probe(7), _result(7)),
)
"""What may follow any reply if the template knows tools."""

RESULT_FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    (_result(),),
    (_result(), _user("Go on.")),
    (_result(), {"role": "system", "content": "Be brief."}),
    (_result(), PROBE_TEXT),
    (_result(), PROBE_TEXT, _user("Go on.")),
    (_result(), call_probe(7), _result(7)),
)
"""What may follow a reply with one call."""

RESULTS_FOLLOWERS = tuple((_result(), _result(1, " é\n"), *new[1:]) for new in RESULT_FOLLOWERS)
"""What may follow a reply with several calls."""

UGLY_FOLLOWERS: dict[str, tuple[tuple[Message, ...], ...]] = {
    "user": ((_user(""),), (_user("  e\u0301 🙂\r\n\n"),), (_user("One."), _user("Two."))),
    "tool": ((_result(0, ""),), (_result(0, ' {"π": "é"}\r\n'),)),
}
"""By roles: unusual contents, such as empty text, white space, or several messages in a row."""

UGLY_TEXTS = ("", " Ünï\n🙂 \n")


def cases(*, native_tools: bool) -> Iterator[ProbeCase]:
    """Every pattern with the conversations that it is checked with.

    A template without tools never sees calls or results: they are rendered as plain text.
    """
    kinds: tuple[ReplyKind, ...] = ("text", "call", "calls", "text call", "text calls") if native_tools else ("text",)
    for tools, system, kind in product((False, True) if native_tools else (False,), (False, True), kinds):
        head: tuple[Message, ...] = ({"role": "system", "content": "Be exact."},) if system else ()
        for new in _followers(kind, native_tools=native_tools):
            pattern = TurnPattern(tools, system, False, kind, roles_of(new))
            for case in _cases(pattern, new, native_tools=native_tools):
                yield case._replace(history=head + case.history)


def _cases(pattern: TurnPattern, new: tuple[Message, ...], *, native_tools: bool) -> Iterator[ProbeCase]:
    """The conversations of a pattern, and of the same pattern with reasoning in the reply, before it, or both."""
    reply, thought = _reply(pattern.reply), pattern._replace(reasoning=True)
    reasoned = {**reply, "reasoning_content": THOUGHT}
    histories = ((PROBE_USER,), AFTER_TEXT, *((IN_LOOP, AFTER_LOOP) if native_tools else ()))
    for history in histories:
        yield ProbeCase(pattern, history, reply, new)
    for ugly in UGLY_FOLLOWERS.get(pattern.follows, ()):
        yield ProbeCase(pattern, (PROBE_USER,), reply, ugly)
    if pattern.reply == "text":
        for content in UGLY_TEXTS:
            yield ProbeCase(pattern, (PROBE_USER,), _assistant(content), new)
    yield ProbeCase(thought, (PROBE_USER,), reasoned, new)
    for history in histories[1:3]:
        yield ProbeCase(thought, history, reasoned, new)
        yield ProbeCase(thought, _with_reasoning(history), reply, new, EARLIER)
    yield ProbeCase(thought, _with_reasoning(histories[-1]), reasoned, new, EARLIER)


def _followers(kind: ReplyKind, *, native_tools: bool) -> tuple[tuple[Message, ...], ...]:
    if kind in ("calls", "text calls"):
        return PLAIN_FOLLOWERS[:2] + RESULTS_FOLLOWERS
    return PLAIN_FOLLOWERS + (CALLING_FOLLOWERS if native_tools else ()) + (RESULT_FOLLOWERS if kind != "text" else ())


def _reply(kind: ReplyKind) -> Message:
    if kind == "text":
        return PROBE_TEXT
    calls = [call for place in range(2 if kind.endswith("calls") else 1) for call in call_probe(place)["tool_calls"]]
    return {**_assistant("I ask." if kind.startswith("text") else ""), "tool_calls": calls}


def _with_reasoning(history: tuple[Message, ...]) -> tuple[Message, ...]:
    """The history with reasoning in its last reply."""
    last = max(place for place, message in enumerate(history) if message["role"] == "assistant")
    return (*history[:last], {**history[last], "reasoning_content": EARLIER}, *history[last + 1 :])
