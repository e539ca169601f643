"""The embedded engine: one thread runs the core, and asyncio tasks send it commands.

Commands (submit, cancel, swap, close) run between two steps. The tokens of a step are delivered by a single call into each event
loop, and a slow consumer gets all tokens that have accumulated as one chunk.
"""

import asyncio
import json
import logging
import math
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from random import Random
from typing import Any

import torch

from penstock.config import EngineSection
from penstock.engines.base import SampledChunk
from penstock.engines.checkpoint_files import find_base, is_adapter
from penstock.engines.embedded import fused
from penstock.engines.embedded.core import DrawnChunk, EngineCore, Request
from penstock.engines.embedded.decoder import Decoder, load_decoder
from penstock.engines.embedded.lora import Adapter, read_adapter
from penstock.engines.embedded.paged_core import PagedCore, free_tokens
from penstock.engines.embedded.sampling import FixedChoice, GrammarCompiler, ReplyState
from penstock.errors import ConfigError, EngineBusy, EngineError, EngineRefused, ModelError
from penstock.records import MAX_TOP_LOGPROBS, Sampling
from penstock.system.processes import switch_threads_often

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up."""

GPU_SLOTS = 1024

log = logging.getLogger(__name__)

Command = Callable[[], None]
"""Runs in the engine's thread between two steps."""


class RequestOutput:
    """Tokens of one request that its consumer has not read yet. Used only in the consumer's event loop."""

    def __init__(self, rollout_id: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.complete = False
        """Whether the engine is done with the request."""
        self._rollout_id = rollout_id
        self._chunks: list[tuple[DrawnChunk, int]] = []
        """With the version that they were drawn under."""
        self._problem: str | None = None
        self._filled = asyncio.Event()

    def put(self, chunk: DrawnChunk, version: int) -> None:
        """Add sampled tokens."""
        if chunk.finish == "error":
            good = len(chunk.ids) - 1  # the last one is what failed
            chunk = chunk._replace(
                ids=chunk.ids[:good],
                logprobs=chunk.logprobs[:good],
                full_logprobs=chunk.full_logprobs[:good],
                kept=chunk.kept[:good],
                most_likely=chunk.most_likely[:good],
                finish=None,
            )
            if good:
                self._chunks.append((chunk, version))
            self.fail(f"policy version {version}: {chunk.problem}")
            return
        self._chunks.append((chunk, version))
        self.complete = chunk.finish is not None
        self._filled.set()

    def fail(self, problem: str) -> None:
        """Raise an error in the consumer, after the tokens that are already here."""
        self.complete, self._problem = True, problem
        self._filled.set()

    async def take(self) -> SampledChunk:
        """Return all tokens since the last call; wait for one if there are none."""
        await self._filled.wait()
        chunks, self._chunks = self._chunks, []
        if not chunks:
            raise EngineError(f"rollout {self._rollout_id}: {self._problem}" if self._rollout_id else self._problem)
        if self._problem is None:
            self._filled.clear()
        if len(chunks) == 1:
            chunk, version = chunks[0]
            count = len(chunk.ids)
            return SampledChunk(
                tuple(chunk.ids),
                tuple(chunk.logprobs),
                tuple(chunk.full_logprobs),
                (version,) * count,
                chunk.finish,
                kept=chunk.kept,
                most_likely=chunk.most_likely,
            )
        return SampledChunk(
            ids=tuple(chain.from_iterable(chunk.ids for chunk, _ in chunks)),
            logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk, _ in chunks)),
            full_logprobs=tuple(chain.from_iterable(chunk.full_logprobs for chunk, _ in chunks)),
            versions=tuple(chain.from_iterable(repeat(version, len(chunk.ids)) for chunk, version in chunks)),
            finish=chunks[-1][0].finish,
            kept=tuple(chain.from_iterable(chunk.kept for chunk, _ in chunks)),
            most_likely=tuple(chain.from_iterable(chunk.most_likely for chunk, _ in chunks)),
        )


class EmbeddedEngine:
    """Samples from a decoder in this process. The trainer may share `decoder`, the module itself."""

    def __init__(
        self,
        core: EngineCore | PagedCore,
        *,
        name: str,
        queue_limit: int,
        seed: int,
        stop_ids: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.decoder: Decoder = core.decoder
        self._core, self._name, self._seed = core, name, seed
        self._stop_ids = frozenset(stop_ids)
        self._grammars = grammars
        self._context_length = min(core.decoder.shape.context_length, core.capacity)
        self._limit = core.slots + queue_limit
        self._versions: defaultdict[str, int] = defaultdict(int)
        """By policy."""
        self._keys = count()
        self._outputs: dict[int, RequestOutput] = {}
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: str | None = None
        """Why no more commands are accepted; None while they are."""
        self._closing = False
        self._problem = ""
        """Why the last failed step failed."""
        self._thread = threading.Thread(target=self._run, name=f"penstock-engine-{name}", daemon=True)
        self._thread.start()

    @property
    def model(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        """That of the model, or what fits into the cache if that is less."""
        return self._context_length

    @property
    def version(self) -> int:
        return self._versions[""]

    def version_of(self, policy: str) -> int:
        """The version that the next token of a policy will be sampled under."""
        return self._versions[policy]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = "", policy: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        """See `Engine.generate`. A policy without an adapter is the base model."""
        self._check(prompt_ids, sampling)
        if len(self._outputs) >= self._limit:
            raise EngineBusy(f"{self._limit} requests are already running or waiting; try again later, or raise engine.queue")
        request = self._request(prompt_ids, sampling, policy, await self._reply_state(sampling))
        output = self._outputs[request.key] = RequestOutput(rollout_id)
        try:
            self._post(lambda: self._core.submit(request))
            while True:
                chunk = await output.take()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._outputs.pop(request.key, None)
            if not output.complete:
                with suppress(EngineError):  # the engine has ended, and the request with it
                    self._post(lambda: self._core.cancel(request))

    async def swap(self, version: int, change: Callable[[], None], *, policies: Collection[str] | None = None) -> None:
        """See `Engine.swap`. If `change` raises, the version stays. `policies`: those whose adapters alone are changed."""
        done: Future[None] = Future()
        self._post(lambda: self._swap(version, change, policies, done))
        await asyncio.wrap_future(done)

    async def load(self, version: int, folder: Path, *, policy: str = "") -> None:
        """See `Engine.load`. The weights are read in a thread and copied in between two steps."""
        weight, shape = self.decoder.embed.weight, self.decoder.shape
        read = partial(read_adapter, shape=shape) if is_adapter(folder) else load_decoder
        try:
            loaded = await asyncio.to_thread(read, folder, device=weight.device, dtype=weight.dtype)
        except (ModelError, OSError, ValueError, LookupError, RuntimeError) as cause:
            raise EngineError(f"policy version {version} cannot be loaded: {cause}") from cause
        if loaded.shape != shape:
            raise EngineError(f"policy version {version} cannot be loaded: {folder} holds a model of another shape")
        if isinstance(loaded, Adapter):
            await self.put_adapters(version, {policy: loaded})
        else:
            await self.swap(version, lambda: _copy(loaded, self.decoder))

    async def put_adapters(
        self, version: int, adapters: Mapping[str, Adapter], *, change: Callable[[], None] = lambda: None
    ) -> None:
        """Between two steps, run `change` and copy each policy's adapter; they sample with it, as `version`, from then on.

        Requests of other policies are not touched.
        """

        def put() -> None:
            change()
            for policy, adapter in adapters.items():
                self._core.adapters.put(policy, adapter)

        await self.swap(version, put, policies=adapters.keys())

    def warm_up(self, core: PagedCore) -> None:
        """Compile and capture in the engine's thread, while the caller opens the rest of the run."""
        self._post(lambda: _warm_up(core))

    async def close(self) -> None:
        """Fail what is running and end the thread."""
        with self._lock:
            if self._ended is None:
                self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def _reply_state(self, sampling: Sampling) -> ReplyState | None:
        """The grammar that limits which tokens may be sampled; None if all may."""
        if sampling.biased:
            return FixedChoice(sampling, self.decoder.shape.vocab_size)
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise EngineError("constrained replies need the model's folder, and this engine was opened without one")
        return await asyncio.to_thread(self._grammars.start, sampling.grammar, self._stop_ids.union(sampling.stop_ids))

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        vocabulary, length, most = self.decoder.shape.vocab_size, len(prompt_ids), sampling.max_tokens
        total, room = length + most, self._core.capacity
        if not length:
            raise EngineError("the prompt has no tokens; send at least one")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise EngineError(f"the prompt has a token id outside 0..{vocabulary - 1}; is it of another model's tokenizer?")
        if max((*sampling.only_ids, *sampling.banned_ids), default=0) >= vocabulary:
            raise EngineRefused(f"logit_bias has a token id outside 0..{vocabulary - 1}; is it of another model's tokenizer?")
        if len(sampling.banned_ids) == vocabulary:
            raise EngineRefused("logit_bias bans every token; leave one")
        if most < 1:
            raise EngineError(f"max_tokens = {most}: ask for at least one token")
        if total > (context := self.decoder.shape.context_length):
            raise EngineError(
                f"{length} prompt tokens and max_tokens = {most} exceed the context of {context}; shorten one of them"
            )
        if total > room:
            raise EngineError(
                f"{length} prompt tokens and max_tokens = {most} exceed the cache ({room}); raise engine.cache_tokens"
            )
        if not (sampling.temperature >= 0.0 and math.isfinite(sampling.temperature)):
            raise EngineError(f"temperature = {sampling.temperature}: give 0 (greedy) or a positive number")
        if not (0.0 < sampling.top_p <= 1.0 and 0.0 <= sampling.min_p <= 1.0 and sampling.top_k >= 0):
            raise EngineError("give top_p in (0, 1], min_p in [0, 1] and top_k >= 0")
        if not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
            raise EngineError(f"top_logprobs = {sampling.top_logprobs}: give 0 to {MAX_TOP_LOGPROBS}")
        if sampling.stop and self._core.decode_text is None:
            raise EngineError("stop strings need a tokenizer, and this engine was opened without one; use stop ids")

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling, policy: str, grammar: ReplyState | None) -> Request:
        key = next(self._keys)
        seed = f"{self._seed}/{key}" if sampling.seed is None else sampling.seed
        return Request(
            key=key,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            sampling=sampling,
            stop_ids=self._stop_ids.union(sampling.stop_ids),
            uniform=Random(seed).random,
            policy=policy,
            grammar=grammar,
        )

    def _post(self, command: Command) -> None:
        with self._lock:  # so that no command is queued after the thread has emptied the queue for the last time
            if self._ended is not None:
                raise EngineError(self._ended)
            self._commands.put(command)

    # Below: runs in the engine's thread.

    def _run(self) -> None:
        ended = "the engine is closed"
        try:
            failures = 0
            while not self._closing:
                self._run_commands()
                failures = 0 if self._advance() else failures + 1
                if failures == MAX_FAILED_STEPS:
                    ended = (
                        f"the engine has given up after {MAX_FAILED_STEPS} failed steps in a row: {self._problem}; open a new one"
                    )
                    log.error("%s", ended)
                    return
        except BaseException as cause:
            ended = f"the engine has stopped: {type(cause).__name__}: {cause}; open a new one"
        finally:
            with self._lock:
                self._ended = ended
            self._fail(list(self._outputs), ended)
            while not self._commands.empty():
                self._commands.get()()

    def _run_commands(self) -> None:
        """Run the commands that have come since the last step; block while there is nothing else to do."""
        while not self._closing and (self._core.idle or not self._commands.empty()):
            self._commands.get()()

    def _advance(self) -> bool:
        """Run one step; False if it failed. Active requests then fail with it, and waiting ones are served next."""
        if self._closing:
            return True
        try:
            sampled = self._core.step()
        except Exception as cause:
            self._problem = f"{type(cause).__name__}: {cause}"
            lost = self._core.drop()
            self._fail([request.key for request in lost], f"a step of the engine failed: {self._problem}")
            return False
        self._deliver(sampled)
        return True

    def _swap(self, version: int, change: Callable[[], None], policies: Collection[str] | None, done: "Future[None]") -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            if self._ended is not None:
                raise EngineError(self._ended)
            self._deliver(self._core.drain())
            change()
        except Exception as cause:
            self._core.reset()  # `change` may have rewritten some of the weights before it raised
            done.set_exception(cause)
        else:
            self._core.reset(policies)
            self._versions |= dict.fromkeys([""] if policies is None else policies, version)
            done.set_result(None)

    def _stop(self) -> None:
        self._closing = True

    def _deliver(self, sampled: Sequence[DrawnChunk]) -> None:
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[RequestOutput, DrawnChunk]]] = defaultdict(list)
        for chunk in sampled:
            output = self._outputs.get(chunk.request.key)
            if output is not None:
                batches[output.loop].append((output, chunk))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_put_all, [(*each, self._versions[each[1].request.policy]) for each in batch])
            except RuntimeError:  # the loop is closed: nobody will read these
                for _, chunk in batch:
                    self._core.cancel(chunk.request)
                    self._outputs.pop(chunk.request.key, None)

    def _fail(self, keys: Iterable[int], problem: str) -> None:
        for output in [self._outputs.get(key) for key in keys]:
            if output is not None:
                with suppress(RuntimeError):  # its loop is closed
                    output.loop.call_soon_threadsafe(output.fail, problem)


def _put_all(batch: Sequence[tuple[RequestOutput, DrawnChunk, int]]) -> None:
    for output, chunk, version in batch:
        output.put(chunk, version)


def _warm_up(core: PagedCore) -> None:
    try:
        core.warm_up()
    except Exception as cause:  # a request would fail the same way, with a message
        log.warning("the engine could not be warmed up: %s: %s", type(cause).__name__, cause)


def _copy(source: Decoder, target: Decoder) -> None:
    target.load_state_dict(source.state_dict())


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_engine(
    folder: Path, *, name: str, section: EngineSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> EmbeddedEngine:
    """Load the model in `folder` and serve it as policy version 0. Stop strings need `decode`, from ids to text."""
    device = pick_device(section.device)
    dtype = pick_dtype(section.dtype, device)
    base = find_base(folder) if is_adapter(folder) else folder
    decoder = load_decoder(base, device=device, dtype=dtype)
    core = make_core(decoder, section, decode)
    if base != folder:
        core.adapters.put("", read_adapter(folder, decoder.shape, device=device, dtype=dtype))
    grammars = GrammarCompiler(folder, decoder.shape.vocab_size)
    engine = EmbeddedEngine(core, name=name, queue_limit=section.queue, seed=seed, stop_ids=end_ids(folder), grammars=grammars)
    if isinstance(core, PagedCore):
        engine.warm_up(core)
    return engine


def make_core(
    decoder: Decoder, section: EngineSection, decode: Callable[[Sequence[int]], str] | None = None
) -> EngineCore | PagedCore:
    """The paged core on a GPU; the other one on a CPU, and where Triton is not installed."""
    if decoder.embed.weight.is_cuda and fused.kernels is not None:
        switch_threads_often()  # the core's thread launches hundreds of kernels, and waits for the interpreter's lock with each
        slots = section.slots or GPU_SLOTS
        tokens = section.cache_tokens or free_tokens(decoder, slots)
        try:
            return PagedCore(decoder, slots=slots, cache_tokens=tokens, decode=decode)
        except torch.OutOfMemoryError as cause:
            raise ConfigError(
                f"the GPU's memory does not hold a cache of {tokens:,} tokens; set engine.cache_tokens to fewer, or free some"
            ) from cause
    return EngineCore(decoder, slots=section.slots or 32, cache_tokens=section.cache_tokens or 65536, decode=decode)


def pick_device(name: str, setting: str = "engine.device") -> torch.device:
    """The device that a setting names; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        reason = str(cause).splitlines()[0]
        raise ConfigError(f"{setting} = {name!r} cannot be used here ({reason}); leave it at 'auto'") from cause
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision that `engine.dtype` names; "auto" is bfloat16 on a GPU and float32 on a CPU, where it is faster."""
    return DTYPES[name] if name != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32


def end_ids(folder: Path) -> frozenset[int]:
    """The ids that end a reply: of the model's generation config (else its config), and of its tokenizer."""
    ids: int | list[int] | None = _read(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = _read(folder / "config.json").get("eos_token_id")
    named = {ids} if isinstance(ids, int) else set(ids or ())
    token: str | dict[str, Any] | None = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    added: list[dict[str, Any]] = _read(folder / "tokenizer.json").get("added_tokens", [])
    return frozenset(named | {entry["id"] for entry in added if entry["content"] == text})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path}: cannot be read ({cause}); pull the model again") from cause
