"""Making a call's prompt: the tokens of the longest known path plus the new ones, or a root rendered from scratch."""

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
from penstock.engines.base import TokenPath
from penstock.errors import RequestError
from penstock.gateway.call import ModelCall, Prompt
from penstock.gateway.graph import RAW_CHAIN, TEMPLATE_REWRITES, TokenGraph
from penstock.records import Message

LONG_TEXT = 8_000
"""Characters from which tokenizing runs in a thread; it takes about 0.5 ms per thousand."""


class RootCache:
    """Caches the tokens of roots by chain digest: all rollouts of a group start with the same one."""

    def __init__(self, renderer: Renderer, max_tokens: int = 2_000_000) -> None:
        self._renderer = renderer
        self._left = max_tokens
        self._known = OrderedDict[str, tuple[int, ...]]()

    async def render(self, call: ModelCall, chain: str) -> tuple[int, ...]:
        """Token ids of the call's whole conversation. Only conversations without replies are cached: the digest of a reply leaves
        out details that a template may render."""
        known = self._known.get(chain)
        if known is not None:
            return known
        ids = await _render(call.messages, lambda: self._renderer.root(call.messages, call.tools))
        if all(message["role"] in ("system", "user") for message in call.messages) and chain not in self._known:
            self._known[chain] = ids
            self._left -= len(ids)
            while self._left < 0:
                self._left += len(self._known.popitem(last=False)[1])
        return ids


async def make_prompt(graph: TokenGraph, renderer: Renderer, roots: RootCache, call: ModelCall, chains: Sequence[str]) -> Prompt:
    """The prompt of `call`; `chains` are the digests of its tools and messages."""
    if call.raw is not None:
        return _make_raw(graph, renderer, call.raw)
    prompt = await _make_templated(graph, renderer, roots, call, chains)
    return prompt if call.forced is None else _force_call(prompt, renderer, call.forced)


async def _make_templated(
    graph: TokenGraph, renderer: Renderer, roots: RootCache, call: ModelCall, chains: Sequence[str]
) -> Prompt:
    messages, match = call.messages, graph.match(call.messages, chains)
    reason = match.reason
    if match.step is not None:
        reply, new = graph.steps[match.step], messages[match.known :]
        last_id = reply.completion_ids[-1] if reply.completion_ids else None
        system, thought = messages[0]["role"] == "system", graph.has_reasoning(match.step)
        extend = partial(
            renderer.extend, reply.message, new, last_id=last_id, tools=bool(call.tools), system=system, thought=thought
        )
        added = await _render(new, extend)
        if added is not None:
            ids = graph.context(match.step).then(added)
            return Prompt(ids=ids, parent=match.step, added=added, messages=new, tools=(), chain=match.chain, reason=reason)
        reason = reason or TEMPLATE_REWRITES
    root = await roots.render(call, match.chain)
    ids, tools = TokenPath(root), call.tools
    return Prompt(ids=ids, parent=None, added=root, messages=messages, tools=tools, chain=match.chain, reason=reason)


def _make_raw(graph: TokenGraph, renderer: Renderer, raw: str | tuple[int, ...]) -> Prompt:
    """A prompt without a chat template, after the longest known path that it continues."""
    parent, known = graph.match_raw(raw)
    if isinstance(raw, str):
        rest = raw[known:]
        added, chain = tuple(renderer.encode_raw(rest)), blake2b(raw.encode(), digest_size=16).hexdigest()
    else:
        added = raw[known:]
        rest, chain = renderer.tokenizer.decode(added), blake2b(pack_ints(raw), digest_size=16).hexdigest()
    before = TokenPath() if parent is None else graph.context(parent)
    messages: tuple[Message, ...] = ({"role": "user", "content": rest},)
    return Prompt(ids=before.then(added), parent=parent, added=added, messages=messages, tools=(), chain=RAW_CHAIN + chain)


def _force_call(prompt: Prompt, renderer: Renderer, name: str) -> Prompt:
    """Append the beginning of the required tool call to the prompt, so that the model must continue it."""
    forced_prefix = renderer.begin(name, prompt=prompt.ids)
    if forced_prefix is None:
        message = "this model's form of tool calls cannot be forced; use tool_choice 'auto' or 'none'"
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    ids, text = forced_prefix
    return replace(prompt, ids=prompt.ids.then(ids), added=prompt.added + ids, forced_prefix=text)


async def _render(messages: Sequence[Message], render: Callable[[], Any]) -> Any:
    """Run `render` here, or in a thread if there is much to tokenize."""
    if sum(len(flatten(message.get("content"))) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()
