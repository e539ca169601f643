"""Replies of endpoints: messages go out, text comes in. The graph has their messages and no tokens; none of it is trained."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from penstock.chat.parsers.base import Reasoning, Text
from penstock.engines.text_endpoints.base import Argued, Asked, Called, Heard, Part, Relay, Said
from penstock.errors import RequestError
from penstock.gateway.calls import Call, Prompt
from penstock.gateway.dialects.base import Spelling
from penstock.gateway.graph import TokenGraph
from penstock.gateway.paths import TokenPath
from penstock.gateway.sources import seeds
from penstock.gateway.stream import Delta, Speech
from penstock.records import Finish, Sampling, Usage


class RelaySource:
    """See `Source`."""

    dialects = frozenset({"chat", "responses", "messages"})

    def __init__(self, engine: Relay) -> None:
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
        """See `Source.length`."""
        raise no_tokens(self.engine.model, "its prompts cannot be counted here")

    def samplings(self, call: Call, most_tokens: int, prompt: Prompt) -> list[Sampling]:
        """See `Source.samplings`."""
        asked = call.sampling
        for name, wanted in (("logprobs", call.logprobs), ("return_token_ids", call.token_ids), ("stop_token_ids", asked.stop_ids)):
            if wanted:
                raise no_tokens(self.engine.model, f"leave {name} out", param=name)
        return [replace(asked, max_tokens=min(asked.max_tokens, most_tokens), seed=seed) for seed in seeds(call)]

    def reply(self, call: Call, prompt: Prompt, sampling: Sampling, *, seed: str) -> "RelayReply":
        """See `Source.reply`."""
        return RelayReply(seed=seed)

    def generate(self, call: Call, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[Heard, None]:
        """See `Source.generate`."""
        asked = Asked(messages=call.messages, sampling=sampling, tools=call.tools, may_call=call.reads_calls, forced=call.forced)
        return self.engine.ask(asked, rollout_id=rollout_id)

    def facts(self) -> dict[str, object]:
        """See `Source.facts`."""
        return {"relayed": True}


class RelayReply(Speech):
    """A reply while it comes. A call that its endpoint gives no id gets one of ours."""

    def take(self, chunk: Heard) -> list[Delta]:
        """See `Speech.take`."""
        deltas = [delta for part in chunk.parts for delta in self._hear(part)]
        if chunk.finish is None:
            return deltas
        self.usage = chunk.usage or self.usage
        return [*deltas, *self.end(chunk.finish)]

    def end(self, finish: Finish) -> list[Delta]:
        """See `Speech.end`."""
        if self.finish is not None:
            return []
        self.finish = finish
        self.usage = self.usage or Usage(prompt_tokens=0, completion_tokens=0)
        return self._complete()

    def _hear(self, part: Part) -> list[Delta]:
        if isinstance(part, Argued):
            return [self.argue(part.text)] if self.calls else []
        if isinstance(part, Called):
            return [*self._complete(), self.call(part.name, "", call_id=part.id)]
        return [self.speak(Text(part.text) if isinstance(part, Said) else Reasoning(part.text))]

    def _complete(self) -> list[Delta]:
        """A call without arguments is one with an empty object of them: clients read JSON."""
        return [self.argue("{}")] if self.calls and not self.calls[-1].arguments else []


class NoTokens:
    """See `Spelling`: there is nothing to spell."""

    def __init__(self, model: str) -> None:
        self._model = model

    def token_bytes(self, token_id: int) -> bytes:
        """See `Spelling.token_bytes`."""
        raise no_tokens(self._model, "send messages")

    def decode(self, ids: Sequence[int]) -> str:
        """See `Spelling.decode`."""
        if ids:
            raise no_tokens(self._model, "send messages")
        return ""

    def encode(self, text: str) -> list[int]:
        """See `Spelling.encode`: nothing is known of it."""
        return []

    def shield(self, value: Any) -> Any:
        """See `Spelling.shield`."""
        return value


def no_tokens(model: str, what: str, param: str | None = None) -> RequestError:
    """What an endpoint cannot be asked."""
    text = f"{model} is behind an endpoint that gives text, and its tokens are not known; {what}"
    return RequestError(text, code="unsupported_parameter", param=param)
