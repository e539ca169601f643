"""Sources of replies: an engine that samples token ids after a rendered prompt, or an endpoint that returns text."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from penstock.chat.grammars import grammar_problem, schema_problem
from penstock.chat.media import as_text, media_of
from penstock.chat.parsers.base import Reasoning, ReplyParser, Text
from penstock.chat.renderer import Renderer
from penstock.chat.templates import Tool
from penstock.config import EngineSection
from penstock.engines.base import Engine, SampledChunk, TokenPath, sees_pictures
from penstock.engines.text_endpoints.base import (
    ArgumentsPart,
    ReasoningPart,
    ReplyPart,
    TextChunk,
    TextEndpoint,
    TextPart,
    TextRequest,
    ToolCallPart,
)
from penstock.errors import RequestError
from penstock.gateway.dialects.base import DialectTokenizer
from penstock.gateway.graph import TokenGraph
from penstock.gateway.prompt import ContextBound, PictureReader, RootCache, make_prompt
from penstock.gateway.reply import Delta, ReplyBuilder, ReplyText, SampledReply
from penstock.gateway.request import LastRequest, ModelCall, Prompt
from penstock.pool.rows import PictureStore
from penstock.records import Finish, Message, ReplyGrammar, Sampling, Step, Usage
from penstock.sdk.routing import PLACEHOLDER_NAMES

CLOSING_TAG = re.compile(r"\s*</\w+>")
"""Ends reasoning, before the rest of a reply."""


class CallGrammar(NamedTuple):
    """The grammar of a call's reply."""

    grammar: ReplyGrammar | None = None
    """None if the reply may be any text."""
    ignored: tuple[str, ...] = ()
    """What was asked for and cannot be enforced; see `ModelCall.ignored`."""


class ReplySource(Protocol):
    """What the pipeline asks for a reply. Which one it is, the gateway decides once."""

    @property
    def engine(self) -> Engine: ...

    @property
    def tokenizer(self) -> DialectTokenizer: ...

    @property
    def dialects(self) -> frozenset[str] | None:
        """The dialects that it supports; None for all."""
        ...

    async def prompt(self, graph: TokenGraph, call: ModelCall, last_request: LastRequest) -> Prompt:
        """Makes the prompt of a call; `last_request` is its transcript's, with the digests of what it repeats."""
        ...

    async def count_tokens(self, call: ModelCall, prompt: Prompt) -> int:
        """The length of the prompt; RequestError if nobody here can count it."""
        ...

    def unmet(self, call: ModelCall) -> Sequence[str]:
        """What the call asks for and is not done. They are counted."""
        ...

    def grammar(self, call: ModelCall, prompt: Prompt) -> CallGrammar:
        """What the reply may consist of; RequestError if a schema cannot be enforced."""
        ...

    def samplings(self, call: ModelCall, max_tokens: int, prompt: Prompt) -> list[Sampling]:
        """Returns the sampling of each choice, with its own seed and at most `max_tokens`; RequestError if not possible."""
        ...

    def reply(self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, seed: str) -> ReplyBuilder:
        """An empty reply, to which the chunks of `generate` are added."""
        ...

    def generate(self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[Any, None]:
        """The chunks of one choice; closing the generator cancels the request."""
        ...

    def call_text(self, prompt: Prompt, step: Step) -> str:
        """The text of a reply with its tool calls as they were sampled, without its reasoning; empty if it is not known."""
        ...

    def parse_calls(self, message: Message, tools: Sequence[Tool]) -> Message:
        """A message of the assistant whose content has the text of tool calls, with these parsed; others as they are."""
        ...

    def facts(self) -> dict[str, object]:
        """Fields of the `gateway.start` event."""
        ...


class Rendering(NamedTuple):
    """A renderer with the roots that it has rendered."""

    renderer: Renderer
    roots: RootCache


MAX_VARIANTS = 8
"""Renderers for different template options that are kept."""


class TokenSource:
    """See `ReplySource`: an engine with the renderer of its model."""

    dialects = None

    def __init__(self, engine: Engine, renderer: Renderer, store: PictureStore | None = None) -> None:
        """Without a `store` no picture is passed on to the engine."""
        self.engine = engine
        self._renderer = renderer
        self._pictures = PictureReader(engine, renderer, store) if store is not None and sees_pictures(engine) else None
        self._bound = ContextBound(renderer, engine)
        self._roots = RootCache(renderer, self._bound)
        self._variants = lru_cache(MAX_VARIANTS)(self._variant)

    @property
    def tokenizer(self) -> DialectTokenizer:
        return self._renderer.tokenizer

    async def prompt(self, graph: TokenGraph, call: ModelCall, last_request: LastRequest) -> Prompt:
        if self._pictures is not None:
            call = await self._pictures.read(call)
        chains = last_request.chains(call.messages, call.tools)
        renderer, roots = await self._rendering(call)
        prompt = await make_prompt(graph, renderer, roots, self._bound, call, chains)
        return replace(prompt, messages=tuple(map(as_text, prompt.messages)), omitted=tuple(media_of(prompt.messages)))

    async def count_tokens(self, call: ModelCall, prompt: Prompt) -> int:
        return len(prompt.ids)

    def unmet(self, call: ModelCall) -> Sequence[str]:
        return call.ignored

    def grammar(self, call: ModelCall, prompt: Prompt) -> CallGrammar:
        """See `ReplySource.grammar`. The schema of a tool that must be called binds if it can, that of a strict tool always."""
        writer, tools = self._renderer.grammars, _callable_tools(call)
        asked = (("tools.strict", call.strict), ("tool_choice.allowed_tools", call.allowed)) if tools else ()
        unmet = tuple(name for name, names in asked if names)
        if call.raw is not None:
            return CallGrammar()
        if call.forced is not None:
            if not writer.constrains_calls:
                return CallGrammar(None, unmet)
            every = writer.forced_call(call.forced, tools, frozenset(tool["function"]["name"] for tool in tools))
            if not grammar_problem(every.lark):
                return CallGrammar(every)
            return CallGrammar(
                _compilable(writer.forced_call(call.forced, tools, call.strict), call, "tools"), ("tools.parameters",)
            )
        if call.format is not None:
            grammar = self._renderer.reply_grammar(call.format, tools, call.strict, prompt=prompt.ids)
            return CallGrammar(_compilable(grammar, call, call.format_field), () if writer.constrains_calls else unmet)
        if not (call.strict or call.allowed) or not tools:
            return CallGrammar()
        grammar = self._renderer.text_grammar(tools, call.strict, prompt=prompt.ids) if writer.constrains_calls else None
        return CallGrammar(None, unmet) if grammar is None else CallGrammar(_compilable(grammar, call, "tools"))

    def samplings(self, call: ModelCall, max_tokens: int, prompt: Prompt) -> list[Sampling]:
        """See `ReplySource.samplings`; also limited by the model's context."""
        room = self.engine.context_length - len(prompt.ids)
        if room < 1:
            raise self._bound.error(len(prompt.ids))
        asked = call.sampling
        ends = tuple(dict.fromkeys([*self._renderer.stop_ids, *asked.stop_ids]))
        tokens = min(asked.max_tokens, max_tokens, room)
        return [replace(asked, max_tokens=tokens, stop_ids=ends, seed=seed) for seed in seeds(call)]

    def reply(self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, seed: str) -> SampledReply:
        renderer = self._renderer

        def text() -> ReplyText:
            decoder = renderer.decoder() if call.raw is None else renderer.tokenizer.decoder()
            return ReplyText(decoder, sampling.stop, self._parser(call, prompt), prompt.forced_prefix)

        return SampledReply(text, seed=seed, prefill=call.prefill, one_call=call.one_call)

    def generate(
        self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, rollout_id: str
    ) -> AsyncGenerator[SampledChunk, None]:
        if not prompt.pictures:
            return self.engine.generate(prompt.ids, sampling, rollout_id=rollout_id)
        assert self._pictures is not None
        return self._pictures.generate(prompt, sampling, rollout_id=rollout_id)

    def call_text(self, prompt: Prompt, step: Step) -> str:
        decoder, reasoning = self._renderer.decoder(), step.message.get("reasoning_content")
        text = prompt.forced_prefix + decoder.push(step.completion_ids) + decoder.finish()
        return (CLOSING_TAG.sub("", text.rpartition(reasoning)[2], count=1) if reasoning else text).strip()

    def parse_calls(self, message: Message, tools: Sequence[Tool]) -> Message:
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str) or not content:
            return message
        parser = self._renderer.parser(calls=True, eager=False, tools=tools, prompt=())
        parsed = SampledReply(lambda: ReplyText(self._renderer.decoder(), (), parser), seed="")
        parsed.issue([*parser.push(content), *parser.finish()])
        if not parsed.calls:
            return message
        return {"tool_calls": parsed.message()["tool_calls"], **message, "content": parsed.message()["content"]}

    def facts(self) -> dict[str, object]:
        """What was verified of the chat template."""
        result = self._renderer.bridge.result
        return {"bridge_proven": len(result.proven), "bridge_unproven": Counter(result.unproven.values())}

    def _parser(self, call: ModelCall, prompt: Prompt) -> ReplyParser | None:
        """Parses tool calls and reasoning; None for a prompt without a chat template."""
        if call.raw is not None:
            return None
        tools = (*call.tools, *call.deferred)
        return self._renderer.parser(calls=call.reads_calls, eager=call.stream, tools=tools, prompt=prompt.ids)

    async def _rendering(self, call: ModelCall) -> "Rendering":
        """The renderer for the call's template options. The bridge of each is checked when it is first asked for."""
        if not call.template_options:
            return Rendering(self._renderer, self._roots)
        return await asyncio.to_thread(self._variants, call.template_options)

    def _variant(self, options: str) -> "Rendering":
        renderer = Renderer(self._renderer.tokenizer, orjson.loads(options))
        return Rendering(renderer, RootCache(renderer, self._bound))


def _callable_tools(call: ModelCall) -> tuple[Tool, ...]:
    tools = (*call.tools, *call.deferred) if call.reads_calls else ()
    return tuple(tool for tool in tools if not call.allowed or tool["function"]["name"] in call.allowed)


def _compilable(grammar: ReplyGrammar, call: ModelCall, field: str) -> ReplyGrammar:
    if not (problem := grammar_problem(grammar.lark)):
        return grammar
    strict = (tool["function"] for tool in _callable_tools(call) if tool["function"]["name"] in call.strict)
    found = ((each["name"], schema_problem(each.get("parameters") or {})) for each in strict)
    name, why = next(((name, why) for name, why in found if why), ("", problem))
    place, which = ("tools", f" of {name!r}") if name else (field, "")
    raise RequestError(f"{place}: the schema{which} cannot be enforced: {why}", code="invalid_schema", param=place)


def seeds(call: ModelCall) -> list[int | None]:
    """The seed of each choice."""
    asked = call.sampling.seed
    return [None if asked is None else asked + choice for choice in range(call.choices)]


class TextEndpointSource:
    """See `ReplySource`: an endpoint that returns text. Its steps have no tokens."""

    dialects = frozenset({"chat", "responses", "messages"})

    def __init__(self, engine: TextEndpoint) -> None:
        self.engine = engine
        self.tokenizer: DialectTokenizer = NoTokenizer(engine.model)

    async def prompt(self, graph: TokenGraph, call: ModelCall, last_request: LastRequest) -> Prompt:
        """See `ReplySource.prompt`: the new messages without tokens, after the path that they continue."""
        match = graph.match(call.messages, last_request.chains(call.messages, call.tools), call.policy)
        tools = call.tools if match.step is None else ()
        new = call.messages[match.known :]
        chain, reason = match.chain, match.reason
        return Prompt(ids=TokenPath(), parent=match.step, added=(), messages=new, tools=tools, chain=chain, reason=reason)

    async def count_tokens(self, call: ModelCall, prompt: Prompt) -> int:
        tokens = await self.engine.count_tokens(self._request(call, call.sampling))
        if tokens is None:
            raise no_tokens_error(self.engine.model, "its prompts cannot be counted here")
        return tokens

    def unmet(self, call: ModelCall) -> Sequence[str]:
        """What the endpoint's API has no name for is left out; its log-probabilities are not given back."""
        neutral = Sampling()
        lost = [name for name in self.engine.unknown_sampling if getattr(call.sampling, name) != getattr(neutral, name)]
        asked = {*call.ignored, *(name for name in HONOURED_BY_TOKENS if call.extra.get(name))}
        lost += sorted(name for name in asked if not self.engine.gets(name, call.dialect, call.extra))
        return [*lost, *(["logprobs"] if call.logprobs else [])]

    def grammar(self, call: ModelCall, prompt: Prompt) -> CallGrammar:
        """The endpoint has its own."""
        return CallGrammar()

    def samplings(self, call: ModelCall, max_tokens: int, prompt: Prompt) -> list[Sampling]:
        asked = call.sampling
        if call.token_ids:
            raise no_tokens_error(self.engine.model, "leave return_token_ids out", param="return_token_ids")
        return [replace(asked, max_tokens=min(asked.max_tokens, max_tokens), seed=seed) for seed in seeds(call)]

    def reply(self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, seed: str) -> "TextEndpointReply":
        return TextEndpointReply(seed=seed, prefill=call.prefill, signed=call.dialect == "messages")

    def generate(self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[TextChunk, None]:
        return self.engine.complete(self._request(call, sampling), rollout_id=rollout_id)

    def _request(self, call: ModelCall, sampling: Sampling) -> TextRequest:
        begun: list[Message] = [{"role": "assistant", "content": call.prefill}] if call.prefill else []
        return TextRequest(
            messages=[*call.messages, *begun],
            sampling=sampling,
            tools=[*call.tools, *call.deferred],
            may_call=call.reads_calls,
            forced=call.forced,
            allowed=call.allowed,
            one_call=call.one_call,
            extra=call.extra,
            dialect=call.dialect,
            strict=call.strict,
            format=call.format,
        )

    def call_text(self, prompt: Prompt, step: Step) -> str:
        return ""

    def parse_calls(self, message: Message, tools: Sequence[Tool]) -> Message:
        return message

    def facts(self) -> dict[str, object]:
        return {"relayed": True}


HONOURED_BY_TOKENS = ("logit_bias", "chat_template_kwargs")
"""Fields that an engine with tokens honours, and that only some endpoints know."""


class TextEndpointReply(ReplyBuilder):
    """A reply of an endpoint. A tool call without an id gets one of ours. With `signed`, its reasoning keeps its signatures."""

    def __init__(self, *, seed: str, prefill: str, signed: bool) -> None:
        super().__init__(seed=seed, prefill=prefill)
        self._signed = signed
        self._thinking: list[Reasoning] = []
        """Blocks of reasoning; all but the last are signed."""

    def add(self, chunk: TextChunk) -> list[Delta]:
        deltas = [delta for part in chunk.parts for delta in self._add_part(part)]
        if chunk.finish is None:
            return deltas
        self.usage = chunk.usage or self.usage
        return [*deltas, *self.end(chunk.finish)]

    def end(self, finish: Finish) -> list[Delta]:
        if self.finish is not None:
            return []
        self.finish = finish
        self.usage = self.usage or Usage(prompt_tokens=0, completion_tokens=0)
        return self._complete_arguments()

    def _add_part(self, part: ReplyPart) -> list[Delta]:
        if isinstance(part, ArgumentsPart):
            return [self.add_arguments(part.text)] if self.calls else []
        if isinstance(part, ToolCallPart):
            return [*self._complete_arguments(), self.add_call(part.name, "", call_id=part.id)]
        if isinstance(part, TextPart):
            return [self.add_text(Text(part.text))]
        return self._add_reasoning(part)

    def _add_reasoning(self, part: ReasoningPart) -> list[Delta]:
        if part.signature and not self._signed:
            return []
        if not self._thinking or self._thinking[-1].signature:
            self._thinking.append(Reasoning(""))
        last = self._thinking[-1]
        self._thinking[-1] = Reasoning(last.text + part.text, part.signature)
        return [self.add_text(Reasoning(part.text, part.signature))]

    def message(self) -> Message:
        """See `ReplyBuilder`; with the blocks of signed reasoning as Anthropic's API has them, which demands them back."""
        blocks = [{"type": "thinking", "thinking": each.text, "signature": each.signature} for each in self._thinking]
        return super().message() | ({"thinking_blocks": blocks} if any(each.signature for each in self._thinking) else {})

    def _complete_arguments(self) -> list[Delta]:
        """Gives a call without arguments an empty object: clients parse them as JSON."""
        return [self.add_arguments("{}")] if self.calls and not self.calls[-1].arguments else []


class NoTokenizer:
    """See `DialectTokenizer`: for an endpoint whose tokens are not known."""

    is_known = False

    def __init__(self, model: str) -> None:
        self._model = model

    def token_bytes(self, token_id: int) -> bytes:
        raise no_tokens_error(self._model, "send messages")

    def decode(self, ids: Sequence[int]) -> str:
        if ids:
            raise no_tokens_error(self._model, "send messages")
        return ""

    def encode(self, text: str) -> list[int]:
        return []

    def shield(self, value: Any) -> Any:
        return value


def no_tokens_error(model: str, what: str, param: str | None = None) -> RequestError:
    """For a request that needs tokens, at an endpoint that has none."""
    text = f"{model} is behind an endpoint that gives text, and its tokens are not known; {what}"
    return RequestError(text, code="unsupported_parameter", param=param)


# Policies


class ServedPolicy(NamedTuple):
    """What answers under a policy's name."""

    engine: Engine
    renderer: Renderer | None
    """None if the engine returns text."""
    default: bool = False
    """Whether it also answers under names of no policy."""


class PolicySources:
    """The source of each policy's replies. Without policies it is one, under the empty name, and it answers every model name."""

    def __init__(self, main: ReplySource, policies: Mapping[str, ServedPolicy]) -> None:
        self.by_name = {name: make_source(policy.engine, policy.renderer) for name, policy in policies.items()} or {"": main}
        self._default = next((name for name, policy in policies.items() if policy.default), None) if policies else ""

    @property
    def names(self) -> list[str]:
        """The names of the policies; empty if there are none."""
        return [name for name in self.by_name if name]

    def choose(self, model: object, transcript: str) -> str:
        """The policy that answers a call for `model`, else the one of the transcript's name; RequestError 404 if none does.

        The second is for frameworks whose agents have a name and leave that of the model to us.
        """
        for name in (model, transcript):
            if isinstance(name, str) and name in self.by_name:
                return name
        if self._default is None:
            raise self.unknown(model)
        return self._default

    def named(self, model: str) -> str | None:
        """The policy of this name, or that answers the placeholder; None if there is none."""
        if model in self.names:
            return model
        return self._default if model in PLACEHOLDER_NAMES else None

    def unknown(self, model: object) -> RequestError:
        named = f"there is no model {str(model)[:200]!r}" if model else "the request names no model"
        text = f"{named}; this gateway serves the policies {', '.join(self.names)}"
        return RequestError(text, status=404, code="model_not_found", param="model")


async def load_renderer(section: EngineSection, model: Path) -> Renderer | None:
    """Loads the renderer of the model in folder `model`; None for an engine that returns text."""
    return None if section.text_only else await asyncio.to_thread(Renderer.load, model)


def make_source(engine: Engine, renderer: Renderer | None, pictures: PictureStore | None = None) -> ReplySource:
    if isinstance(engine, TextEndpoint):
        return TextEndpointSource(engine)
    assert renderer is not None, "an engine that takes token ids needs its model's renderer"
    return TokenSource(engine, renderer, pictures)
