"""The conversations that a model's bridge is tried on: each kind of reply, after each kind of history, before all that may follow.

A template can treat apart whether there are tools, a system text, reasoning on the path; what the reply holds; and the roles of
what follows. Each combination is a Situation, proven or not by itself.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, product
from typing import Literal, NamedTuple, Protocol

from penstock.chat.templates import ChatTemplate, Tool, flatten, has_reasoning, json_value
from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RenderError
from penstock.records import Message

ReplyKind = Literal["text", "call", "calls", "text call", "text calls"]
"""What a reply holds besides reasoning: text, one call, several."""


class TurnPattern(NamedTuple):
    """What a template may treat in a way of its own."""

    tools: bool
    """Whether the conversation has tools that the template renders."""
    system: bool
    """Whether it begins with a system text."""
    reasoning: bool
    """Whether the reply, or an earlier one whose tokens are on the path, holds reasoning."""
    reply: ReplyKind
    follows: str
    """Roles of the new messages, several in a row of one role named once: `tool user`; empty where there are none."""

    def __str__(self) -> str:
        given = [name for name, here in (("tools", self.tools), ("system", self.system), ("reasoning", self.reasoning)) if here]
        return f"{self.reply}{' with ' + ', '.join(given) if given else ''}, then {self.follows or 'nothing'}"


class ProbeCase(NamedTuple):
    """One conversation of a situation."""

    situation: TurnPattern
    history: tuple[Message, ...]
    """Up to where the reply was sampled."""
    reply: Message
    new: tuple[Message, ...]
    earlier: str = ""
    """Reasoning of an earlier reply: a prompt that does not show it says nothing about the situation."""


def reply_kind(reply: Message) -> ReplyKind:
    """Its kind; text that is white space is none."""
    calls = reply.get("tool_calls")
    if not calls:
        return "text"
    spoken = bool(flatten(reply.get("content")).strip())
    if len(calls) == 1:
        return "text call" if spoken else "call"
    return "text calls" if spoken else "calls"


def roles_of(new: Sequence[Message]) -> str:
    """As `Situation.follows` has it."""
    return " ".join(role for role, _ in groupby(message["role"] for message in new))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call_probe(ordinal: int = 0, content: str = "") -> Message:
    """A reply that calls a tool; `ordinal` counts the calls before it."""
    function = {"name": "multiply", "arguments": json.dumps({"a": MARK, "b": ordinal})}
    return {**_said(content), "tool_calls": [{"id": f"call{ordinal:05d}", "type": "function", "function": function}]}


def _result(ordinal: int = 0, content: str = "42") -> Message:
    return {"role": "tool", "tool_call_id": f"call{ordinal:05d}", "name": "multiply", "content": content}


MARK = "six"
"""In the arguments of every probe call, so that they can be found in a rendering."""
THOUGHT = "Seven sixes, one by one."
EARLIER = "First I must ask."
"""Reasoning of an earlier reply."""
PROBE_USER = _user("What is 6 times 7?")
PROBE_TEXT = _said("It is 42.")
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
"""What may come after any reply, each by other roles."""
CALLING_FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    (call_probe(7), _result(7)),
    (_user("Again."), call_probe(7), _result(7)),
)
"""What may too, where the template knows tools."""
RESULT_FOLLOWERS: tuple[tuple[Message, ...], ...] = (
    (_result(),),
    (_result(), _user("Go on.")),
    (_result(), {"role": "system", "content": "Be brief."}),
    (_result(), PROBE_TEXT),
    (_result(), PROBE_TEXT, _user("Go on.")),
    (_result(), call_probe(7), _result(7)),
)
"""What may come after a call only."""
RESULTS_FOLLOWERS = tuple((_result(), _result(1, " é\n"), *new[1:]) for new in RESULT_FOLLOWERS)
"""What may come after several."""
UGLY_FOLLOWERS: dict[str, tuple[tuple[Message, ...], ...]] = {
    "user": ((_user(""),), (_user("  e\u0301 🙂\r\n\n"),), (_user("One."), _user("Two."))),
    "tool": ((_result(0, ""),), (_result(0, ' {"π": "é"}\r\n'),)),
}
"""The same roles with other contents: empty, white space, several of them."""
UGLY_TEXTS = ("", " Ünï\n🙂 \n")


def cases(*, native_tools: bool) -> Iterator[ProbeCase]:
    """Every situation with the conversations that it is tried on.

    A template that knows no tools never sees calls or results: both are plain text to it.
    """
    kinds: tuple[ReplyKind, ...] = ("text", "call", "calls", "text call", "text calls") if native_tools else ("text",)
    for tools, system, kind in product((False, True) if native_tools else (False,), (False, True), kinds):
        head: tuple[Message, ...] = ({"role": "system", "content": "Be exact."},) if system else ()
        for new in _followers(kind, native_tools=native_tools):
            situation = TurnPattern(tools, system, False, kind, roles_of(new))
            for case in _cases(situation, new, native_tools=native_tools):
                yield case._replace(history=head + case.history)


def _followers(kind: ReplyKind, *, native_tools: bool) -> tuple[tuple[Message, ...], ...]:
    if kind in ("calls", "text calls"):
        return PLAIN_FOLLOWERS[:2] + RESULTS_FOLLOWERS
    return PLAIN_FOLLOWERS + (CALLING_FOLLOWERS if native_tools else ()) + (RESULT_FOLLOWERS if kind != "text" else ())


def _cases(situation: TurnPattern, new: tuple[Message, ...], *, native_tools: bool) -> Iterator[ProbeCase]:
    """The conversations of a situation, and of the same one with reasoning: in the reply, before it, or both."""
    reply, thought = _reply(situation.reply), situation._replace(reasoning=True)
    pensive = {**reply, "reasoning_content": THOUGHT}
    histories = ((PROBE_USER,), AFTER_TEXT, *((IN_LOOP, AFTER_LOOP) if native_tools else ()))
    for history in histories:
        yield ProbeCase(situation, history, reply, new)
    for ugly in UGLY_FOLLOWERS.get(situation.follows, ()):
        yield ProbeCase(situation, (PROBE_USER,), reply, ugly)
    if situation.reply == "text":
        for content in UGLY_TEXTS:
            yield ProbeCase(situation, (PROBE_USER,), _said(content), new)
    yield ProbeCase(thought, (PROBE_USER,), pensive, new)
    for history in histories[1:3]:
        yield ProbeCase(thought, history, pensive, new)
        yield ProbeCase(thought, _thinking(history), reply, new, EARLIER)
    yield ProbeCase(thought, _thinking(histories[-1]), pensive, new, EARLIER)


def _reply(kind: ReplyKind) -> Message:
    if kind == "text":
        return PROBE_TEXT
    calls = [call for place in range(2 if kind.endswith("calls") else 1) for call in call_probe(place)["tool_calls"]]
    return {**_said("I ask." if kind.startswith("text") else ""), "tool_calls": calls}


def _thinking(history: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same with reasoning in its last reply."""
    last = max(place for place, message in enumerate(history) if message["role"] == "assistant")
    return (*history[:last], {**history[last], "reasoning_content": EARLIER}, *history[last + 1 :])


MOMENT = datetime(2031, 12, 30, 23, 45)
"""When the trial's conversations are rendered: not when glue is, so that a date in it shows, and midnight makes no difference."""

OTHER_TOOLS = ({**PROBE_TOOLS[0], "function": {**PROBE_TOOLS[0]["function"], "description": "In the trial's tools alone."}},)
"""Glue is rendered without tools, so that any that turn up in it show."""


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    """What the check found."""

    proven: frozenset[TurnPattern]
    unproven: dict[TurnPattern, str]
    """Situations in which calls are rendered from scratch, with the first thing that went wrong."""


class Gluing(Protocol):
    def tail(self, reply: Message, kind: ReplyKind, new: Sequence[Message]) -> str | None:
        """Text from the end of a reply's turn on; None where that cannot be told."""
        ...

    def after(self, last_id: int | None, kind: ReplyKind, tail: str) -> tuple[int, ...] | None:
        """The tail's tokens after the reply's last one."""
        ...

    def end_id(self, kind: ReplyKind) -> int:
        """The token that ends a reply's turn."""
        ...


class BridgeChecker:
    """One run of the check. A situation is proven if every conversation of it agrees."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, glue: Gluing) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._glue = glue
        shown = _render(template, [PROBE_USER, {**PROBE_TEXT, "reasoning_content": THOUGHT}])
        self._inline = THOUGHT not in (shown or "")
        """Whether the template has no place for reasoning, so that it can only stand in the text."""
        self._prompts: dict[str, str] = {}
        self._tails: dict[str, str | None] = {}
        self._joints: set[tuple[str, str]] = set()
        """Ends of replies and tails whose tokens were compared."""

    def run(self, *, native_tools: bool) -> BridgeCheck:
        """Try everything.

        Conversations that the template refuses say nothing; where it refuses all of a situation, that is what went wrong.
        """
        agreed: set[TurnPattern] = set()
        failed: dict[TurnPattern, str] = {}
        refused: dict[TurnPattern, str] = {}
        for case in cases(native_tools=native_tools):
            if case.situation in failed:
                continue
            try:
                trouble = self._compare(case)
            except RenderError as refusal:
                refused.setdefault(case.situation, f"refused: {refusal}")
                continue
            if trouble is None:
                agreed.add(case.situation)
            elif trouble:
                failed[case.situation] = trouble
        unproven = {s: why for s, why in refused.items() if s not in agreed} | failed
        return BridgeCheck(frozenset(agreed - failed.keys()), unproven)

    def _compare(self, case: ProbeCase) -> str | None:
        """What differs between the glue and the whole rendering; None where nothing does, empty where the case says nothing."""
        tools, kind = OTHER_TOOLS if case.situation.tools else (), case.situation.reply
        history = [self._written(message) for message in case.history]
        prompt = self._prompt(history, tools=case.situation.tools)
        if case.earlier not in prompt:
            return ""
        tail = self._tail(case)
        if tail is None:
            return "no token ends a reply's turn"
        whole = self._template.render([*history, self._written(case.reply), *case.new], tools, generate=True, now=MOMENT)
        if not whole.startswith(prompt):
            return "what came before a reply is rewritten once messages follow it"
        if not whole.endswith(tail) or len(whole) < len(prompt) + len(tail):
            return "what follows a reply depends on what came before it"
        body = whole[len(prompt) : len(whole) - len(tail)]
        if not _says(body, case.reply):
            return "a part of the reply is dropped once messages follow it"
        return None if self._joins(prompt + body, kind, tail) else "the glue's tokens merge with those of the reply"

    def _joins(self, head: str, kind: ReplyKind, tail: str) -> bool:
        """Whether glue after the head's tokens gives the tokens of the whole. Far from the joint, one look is enough."""
        joint = (head[-64:], tail)
        if joint in self._joints:
            return True
        before, whole, end = (
            tuple(self._tokenizer.encode(head)),
            tuple(self._tokenizer.encode(head + tail)),
            self._glue.end_id(kind),
        )
        cut, ended = self._glue.after(None, kind, tail), self._glue.after(end, kind, tail)
        if cut is None or ended is None or before + cut != whole or (*before, end, *ended) != whole:
            return False
        self._joints.add(joint)
        return True

    def _prompt(self, history: list[Message], *, tools: bool) -> str:
        key = f"{tools} {history}"
        if key not in self._prompts:
            self._prompts[key] = self._template.render(history, OTHER_TOOLS if tools else (), generate=True, now=MOMENT)
        return self._prompts[key]

    def _tail(self, case: ProbeCase) -> str | None:
        key = f"{case.situation.reply} {case.reply.get('tool_calls')} {case.new}"
        if key not in self._tails:
            self._tails[key] = self._glue.tail(case.reply, case.situation.reply, case.new)
        return self._tails[key]

    def _written(self, message: Message) -> Message:
        """A message as this template takes it: reasoning in the text where it knows no other place for it."""
        thought = message.get("reasoning_content")
        if not thought or not self._inline:
            return message
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**plain, "content": f"<think>\n{thought}\n</think>\n\n{flatten(message['content'])}"}


def _render(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages, generate=False, now=MOMENT)
    except RenderError:
        return None


def _says(body: str, reply: Message) -> bool:
    """Whether all of a reply stands in a text, in order."""
    parts = [reply.get("reasoning_content") or "", flatten(reply["content"]).strip()]
    for call in reply.get("tool_calls") or ():
        parts += [call["function"]["name"], *map(str, json_value(call["function"]["arguments"]).values())]
    for part in parts:
        place = body.find(part)
        if place < 0:
            return False
        body = body[place + len(part) :]
    return True


END_MOMENT = datetime(2025, 1, 1)
"""When glue is rendered. A date stands in what came before it; a template that writes one after a reply is not bridged."""

__all__ = ["PROBE_TOOLS", "PROBE_USER", "Bridge", "BridgeCheck", "TurnPattern"]


class ReplyEnd(NamedTuple):
    """How a template ends the turn of a reply."""

    text: str
    token_id: int
    """The one token that `text` is."""
    final: int
    """The token that ends the last reply of a conversation. Where it is another one, a template that goes on rewrites it."""


class UserTurnFrame(NamedTuple):
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
        """Tokens from the end of a sampled reply to where the next one begins; None where that is not proven.

        `last_id` is the reply's last token. A reply that ended its turn itself is not closed twice; one that was cut is closed.
        `system` says whether the conversation begins with a system text, `thought` whether an earlier reply whose tokens are on
        the path holds reasoning; with None, the glue must be proven both ways.
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
        """Compare the glue with whole renderings over every situation."""
        return BridgeChecker(self._template, self._tokenizer, self).run(native_tools=self._native_tools)

    def tail(self, reply: Message, kind: ReplyKind, new: Sequence[Message]) -> str | None:
        """Text from the end of a reply's turn on: the close, the new messages, the head of the next reply."""
        if kind not in self._ends:
            return None
        if self._frame is not None and kind == "text" and len(new) == 1 and new[0].keys() == PLAIN and new[0]["role"] == "user":
            return self._frame.before + new[0]["content"] + self._frame.after
        text = self._template.render([PROBE_USER, _stand_in(reply, kind), *new], generate=True, now=END_MOMENT)
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

    def _find_frame(self) -> "UserTurnFrame | None":
        """What stands around a user's words, if the words change nothing in it: then most calls need no template."""
        if "text" not in self._ends:
            return None
        try:
            tails = {words: self._tail_of(words) for words in (MARK, *WORDS)}
        except RenderError:
            return None
        before, _, after = (tails[MARK] or "").partition(MARK)
        is_plain = all(tail == before + words + after for words, tail in tails.items())
        return UserTurnFrame(before, after) if is_plain else None

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
            return self._template.render(messages, generate=generate, now=END_MOMENT)
        except RenderError:
            return None


def _stand_in(reply: Message, kind: ReplyKind) -> Message:
    """A short reply of the same kind, with the names and ids of the calls, which results refer to."""
    if kind == "text":
        return PROBE_TEXT
    calls = [{**call, "function": {**call["function"], "arguments": "{}"}} for call in reply["tool_calls"]]
    return {"role": "assistant", "content": PROBE_TEXT["content"] if kind.startswith("text") else "", "tool_calls": calls}
