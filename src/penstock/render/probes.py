"""The conversations that a model's bridge is tried on: each kind of reply, after each kind of history, before all that may follow.

A template can treat apart whether there are tools, a system text, reasoning on the path; what the reply holds; and the roles of
what follows. Each combination is a Situation, proven or not by itself.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import Literal, NamedTuple

from penstock.records import Message
from penstock.render.chat import Tool, flatten

ReplyKind = Literal["text", "call", "calls", "text call", "text calls"]
"""What a reply holds besides reasoning: text, one call, several."""


class Situation(NamedTuple):
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


class Case(NamedTuple):
    """One conversation of a situation."""

    situation: Situation
    history: tuple[Message, ...]
    """Up to where the reply was sampled."""
    reply: Message
    new: tuple[Message, ...]
    earlier: str = ""
    """Reasoning of an earlier reply: a prompt that does not show it says nothing about the situation."""


def kind_of(reply: Message) -> ReplyKind:
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


def cases(*, native_tools: bool) -> Iterator[Case]:
    """Every situation with the conversations that it is tried on.

    A template that knows no tools never sees calls or results: both are plain text to it.
    """
    kinds: tuple[ReplyKind, ...] = ("text", "call", "calls", "text call", "text calls") if native_tools else ("text",)
    for tools, system, kind in product((False, True) if native_tools else (False,), (False, True), kinds):
        head: tuple[Message, ...] = ({"role": "system", "content": "Be exact."},) if system else ()
        for new in _followers(kind, native_tools=native_tools):
            situation = Situation(tools, system, False, kind, roles_of(new))
            for case in _cases(situation, new, native_tools=native_tools):
                yield case._replace(history=head + case.history)


def _followers(kind: ReplyKind, *, native_tools: bool) -> tuple[tuple[Message, ...], ...]:
    if kind in ("calls", "text calls"):
        return PLAIN_FOLLOWERS[:2] + RESULTS_FOLLOWERS
    return PLAIN_FOLLOWERS + (CALLING_FOLLOWERS if native_tools else ()) + (RESULT_FOLLOWERS if kind != "text" else ())


def _cases(situation: Situation, new: tuple[Message, ...], *, native_tools: bool) -> Iterator[Case]:
    """The conversations of a situation, and of the same one with reasoning: in the reply, before it, or both."""
    reply, thought = _reply(situation.reply), situation._replace(reasoning=True)
    pensive = {**reply, "reasoning_content": THOUGHT}
    histories = ((PROBE_USER,), AFTER_TEXT, *((IN_LOOP, AFTER_LOOP) if native_tools else ()))
    for history in histories:
        yield Case(situation, history, reply, new)
    for ugly in UGLY_FOLLOWERS.get(situation.follows, ()):
        yield Case(situation, (PROBE_USER,), reply, ugly)
    if situation.reply == "text":
        for content in UGLY_TEXTS:
            yield Case(situation, (PROBE_USER,), _said(content), new)
    yield Case(thought, (PROBE_USER,), pensive, new)
    for history in histories[1:3]:
        yield Case(thought, history, pensive, new)
        yield Case(thought, _thinking(history), reply, new, EARLIER)
    yield Case(thought, _thinking(histories[-1]), pensive, new, EARLIER)


def _reply(kind: ReplyKind) -> Message:
    if kind == "text":
        return PROBE_TEXT
    calls = [call for place in range(2 if kind.endswith("calls") else 1) for call in call_probe(place)["tool_calls"]]
    return {**_said("I ask." if kind.startswith("text") else ""), "tool_calls": calls}


def _thinking(history: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same with reasoning in its last reply."""
    last = max(place for place, message in enumerate(history) if message["role"] == "assistant")
    return (*history[:last], {**history[last], "reasoning_content": EARLIER}, *history[last + 1 :])
