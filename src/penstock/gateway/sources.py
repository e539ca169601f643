"""Where replies come from. An engine's are sampled token by token after a prompt of ours; see `relayed` for those of endpoints."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.chat.parsers.base import Reasoning, ReplyParser, Text
from penstock.chat.renderer import Renderer
from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.base import Engine, SampledChunk
from penstock.engines.text_endpoints.base import (
    ArgumentsPart,
    ReplyPart,
    TextChunk,
    TextEndpoint,
    TextPart,
    TextRequest,
    ToolCallPart,
)
from penstock.errors import RequestError
from penstock.gateway.call import Call, Prompt
from penstock.gateway.dialects.base import Spelling
from penstock.gateway.graph import TokenGraph, TokenPath
from penstock.gateway.prompt import Roots, make_prompt
from penstock.gateway.reply import Delta, Reply, ReplyBuilder, ReplyText
from penstock.records import Finish, Sampling, Usage


class Source(Protocol):
    """What the service asks for a reply. Which one it is, the gateway decides once."""

    @property
    def engine(self) -> Engine:
        """What is behind it: its name and version are told."""
        ...

    @property
    def spelling(self) -> Spelling:
        """How its tokens are spelt."""
        ...

    @property
    def dialects(self) -> frozenset[str] | None:
        """Those that it can be spoken to in; None for all."""
        ...

    async def prompt(self, graph: TokenGraph, call: Call, chains: Sequence[str]) -> Prompt:
        """What the reply follows; `chains` are the digests of the call's tools and messages."""
        ...

    def length(self, prompt: Prompt) -> int:
        """How many tokens a prompt has."""
        ...

    def samplings(self, call: Call, most_tokens: int, prompt: Prompt) -> list[Sampling]:
        """How each choice is sampled: at most so many tokens, each with a seed of its own; RequestError where it cannot be."""
        ...

    def reply(self, call: Call, prompt: Prompt, sampling: Sampling, *, seed: str) -> ReplyBuilder:
        """An empty reply, which takes what `generate` gives."""
        ...

    def generate(self, call: Call, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[Any, None]:
        """The chunks of one choice as they come; closing it cancels the request."""
        ...

    def facts(self) -> dict[str, object]:
        """What is told of it when the gateway starts."""
        ...


class TokenSource:
    """See `Source`: an engine, and the renderer of its model."""

    dialects = None

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self.engine = engine
        self._renderer = renderer
        self._roots = Roots(renderer)

    @property
    def spelling(self) -> Spelling:
        return self._renderer.tokenizer

    async def prompt(self, graph: TokenGraph, call: Call, chains: Sequence[str]) -> Prompt:
        return await make_prompt(graph, self._renderer, self._roots, call, chains)

    def length(self, prompt: Prompt) -> int:
        return len(prompt.ids)

    def samplings(self, call: Call, most_tokens: int, prompt: Prompt) -> list[Sampling]:
        """See `Source.samplings`: within the model's context too."""
        room = self.engine.context_length - len(prompt.ids)
        if room < 1:
            text = f"the prompt has {len(prompt.ids)} tokens; the model's context holds {self.engine.context_length} with the reply"
            raise RequestError(text, code="context_length_exceeded", param="messages")
        asked = call.sampling
        ends = tuple(dict.fromkeys([*self._renderer.stop_ids, *asked.stop_ids]))
        tokens = min(asked.max_tokens, most_tokens, room)
        return [replace(asked, max_tokens=tokens, stop_ids=ends, seed=seed) for seed in seeds(call)]

    def reply(self, call: Call, prompt: Prompt, sampling: Sampling, *, seed: str) -> Reply:
        decoder = self._renderer.decoder() if call.raw is None else self._renderer.tokenizer.decoder()
        return Reply(ReplyText(decoder, sampling.stop, self._parser(call, prompt), prompt.begun), seed=seed)

    def generate(self, call: Call, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[SampledChunk, None]:
        return self.engine.generate(prompt.ids, sampling, rollout_id=rollout_id)

    def facts(self) -> dict[str, object]:
        """See `Source.facts`: what was proven of the chat template."""
        result = self._renderer.bridge.result
        return {"bridge_proven": len(result.proven), "bridge_unproven": Counter(result.unproven.values())}

    def _parser(self, call: Call, prompt: Prompt) -> ReplyParser | None:
        """What reads calls and reasoning off the reply; nothing does after a prompt that no template touched."""
        if call.raw is not None:
            return None
        return self._renderer.parser(calls=call.reads_calls, eager=call.stream, tools=call.tools, prompt=prompt.ids)


def seeds(call: Call) -> list[int | None]:
    """Of each choice, its own."""
    asked = call.sampling.seed
    return [None if asked is None else asked + choice for choice in range(call.choices)]


class TextEndpointSource:
    dialects = frozenset({"chat", "responses", "messages"})

    def __init__(self, engine: TextEndpoint) -> None:
        self.engine = engine
        self.spelling: Spelling = NoTokens(engine.model)

    async def prompt(self, graph: TokenGraph, call: Call, chains: Sequence[str]) -> Prompt:
        """See `Source.prompt`: the messages alone, hung on the path that they continue."""
        place = graph.match(call.messages, chains)
        tools = call.tools if place.step is None else ()
        new = call.messages[place.known :]
        chain, reason = place.chain, place.reason
        return Prompt(ids=TokenPath(), parent=place.step, added=(), messages=new, tools=tools, chain=chain, reason=reason)

    def length(self, prompt: Prompt) -> int:
        raise no_tokens(self.engine.model, "its prompts cannot be counted here")

    def samplings(self, call: Call, most_tokens: int, prompt: Prompt) -> list[Sampling]:
        asked = call.sampling
        for name, wanted in (("logprobs", call.logprobs), ("return_token_ids", call.token_ids), ("stop_token_ids", asked.stop_ids)):
            if wanted:
                raise no_tokens(self.engine.model, f"leave {name} out", param=name)
        return [replace(asked, max_tokens=min(asked.max_tokens, most_tokens), seed=seed) for seed in seeds(call)]

    def reply(self, call: Call, prompt: Prompt, sampling: Sampling, *, seed: str) -> "TextEndpointReply":
        return TextEndpointReply(seed=seed)

    def generate(self, call: Call, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[TextChunk, None]:
        asked = TextRequest(
            messages=call.messages, sampling=sampling, tools=call.tools, may_call=call.reads_calls, forced=call.forced
        )
        return self.engine.ask(asked, rollout_id=rollout_id)

    def facts(self) -> dict[str, object]:
        return {"relayed": True}


class TextEndpointReply(ReplyBuilder):
    """A reply while it comes. A call that its endpoint gives no id gets one of ours."""

    def take(self, chunk: TextChunk) -> list[Delta]:
        deltas = [delta for part in chunk.parts for delta in self._hear(part)]
        if chunk.finish is None:
            return deltas
        self.usage = chunk.usage or self.usage
        return [*deltas, *self.end(chunk.finish)]

    def end(self, finish: Finish) -> list[Delta]:
        if self.finish is not None:
            return []
        self.finish = finish
        self.usage = self.usage or Usage(prompt_tokens=0, completion_tokens=0)
        return self._complete()

    def _hear(self, part: ReplyPart) -> list[Delta]:
        if isinstance(part, ArgumentsPart):
            return [self.argue(part.text)] if self.calls else []
        if isinstance(part, ToolCallPart):
            return [*self._complete(), self.call(part.name, "", call_id=part.id)]
        return [self.speak(Text(part.text) if isinstance(part, TextPart) else Reasoning(part.text))]

    def _complete(self) -> list[Delta]:
        """A call without arguments is one with an empty object of them: clients read JSON."""
        return [self.argue("{}")] if self.calls and not self.calls[-1].arguments else []


class NoTokens:
    """See `Spelling`: there is nothing to spell."""

    def __init__(self, model: str) -> None:
        self._model = model

    def token_bytes(self, token_id: int) -> bytes:
        raise no_tokens(self._model, "send messages")

    def decode(self, ids: Sequence[int]) -> str:
        if ids:
            raise no_tokens(self._model, "send messages")
        return ""

    def encode(self, text: str) -> list[int]:
        """See `Spelling.encode`: nothing is known of it."""
        return []

    def shield(self, value: Any) -> Any:
        return value


def no_tokens(model: str, what: str, param: str | None = None) -> RequestError:
    """What an endpoint cannot be asked."""
    text = f"{model} is behind an endpoint that gives text, and its tokens are not known; {what}"
    return RequestError(text, code="unsupported_parameter", param=param)


class OpenedEngine(NamedTuple):
    """What a gateway answers with; close the engine after use."""

    engine: Engine
    renderer: Renderer | None
    """None where the engine gives text."""


async def open_engine(section: EngineSection, model: Path, *, name: str, seed: int) -> OpenedEngine:
    """Open what `[engine]` names for the model in folder `model`, which an endpoint has no use for."""
    renderer = None if section.text_only else await asyncio.to_thread(Renderer.load, model)
    decode = renderer and renderer.tokenizer.decode
    opener = ENGINES.load(section.name)
    return OpenedEngine(await asyncio.to_thread(opener, model, name=name, section=section, seed=seed, decode=decode), renderer)
