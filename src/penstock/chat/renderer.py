"""Renderer of one model: messages to prompt ids, and sampled ids to text, reasoning and tool calls."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from penstock.chat.bridge import PROBE_TEXT, PROBE_TOOLS, PROBE_USER, Bridge
from penstock.chat.grammars import GrammarWriter
from penstock.chat.media import PICTURE, pictures_of
from penstock.chat.parsers import TOOL_FORMATS
from penstock.chat.parsers.base import ParseOptions, ReplyParser, ToolFormat, close_reasoning, find_reasoning_tags, opens_reasoning
from penstock.chat.parsers.hermes import Hermes
from penstock.chat.templates import ChatTemplate, Tool, has_reasoning, simpler_forms
from penstock.chat.tokenizer import TextDecoder, Tokenizer
from penstock.errors import ModelError, RenderError
from penstock.records import Message, ReplyFormat, ReplyGrammar

PROMPT_TAIL_TOKENS = 16
"""Tokens at a prompt's end that are decoded to see whether it opens reasoning; even a tag spelled in bytes has fewer."""

PICTURED: Message = {"role": "user", "content": [{"type": PICTURE, "digest": "", "media_type": "image/png"}]}
"""A message with nothing but a picture."""

LAST_ROOTS, MAX_KEPT = 32, 1 << 16
"""The last prompts' ids are kept, since all rollouts of a group begin with the same one; not those of longer texts."""


class RenderedPrompt(NamedTuple):
    """The beginning of a reply that is appended to the prompt, to force a tool call."""

    ids: tuple[int, ...]
    text: str


class Renderer:
    """Chat template, tokenizer, bridge and tool format of one model.

    If the template renders tools in a known format, that is used; any other model gets tools in the Hermes format.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> None:
        """`options` are further variables of the template, such as `enable_thinking`."""
        if not tokenizer.template:
            raise ModelError("the model has no chat template; add chat_template.jinja to its folder")
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.template, {**tokenizer.named, **(options or {})})
        self._hermes = Hermes()
        self._takes_system = self._renders([{"role": "system", "content": "Be brief."}, PROBE_USER])
        native = self._native_format()
        self.native_tools = native is not None
        """Whether the template renders tools itself, in a format that we can parse."""
        self._format: ToolFormat = native or self._hermes
        self._tags = find_reasoning_tags(self.template.source)
        self._starts_reasoning = opens_reasoning(self.template.render([PROBE_USER], generate=True), self._tags)
        self.bridge = Bridge(self.template, tokenizer, native_tools=self.native_tools)
        self._last_roots = lru_cache(LAST_ROOTS)(self._encode)
        self.stop_ids = self._find_stop_ids()
        """Ids that end a reply."""
        self._hidden_ids = self._find_hidden_ids()

    @cached_property
    def grammars(self) -> GrammarWriter:
        added = self.tokenizer.core.get_added_tokens_decoder()
        return GrammarWriter(self._format, self._tags, [(token.content, i) for i, token in added.items()])

    @classmethod
    def load(cls, folder: Path) -> "Renderer":
        """Load the renderer of a model folder and run the bridge's check."""
        return cls(Tokenizer.load(folder))

    def root(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Prompt ids of a whole conversation. If the template refuses it, simpler forms of it are tried."""
        plain: list[Message] = self.tokenizer.shield(messages)
        schemas: list[Tool] = self.tokenizer.shield(tools)
        try:
            text = self._render_whole(plain, schemas)
        except RenderError as refusal:
            text = self._render_simpler(plain, schemas, refusal)
        return self._last_roots(text) if len(text) <= MAX_KEPT else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
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
        """Ids that `new` messages add after a sampled `reply`; None if the template may rewrite what came before.

        `system` and `thought` describe the path before the reply; see `Bridge.glue`.
        """
        if pictures_of(new) and not self._appends_pictures:
            return None
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
        """Ids of text without a template. Nothing is added, and special tokens in it are plain text."""
        return tuple(self.tokenizer.encode(self.tokenizer.shield(text)))

    def begin(self, name: str, *, prompt: Sequence[int] | None = None) -> RenderedPrompt | None:
        """The beginning of a reply that must call this tool, or any tool if the name is empty; None if that cannot be forced."""
        begin = self._format.begin
        if begin(name) is None:
            return None
        close = close_reasoning(self._tags) if self._tags and self._opens_reasoning(prompt) else ""
        shielded = begin(self.tokenizer.shield(name))
        return RenderedPrompt(tuple(self.tokenizer.encode(f"{close}{shielded}")), f"{close}{begin(name)}")

    def begin_text(self, text: str, *, prompt: Sequence[int] | None = None) -> RenderedPrompt:
        """The beginning of a reply that must continue `text`; reasoning that the prompt opens is closed before it."""
        close = close_reasoning(self._tags) if self._tags and self._opens_reasoning(prompt) else ""
        return RenderedPrompt(tuple(self.tokenizer.encode(f"{close}{self.tokenizer.shield(text)}")), text)

    def reply_grammar(
        self, form: ReplyFormat, tools: Sequence[Tool], strict: frozenset[str], *, prompt: Sequence[int]
    ) -> ReplyGrammar:
        """The grammar of a reply that is JSON; see `GrammarWriter.reply`."""
        return self.grammars.reply(form, tools, strict, thinking=self._opens_reasoning(prompt))

    def text_grammar(self, tools: Sequence[Tool], strict: frozenset[str], *, prompt: Sequence[int]) -> ReplyGrammar | None:
        """The grammar of text with calls; see `GrammarWriter.free_text`."""
        return self.grammars.free_text(tools, strict, thinking=self._opens_reasoning(prompt))

    def parser(self, *, calls: bool, eager: bool, tools: Sequence[Tool] = (), prompt: Sequence[int] | None = None) -> ReplyParser:
        """A parser for one reply; see `ParseOptions`. `prompt` shows whether the reply begins inside reasoning."""
        return self._format.parser(ParseOptions(calls, eager, self._tags, self._opens_reasoning(prompt), tools))

    def decoder(self) -> TextDecoder:
        """A decoder of ids to the text that `parser` reads: with tool markup, without other special tokens."""
        return self.tokenizer.decoder(hidden=self._hidden_ids)

    def _opens_reasoning(self, prompt: Sequence[int] | None) -> bool:
        if prompt is None or self._tags is None:
            return self._starts_reasoning
        decoder = self.tokenizer.decoder(hidden=frozenset())
        return opens_reasoning(decoder.push(prompt[-PROMPT_TAIL_TOKENS:]) + decoder.finish(), self._tags)

    @cached_property
    def _appends_pictures(self) -> bool:
        """Whether a message with a picture is rendered alike after text and after other pictures, which some templates number."""
        try:
            texts = [self.template.render([first, PROBE_TEXT, PICTURED], generate=True) for first in (PROBE_USER, PICTURED)]
        except RenderError:
            return False
        after_text, after_picture = (text.partition(PROBE_TEXT["content"])[2] for text in texts)
        return bool(after_text) and after_text == after_picture

    def _render_whole(self, messages: list[Message], tools: list[Tool]) -> str:
        if self.native_tools:
            return self.template.render(self._format.prepare(messages), tools, generate=True)
        return self.template.render(self._hermes.offer(messages, tools, system=self._takes_system), generate=True)

    def _render_simpler(self, messages: list[Message], tools: list[Tool], refusal: RenderError) -> str:
        for form in simpler_forms(messages):
            try:
                return self._render_whole(form, tools)
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

    def _find_stop_ids(self) -> tuple[int, ...]:
        ends = self._ids_of(self._format.ends) or self.bridge.close_ids
        return tuple(dict.fromkeys([*self.tokenizer.eos_ids, *ends]))

    def _find_hidden_ids(self) -> frozenset[int]:
        shown = {*self._ids_of(self._format.special), *self._ids_of(self._tags or ())}
        return (self.tokenizer.special_ids - shown) | {*self.stop_ids}

    def _ids_of(self, tokens: Sequence[str]) -> list[int]:
        ids = [self.tokenizer.core.token_to_id(token) for token in tokens]
        return [token_id for token_id in ids if token_id is not None]
