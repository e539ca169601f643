"""The prompt of a call: the tokens of the longest known path and what is new, or a root rendered from scratch."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from penstock.chat.renderer import Renderer
from penstock.chat.templates import flatten
from penstock.codec import pack_ints
from penstock.errors import RequestError
from penstock.gateway.call import Call, Prompt
from penstock.gateway.graph import RAW, REWRITTEN, TokenGraph, TokenPath
from penstock.records import Message

LONG_TEXT = 8_000
"""Characters from which tokenizing (about 0.5 ms per thousand) is handed to a thread."""


class Roots:
    """The last roots by the digest of their messages: all rollouts of a group begin with the same one."""

    def __init__(self, renderer: Renderer, most_tokens: int = 2_000_000) -> None:
        self._renderer = renderer
        self._left = most_tokens
        self._known = OrderedDict[str, tuple[int, ...]]()  # the oldest of a plain dictionary is found ever more slowly

    async def render(self, call: Call, chain: str) -> tuple[int, ...]:
        """Ids of the call's whole conversation; only one that its digest tells wholly, without any reply, is known again."""
        known = self._known.get(chain)
        if known is not None:
            return known
        ids = await _work(call.messages, lambda: self._renderer.root(call.messages, call.tools))
        if all(message["role"] in ("system", "user") for message in call.messages) and chain not in self._known:
            self._known[chain] = ids
            self._left -= len(ids)
            while self._left < 0:
                self._left += len(self._known.popitem(last=False)[1])
        return ids


async def make_prompt(graph: TokenGraph, renderer: Renderer, roots: Roots, call: Call, chains: Sequence[str]) -> Prompt:
    """The prompt of `call`; `chains` are the digests of its tools and messages."""
    if call.raw is not None:
        return _continue_raw(graph, renderer, call.raw)
    prompt = await _render(graph, renderer, roots, call, chains)
    return prompt if call.forced is None else _begin_call(prompt, renderer, call.forced)


async def _render(graph: TokenGraph, renderer: Renderer, roots: Roots, call: Call, chains: Sequence[str]) -> Prompt:
    messages, place = call.messages, graph.match(call.messages, chains)
    reason = place.reason
    if place.step is not None:
        reply, new = graph.steps[place.step], messages[place.known :]
        last_id = reply.completion_ids[-1] if reply.completion_ids else None
        system, thought = messages[0]["role"] == "system", graph.thoughtful(place.step)
        extend = partial(
            renderer.extend, reply.message, new, last_id=last_id, tools=bool(call.tools), system=system, thought=thought
        )
        added = await _work(new, extend)
        if added is not None:
            ids = graph.context(place.step).then(added)
            return Prompt(ids=ids, parent=place.step, added=added, messages=new, tools=(), chain=place.chain, reason=reason)
        reason = reason or REWRITTEN
    root = await roots.render(call, place.chain)
    ids, tools = TokenPath(root), call.tools
    return Prompt(ids=ids, parent=None, added=root, messages=messages, tools=tools, chain=place.chain, reason=reason)


def _continue_raw(graph: TokenGraph, renderer: Renderer, raw: str | tuple[int, ...]) -> Prompt:
    """An untemplated prompt, after the longest path that it goes on from."""
    parent, known = graph.match_raw(raw)
    if isinstance(raw, str):
        rest = raw[known:]
        added, chain = tuple(renderer.encode_raw(rest)), blake2b(raw.encode(), digest_size=16).hexdigest()
    else:
        added = raw[known:]
        rest, chain = renderer.tokenizer.decode(added), blake2b(pack_ints(raw), digest_size=16).hexdigest()
    before = TokenPath() if parent is None else graph.context(parent)
    said: tuple[Message, ...] = ({"role": "user", "content": rest},)
    return Prompt(ids=before.then(added), parent=parent, added=added, messages=said, tools=(), chain=RAW + chain)


def _begin_call(prompt: Prompt, renderer: Renderer, name: str) -> Prompt:
    """The prompt with the beginning of the call that is asked for: the model can only go on with it."""
    begun = renderer.begin(name, prompt=prompt.ids)
    if begun is None:
        message = "this model's form of tool calls cannot be forced; use tool_choice 'auto' or 'none'"
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    ids, text = begun
    return replace(prompt, ids=prompt.ids.then(ids), added=prompt.added + ids, begun=text)


async def _work(messages: Sequence[Message], render: Callable[[], Any]) -> Any:
    """Run `render` here, or in a thread where there is much to tokenize."""
    if sum(len(flatten(message.get("content"))) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()
