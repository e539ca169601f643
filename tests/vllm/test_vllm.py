"""A real vLLM server on the CPU against the embedded engine; runs where $PENSTOCK_VLLM names the folder that `install.py` made."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing

import jsonschema
import pytest
import torch
from vllm_server import HOME, metric, vllm_server

from penstock.chat.renderer import Renderer
from penstock.chat.tokenizer import Tokenizer
from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.base import Engine, SampledChunk
from penstock.engines.embedded.decoder import causal
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.servers.vllm import VllmSection
from penstock.engines.token_sets import unpack_sets
from penstock.models.cache import ModelFolder
from penstock.models.pull import resolve
from penstock.records import ReplyFormat, Sampling
from penstock.testing import make_step
from penstock.train.resources import AllowedReplay

CLOSE = 1e-3
"""Of two float32 implementations of one model; measured: 3e-5."""

Case = Callable[[Engine, EmbeddedEngine, list[int]], Coroutine[None, None, None]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(not HOME, reason="$PENSTOCK_VLLM is not set")]


@pytest.fixture(scope="module")
def model() -> ModelFolder:
    return resolve("smollm2-135m")


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def server(request: pytest.FixtureRequest, model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(model.path, tmp_path_factory.mktemp("vllm"), mode=request.param, context=1024) as url:
        yield url


def test_greedy_tokens_and_their_probabilities_are_those_of_embedded_engine(server: str, model: ModelFolder):
    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        sampling = Sampling(max_tokens=16, temperature=0.0)
        one, other = await read(vllm, prompt, sampling), await read(embedded, prompt, sampling)
        assert (one.ids, one.finish) == (other.ids, other.finish)
        assert one.full_logprobs == pytest.approx(other.full_logprobs, abs=CLOSE)
        assert set(one.logprobs) == set(other.logprobs) == {0.0}

    compare(case, server, model)


def test_sampled_tokens_have_probabilities_that_embedded_engine_gives_them(server: str, model: ModelFolder):
    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        reply = await read(vllm, prompt, Sampling(max_tokens=12, seed=3))
        assert reply.logprobs == reply.full_logprobs
        assert reply.logprobs == pytest.approx(scores(embedded, prompt, reply.ids), abs=CLOSE)

    compare(case, server, model)


def test_of_tempered_tokens_is_reported_which_log_probability_is_known(
    server: str, model: ModelFolder, request: pytest.FixtureRequest
):
    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        reply = await read(vllm, prompt, Sampling(max_tokens=8, seed=3, temperature=0.7))
        processed = request.node.callspec.params["server"] == "processed_logprobs"
        assert (len(reply.logprobs), reply.behaviour_known) == (8, processed)
        assert reply.full_logprobs == (() if processed else reply.logprobs)
        if not processed:
            assert reply.logprobs == pytest.approx(scores(embedded, prompt, reply.ids), abs=CLOSE)

    compare(case, server, model)


def test_the_most_likely_tokens_are_those_of_the_embedded_engine(server: str, model: ModelFolder, request: pytest.FixtureRequest):
    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        for temperature in (0.0, 1.0, 0.7):
            reply = await read(vllm, prompt, Sampling(max_tokens=6, seed=3, temperature=temperature, top_logprobs=5))
            processed = request.node.callspec.params["server"] == "processed_logprobs"
            if temperature == 0.7 and processed:  # the server reports them of the tempered distribution only
                assert reply.most_likely == ()
                continue
            for place, likely in enumerate(reply.most_likely):
                at = [*prompt, *reply.ids[:place]]
                [own] = (await read(embedded, at, Sampling(max_tokens=1, temperature=0.0, top_logprobs=5))).most_likely
                assert [logprob for _, logprob in likely] == pytest.approx([logprob for _, logprob in own], abs=CLOSE)
            assert [len(likely) for likely in reply.most_likely] == [5] * len(reply.ids)

    compare(case, server, model)


def test_reply_follows_its_schema_under_distribution_that_trainer_replays(
    server: str, model: ModelFolder, request: pytest.FixtureRequest
):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "minimum": 10, "maximum": 99}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    renderer = Renderer.load(model.path)

    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        grammar = renderer.reply_grammar(ReplyFormat(schema=schema), (), frozenset(), prompt=prompt)
        asked = Sampling(max_tokens=60, seed=3, grammar=grammar, stop_ids=renderer.stop_ids)
        reply = await read(vllm, prompt, asked)
        assert reply.finish == "stop"
        jsonschema.validate(json.loads(renderer.tokenizer.decode(reply.ids)), schema)
        allowed = allowed_rows(model, embedded, asked, reply.ids)
        if request.node.callspec.params["server"] == "processed_logprobs":
            assert reply.logprobs == pytest.approx(scores(embedded, prompt, reply.ids, allowed), abs=CLOSE)

    compare(case, server, model)


def test_seeds_stops_and_hanging_up(server: str, model: ModelFolder):
    async def case(vllm: Engine, embedded: EmbeddedEngine, prompt: list[int]) -> None:
        free = await read(vllm, prompt, Sampling(max_tokens=10, seed=3))
        assert (await read(vllm, prompt, Sampling(max_tokens=10, seed=3))).ids == free.ids
        stopped = await read(vllm, prompt, Sampling(max_tokens=10, seed=3, stop_ids=(free.ids[5],)))
        assert (stopped.ids, stopped.finish) == (free.ids[: free.ids.index(free.ids[5]) + 1], "stop")
        before = metric(server, "generation_tokens_total")
        async with aclosing(vllm.generate(prompt, Sampling(max_tokens=900, seed=4))) as reply:
            await anext(reply)
        while await asyncio.to_thread(metric, server, "num_requests_running"):
            pass
        assert 0 < metric(server, "generation_tokens_total") - before < 450

    compare(case, server, model)


def compare(case: Case, server: str, model: ModelFolder) -> None:
    """Run `case` with both engines and a prompt."""
    tokenizer = Tokenizer.load(model.path)
    prompt = list(tokenizer.encode("<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n"))

    async def bounded() -> None:
        section = VllmSection(name="vllm", url=(server,))
        vllm = await asyncio.to_thread(ENGINES.load("vllm"), model.path, name="any", section=section, seed=0)
        embedded = ENGINES.load("embedded")(model.path, name="any", section=EngineSection(device="cpu"), seed=0)
        try:
            await case(vllm, embedded, prompt)
        finally:
            await vllm.close()
            await embedded.close()

    asyncio.run(bounded())


async def read(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> SampledChunk:
    """The whole reply as one chunk."""
    chunks = [chunk async for chunk in engine.generate(prompt, sampling)]
    columns = [sum((getattr(c, name) for c in chunks), ()) for name in ("ids", "logprobs", "full_logprobs", "versions")]
    likely = sum((chunk.most_likely for chunk in chunks), ())
    known = all(chunk.behaviour_known for chunk in chunks)
    return SampledChunk(*columns, finish=chunks[-1].finish, behaviour_known=known, most_likely=likely)


def allowed_rows(model: ModelFolder, embedded: EmbeddedEngine, sampling: Sampling, ids: tuple[int, ...]) -> torch.Tensor:
    """What the grammar allows in the place of each of `ids`, as the trainer replays it, [ids, vocabulary]."""
    vocabulary = embedded.decoder.shape.vocab_size
    step = make_step("r", 0, ids, logprobs=(), sampling=sampling, message={"role": "assistant", "content": ""})
    replayed = AllowedReplay(model.path, vocabulary)(step)
    assert not replayed.problem
    return torch.from_numpy(unpack_sets(replayed.allowed, vocabulary))


@torch.no_grad()
def scores(embedded: EmbeddedEngine, prompt: list[int], ids: tuple[int, ...], allowed: torch.Tensor | None = None) -> list[float]:
    """The log-probabilities that the embedded engine's weights give to `ids` after `prompt`, among the allowed tokens."""
    every = torch.tensor([*prompt, *ids])
    hidden = embedded.decoder(every[None], torch.arange(len(every))[None], causal)
    logits = embedded.decoder.logits(hidden[0, len(prompt) - 1 : -1])
    logprobs = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).log_softmax(-1)
    return logprobs.gather(-1, every[len(prompt) :, None])[:, 0].tolist()
