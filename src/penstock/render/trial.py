"""The bridge's start-up check: glue against whole renderings, over every probe conversation, down to the token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from penstock.errors import RenderError
from penstock.records import Message
from penstock.render.chat import ChatTemplate, flatten, json_value
from penstock.render.probes import PROBE_TEXT, PROBE_TOOLS, PROBE_USER, THOUGHT, Case, ReplyKind, Situation, cases
from penstock.render.tokenizer import Tokenizer

MOMENT = datetime(2031, 12, 30, 23, 45)
"""When the trial's conversations are rendered: not when glue is, so that a date in it shows, and midnight makes no difference."""

OTHER_TOOLS = ({**PROBE_TOOLS[0], "function": {**PROBE_TOOLS[0]["function"], "description": "In the trial's tools alone."}},)
"""Glue is rendered without tools, so that any that turn up in it show."""


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    """What the check found."""

    proven: frozenset[Situation]
    unproven: dict[Situation, str]
    """Situations in which calls are rendered from scratch, with the first thing that went wrong."""


class Gluing(Protocol):
    """What is tried."""

    def tail(self, reply: Message, kind: ReplyKind, new: Sequence[Message]) -> str | None:
        """Text from the end of a reply's turn on; None where that cannot be told."""
        ...

    def after(self, last_id: int | None, kind: ReplyKind, tail: str) -> tuple[int, ...] | None:
        """The tail's tokens after the reply's last one."""
        ...

    def end_id(self, kind: ReplyKind) -> int:
        """The token that ends a reply's turn."""
        ...


class Trial:
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
        agreed: set[Situation] = set()
        failed: dict[Situation, str] = {}
        refused: dict[Situation, str] = {}
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

    def _compare(self, case: Case) -> str | None:
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

    def _tail(self, case: Case) -> str | None:
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
