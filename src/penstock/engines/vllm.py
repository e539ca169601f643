"""vLLM behind HTTP: token ids in; ids and log-probabilities out, over `/v1/completions` with `return_token_ids`.

A vLLM server gives one log-probability per token, and its `--logprobs-mode` decides which: `raw_logprobs`, its default, is under
the plain softmax; `processed_logprobs` is under the distribution sampled from. At temperature 1 without truncation the two are
one. A greedy token had no alternative: it was drawn with log-probability 0, and either mode gives the plain one. Else only one
of them is known: a `raw` server cannot say what a tempered token was drawn with, so that such requests are refused, and a
`processed` one leaves `full_logprobs` empty. Which of the two a server does is found out at the opening, not believed: of a
token drawn with top_k = 1, a `processed` server says log-probability 0.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import orjson
from pydantic import Field

from penstock.config import EngineSection
from penstock.engines.base import Sampled
from penstock.engines.upstream import Patience, Upstream
from penstock.engines.vllm_reply import ReplyReader, is_plain, request_body
from penstock.engines.wire import Fault, Timers, Wire
from penstock.errors import ConfigError, EngineError
from penstock.records import Sampling

COOLEST = 0.01
"""vLLM quietly raises positive temperatures below this one."""
PATH = "/v1/completions"


class VllmSection(EngineSection):
    """`[engine]` for `name = "vllm"`."""

    url: tuple[str, ...] = Field(min_length=1)
    """Addresses of servers with the same model, such as `http://10.0.0.1:8000`."""
    api_key_env: str = ""
    """The environment variable that holds the servers' key; empty sends none."""
    retries: int = Field(default=4, ge=0)
    """How often a request that no server would take is sent again after a wait, before its first token."""
    retry_s: float = Field(default=600.0, gt=0)
    """No attempt at a request begins later than this after its first."""
    first_token_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first token, in the server's queue too; then another attempt is made."""
    stall_s: float = Field(default=120.0, gt=0)
    """Longest silence between two tokens; then the reply is given up."""


class Served(NamedTuple):
    """What a server serves."""

    model: str
    """As the server calls it."""
    context_length: int
    processed: bool
    """Whether its log-probabilities are under the distribution sampled from."""


class VllmEngine:
    """A fleet of vLLM servers that hold one policy version."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        served: Served,
        timers: Timers | None = None,
        patience: Patience | None = None,
        key: str = "",
        version: int = 0,
    ) -> None:
        self._name, self._served, self._version = name, served, version
        self.upstream = Upstream(urls, self._check_server, timers=timers or Timers(), patience=patience or Patience(), key=key)

    @property
    def model(self) -> str:
        """The name that `/v1/models` shows."""
        return self._name

    @property
    def context_length(self) -> int:
        """Prompt and reply together must fit in this many tokens."""
        return self._served.context_length

    @property
    def version(self) -> int:
        """The policy version that the servers were started with."""
        return self._version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[Sampled, None]:
        """Sample one reply; see `Engine.generate`. Stop strings are left to the caller, who closes the generator at one."""
        self._check(prompt_ids, sampling)
        prompt = list(prompt_ids)
        body = orjson.dumps(request_body(self._served.model, prompt, sampling))

        def begin() -> ReplyReader:
            return ReplyReader(prompt, sampling, processed=self._served.processed, version=self._version)

        async with aclosing(self.upstream.stream(PATH, body, begin, rollout_id=rollout_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Refused: `change` rewrites weights in this process, and the servers hold their own."""
        raise EngineError(
            f"policy version {version} cannot be given to vLLM servers over HTTP; to train, set engine.name = 'embedded'"
        )

    async def close(self) -> None:
        """Fail what is running and let go of all connections."""
        await self.upstream.close()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        length, most = len(prompt_ids), sampling.max_tokens
        if not length:
            raise EngineError("the prompt has no tokens; send at least one")
        if most < 1:
            raise EngineError(f"max_tokens = {most}: ask for at least one token")
        if length + most > self.context_length:  # the server would shorten max_tokens without a word
            raise EngineError(
                f"{length} prompt tokens and max_tokens = {most} exceed the context of {self.context_length}; shorten one of them"
            )
        if 0.0 < sampling.temperature < COOLEST:
            raise EngineError(f"temperature = {sampling.temperature}: vLLM takes 0 (greedy) or at least {COOLEST}")
        if not (self._served.processed or sampling.temperature == 0.0 or is_plain(sampling)):
            raise EngineError(
                "the vLLM server cannot say with which probability a tempered or truncated token was drawn; "
                "start it with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p, top_k and min_p"
            )

    async def _check_server(self, url: str) -> None:
        served = await inspect(self.upstream.wire, url, self._name)
        if served != self._served:
            raise Fault(f"{url} serves {served}, the others {self._served}", kind="refused")


def open_engine(
    folder: Path, *, name: str, section: VllmSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> VllmEngine:
    """Ask the servers what they serve, and serve it as policy version 0. Blocks: call it in a thread.

    The model folder, the seed and `decode` are not used: the servers have the weights and their own randomness, and stop strings
    are the gateway's. An address that does not answer is left out until it does, as long as another one answers.
    """
    urls = [_address(url) for url in section.url]
    key = os.environ.get(section.api_key_env, "") if section.api_key_env else ""
    if section.api_key_env and not key:
        raise ConfigError(f"engine.api_key_env: the environment has no {section.api_key_env}; set it to the servers' key")
    if len(set(urls)) < len(urls):
        raise ConfigError("engine.url: an address stands there twice")
    served, down = asyncio.run(_survey(urls, name, key))
    engine = VllmEngine(
        urls,
        name=name,
        served=served,
        timers=Timers(first_token_s=section.first_token_s, stall_s=section.stall_s),
        patience=Patience(retries=section.retries, retry_s=section.retry_s),
        key=key,
    )
    for address in engine.upstream.fleet.addresses:
        if address.url in down:
            address.up.clear()
    return engine


async def inspect(wire: Wire, url: str, name: str) -> Served:
    """What the server at `url` serves: the model of this name, else its only one."""
    await wire.ask(f"{url}/health")
    listed = await wire.ask(f"{url}/v1/models")
    try:
        models = {str(one["id"]): one for one in listed["data"] if not one.get("parent")}
        chosen = name if name in models else next(iter(models)) if len(models) == 1 else None
        if chosen is None:
            raise Fault(f"{url} serves {', '.join(models) or 'nothing'}, and not {name}", kind="refused")
        context_length = int(models[chosen]["max_model_len"])
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise Fault(f"{url}/v1/models does not say what is served; is it a vLLM server?", kind="garbled") from cause
    return Served(chosen, context_length, await _is_processed(wire, url, chosen))


async def _is_processed(wire: Wire, url: str, model: str) -> bool:
    """Whether the server says log-probability 0 of tokens that had no alternative."""
    sampling = Sampling(max_tokens=4, top_k=1)
    body = request_body(model, [1], sampling) | {"stream": False}
    answer = await wire.ask(url + PATH, body)
    try:
        logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return max(abs(x) for x in logprobs) < 1e-6
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise Fault(f"{url}{PATH} gives no log-probabilities; is it a vLLM server?", kind="garbled") from cause


async def _survey(urls: Sequence[str], name: str, key: str) -> tuple[Served, set[str]]:
    """What is served, and the addresses that do not answer."""
    wire = Wire(Timers(), key=key)
    found: dict[str, Served] = {}
    faults: dict[str, Fault] = {}
    try:
        for url in urls:
            try:
                found[url] = await inspect(wire, url, name)
            except Fault as fault:
                faults[url] = fault
    finally:
        await wire.close()
    if not found:
        raise ConfigError(f"engine.url: {'; '.join(map(str, faults.values()))}; start vLLM there, or change engine.url")
    if len(set(found.values())) > 1:
        told = "; ".join(f"{url} has {served}" for url, served in found.items())
        raise ConfigError(f"engine.url: the servers differ: {told}; start all of them alike")
    return next(iter(found.values())), set(faults)


def _address(url: str) -> str:
    """`url` without a slash or `/v1` at its end; ConfigError where it is not the plain address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"engine.url = {url!r}: write it like http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("engine.url: an address has no user, password, query or fragment; put the key in engine.api_key_env")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
