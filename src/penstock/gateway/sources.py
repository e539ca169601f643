"""Where replies come from. An engine's are sampled token by token after a prompt of ours; see `relayed` for those of endpoints."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.chat.parsers.base import ReplyParser
from penstock.chat.renderer import Renderer
from penstock.engines.base import Engine, Sampled
from penstock.errors import RequestError
from penstock.gateway.calls import Call, Prompt
from penstock.gateway.dialects.base import Spelling
from penstock.gateway.graph import TokenGraph
from penstock.gateway.prompts import Roots, make_prompt
from penstock.gateway.stream import Reply, ReplyText, Speech
from penstock.records import Sampling


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

    def reply(self, call: Call, prompt: Prompt, sampling: Sampling, *, seed: str) -> Speech:
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
        """See `Source.spelling`."""
        return self._renderer.tokenizer

    async def prompt(self, graph: TokenGraph, call: Call, chains: Sequence[str]) -> Prompt:
        """See `Source.prompt`."""
        return await make_prompt(graph, self._renderer, self._roots, call, chains)

    def length(self, prompt: Prompt) -> int:
        """See `Source.length`."""
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
        """See `Source.reply`."""
        decoder = self._renderer.decoder() if call.raw is None else self._renderer.tokenizer.decoder()
        return Reply(ReplyText(decoder, sampling.stop, self._parser(call, prompt), prompt.begun), seed=seed)

    def generate(self, call: Call, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[Sampled, None]:
        """See `Source.generate`."""
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
