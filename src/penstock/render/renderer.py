"""Messages to token ids and sampled ids to messages, for one model: tokenizer, template, tools and bridge in one hand."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ModelError
from penstock.records import Message
from penstock.render import TOOL_FORMATS
from penstock.render.bridge import PROBE_TOOLS, PROBE_USER, Bridge
from penstock.render.chat import ChatTemplate, Tool
from penstock.render.tokenizer import Tokenizer
from penstock.render.tools import ToolFormat, ToolParser


class Renderer:
    """How one model is spoken to.

    A template that renders tools in a form we can read back keeps them; any other model gets them in the Hermes form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.template:
            raise ModelError("the model has no chat template; add chat_template.jinja to its folder")
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.template, tokenizer.named)
        native = self._native_format()
        self.native_tools = native is not None
        """Whether the template renders tools itself, in a form that we can read back."""
        self._format: ToolFormat = native or TOOL_FORMATS.load("hermes")()
        self.bridge = Bridge(self.template, tokenizer, native_tools=self.native_tools)
        end_of_turn = [i for i in self.bridge.close_ids if i in tokenizer.special_ids][:1]
        self.stop_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *end_of_turn]))
        """Ids that end a reply."""

    @classmethod
    def load(cls, folder: Path) -> "Renderer":
        """The renderer of the model in `folder`; runs the bridge's check."""
        return cls(Tokenizer.load(folder))

    def root(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Prompt ids of a whole conversation, rendered from scratch."""
        plain: list[Message] = self.tokenizer.shield(messages)
        schemas: list[Tool] = self.tokenizer.shield(tools)
        if not self.native_tools:
            plain, schemas = self._format.offer(plain, schemas), []
        return tuple(self.tokenizer.encode(self.template.render(plain, schemas, generate=True)))

    def extend(self, reply: Message, new: Sequence[Message], *, last_id: int | None, tools: bool) -> tuple[int, ...] | None:
        """Ids that `new` messages add after a sampled `reply`; None where the template may have rewritten what came before."""
        plain: list[Message] = self.tokenizer.shield([reply, *new])
        if not self.native_tools:
            plain, tools = self._format.flatten(plain), False
        return self.bridge.glue(plain[0], plain[1:], last_id=last_id, tools=tools)

    def parser(self) -> ToolParser:
        """Reads the tool calls of one reply."""
        return self._format.parser()

    def _native_format(self) -> ToolFormat | None:
        plain = self.template.render([PROBE_USER], generate=True)
        if plain == self.template.render([PROBE_USER], PROBE_TOOLS, generate=True):
            return None
        forms: list[ToolFormat] = [TOOL_FORMATS.load(name)() for name in TOOL_FORMATS]
        return next((form for form in forms if form.matches(self.template.source)), None)
