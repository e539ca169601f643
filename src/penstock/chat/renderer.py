"""One model's renderer: messages to prompt ids, what a reply adds to them, and the reply's text, reasoning and tool calls."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.chat.bridge import PROBE_TOOLS, PROBE_USER, Bridge
from penstock.chat.parsers import TOOL_FORMATS
from penstock.chat.parsers.base import ParseOptions, ReplyParser, ToolFormat, close_reasoning, find_reasoning_tags, opens_reasoning
from penstock.chat.parsers.hermes import Hermes
from penstock.chat.templates import ChatTemplate, Tool, has_reasoning, simpler_forms
from penstock.chat.tokenizer import TextDecoder, Tokenizer
from penstock.errors import ModelError, RenderError
from penstock.records import Message

TAIL = 16
"""Tokens at a prompt's end that tell whether it opens the reasoning; a mark spelled out byte by byte has fewer."""


class RenderedPrompt(NamedTuple):
    """The beginning of a reply that stands in the prompt already."""

    ids: tuple[int, ...]
    text: str


class Renderer:
    """How one model is spoken to.

    A template that renders tools in a form we can read back keeps them; any other model gets them in the Hermes form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.template:
            raise ModelError("the model has no chat template; add chat_template.jinja to its folder")
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.template, tokenizer.named)
        self._hermes = Hermes()
        self._takes_system = self._renders([{"role": "system", "content": "Be brief."}, PROBE_USER])
        native = self._native_format()
        self.native_tools = native is not None
        """Whether the template renders tools itself, in a form that we can read back."""
        self._format: ToolFormat = native or self._hermes
        self._marks = find_reasoning_tags(self.template.source)
        self._thinking = opens_reasoning(self.template.render([PROBE_USER], generate=True), self._marks)
        self.bridge = Bridge(self.template, tokenizer, native_tools=self.native_tools)
        self.stop_ids = self._find_stops()
        """Ids that end a reply."""
        self._hidden = self._find_hidden()

    @classmethod
    def load(cls, folder: Path) -> "Renderer":
        """The renderer of the model in `folder`; runs the bridge's check."""
        return cls(Tokenizer.load(folder))

    def root(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Prompt ids of a whole conversation, rendered from scratch; one that the template refuses is told in a milder form."""
        plain: list[Message] = self.tokenizer.shield(messages)
        schemas: list[Tool] = self.tokenizer.shield(tools)
        try:
            text = self._whole(plain, schemas)
        except RenderError as refusal:
            text = self._told_mildly(plain, schemas, refusal)
        return tuple(self.tokenizer.encode(text))

    def extend(
        self,
        reply: Message,
        new: Sequence[Message],
        *,
        last_id: int | None,
        tools: bool,
        system: bool | None = None,
        thought: bool | None = None,
    ) -> tuple[int, ...] | None:
        """Ids that `new` messages add after a sampled `reply`; None where the template may have rewritten what came before.

        `system` and `thought` tell of the path before the reply, as in `Bridge.glue`.
        """
        messages: list[Message] = self.tokenizer.shield([reply, *new])
        if has_reasoning(reply):
            thought = True
        if self.native_tools:
            plain = self._format.prepare(messages)
            if len(plain) != len(messages):
                return None
        else:
            plain, system = self._hermes.flatten(messages), self._takes_system if tools else system
            tools = False
        return self.bridge.glue(plain[0], plain[1:], last_id=last_id, tools=tools, system=system, thought=thought)

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """Ids of text that no template touches: nothing is added, and special tokens in it are plain text."""
        return tuple(self.tokenizer.encode(self.tokenizer.shield(text)))

    def begin(self, name: str, *, prompt: Sequence[int] | None = None) -> RenderedPrompt | None:
        """How a reply begins that must call this tool, or any where the name is empty; None where that cannot be forced."""
        begin = self._format.begin
        if begin(name) is None:
            return None
        close = close_reasoning(self._marks) if self._marks and self._thinks(prompt) else ""
        shielded = begin(self.tokenizer.shield(name))
        return RenderedPrompt(tuple(self.tokenizer.encode(f"{close}{shielded}")), f"{close}{begin(name)}")

    def parser(self, *, calls: bool, eager: bool, tools: Sequence[Tool] = (), prompt: Sequence[int] | None = None) -> ReplyParser:
        """Reads one reply; see `Reading`. `prompt` tells whether its own end opens the reasoning, where prompts differ in that."""
        return self._format.parser(ParseOptions(calls, eager, self._marks, self._thinks(prompt), tools))

    def decoder(self) -> TextDecoder:
        """Ids to the text that `parser` reads: markup is shown, what ends a reply and other special tokens are not."""
        return self.tokenizer.decoder(hidden=self._hidden)

    def _thinks(self, prompt: Sequence[int] | None) -> bool:
        if prompt is None or self._marks is None:
            return self._thinking
        decoder = self.tokenizer.decoder(hidden=frozenset())
        return opens_reasoning(decoder.push(prompt[-TAIL:]) + decoder.finish(), self._marks)

    def _whole(self, messages: list[Message], tools: list[Tool]) -> str:
        if self.native_tools:
            return self.template.render(self._format.prepare(messages), tools, generate=True)
        return self.template.render(self._hermes.offer(messages, tools, system=self._takes_system), generate=True)

    def _told_mildly(self, messages: list[Message], tools: list[Tool], refusal: RenderError) -> str:
        for milder_one in simpler_forms(messages):
            try:
                return self._whole(milder_one, tools)
            except RenderError:
                continue
        raise refusal

    def _renders(self, messages: Sequence[Message]) -> bool:
        try:
            self.template.render(messages, generate=True)
        except RenderError:
            return False
        return True

    def _native_format(self) -> ToolFormat | None:
        plain = self.template.render([PROBE_USER], generate=True)
        if plain == self.template.render([PROBE_USER], PROBE_TOOLS, generate=True):
            return None
        forms: list[ToolFormat] = [TOOL_FORMATS.load(name)() for name in TOOL_FORMATS]
        return next((form for form in forms if form.matches(self.template.source)), None)

    def _find_stops(self) -> tuple[int, ...]:
        ends = self._ids_of(self._format.ends) or self.bridge.close_ids
        return tuple(dict.fromkeys([*self.tokenizer.eos_ids, *ends]))

    def _find_hidden(self) -> frozenset[int]:
        shown = {*self._ids_of(self._format.special), *self._ids_of(self._marks or ())}
        return (self.tokenizer.special_ids - shown) | {*self.stop_ids}

    def _ids_of(self, tokens: Sequence[str]) -> list[int]:
        ids = [self.tokenizer.core.token_to_id(token) for token in tokens]
        return [token_id for token_id in ids if token_id is not None]
