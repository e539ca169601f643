"""Adapters by name on a real vLLM server, without development mode; runs where $PENSTOCK_VLLM names the folder of `install.py`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapter_cases import random_adapter
from engine_cases import joined
from vllm_server import HOME, vllm_server

from penstock.engines.base import SampledChunk
from penstock.engines.checkpoint_files import model_digest
from penstock.engines.embedded.decoder import causal, read_decoder_shape
from penstock.engines.embedded.lora import load_policy
from penstock.engines.servers.vllm import VllmEngine, VllmSection, open_engine
from penstock.models.pull import resolve
from penstock.records import Sampling

CLOSE = 2e-3
PROMPT = list(range(5, 40))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(not HOME, reason="$PENSTOCK_VLLM is not set")]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("smollm2-135m").path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16")
    folder = tmp_path_factory.mktemp("vllm")
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_server(model, folder, mode="processed_logprobs", context=512, arguments=arguments, **environment) as url:
        yield url


def write(folder: Path, model: Path, version: int) -> Path:
    made = folder / f"{version:06d}"
    made.mkdir(parents=True)
    shape = read_decoder_shape(model)
    random_adapter(shape, rank=16, seed=version, size=0.02, base=model, digest=model_digest(model)).save(made)
    return made


def gaps(folder: Path, reply: SampledChunk, last: int) -> list[float]:
    """Between vLLM's log-probabilities and those of base and adapter in `folder`."""
    decoder, ids = load_policy(folder), torch.tensor([[*PROMPT, last, *reply.ids]])
    with torch.no_grad():
        scores = decoder.logits(decoder(ids, torch.arange(ids.shape[1]).unsqueeze(0), causal))[0].log_softmax(-1)
    places = enumerate(zip(reply.ids, reply.logprobs, strict=True), start=len(PROMPT))
    return [abs(float(scores[at, token]) - logprob) for at, (token, logprob) in places]


def test_versions_and_policies_each_use_their_own_adapter(server: str, model: Path, tmp_path: Path):
    folders = {
        ("", 0): write(tmp_path, model, 0),
        ("", 1): write(tmp_path, model, 1),
        ("judge", 2): write(tmp_path / "j", model, 2),
    }

    async def reply(engine: VllmEngine, policy: str, last: int, begun: asyncio.Event | None = None) -> SampledChunk:
        chunks = list[SampledChunk]()
        async for chunk in engine.generate([*PROMPT, last], Sampling(max_tokens=24, seed=last), policy=policy):
            chunks.append(chunk)
            if begun is not None:
                begun.set()
        return joined(chunks)

    async def case() -> None:
        engine = await asyncio.to_thread(open_engine, model, name="any", section=VllmSection(name="vllm", url=(server,)), seed=0)
        try:
            await engine.load(0, folders["", 0])
            begun = asyncio.Event()
            old = asyncio.create_task(reply(engine, "", 100, begun))
            await begun.wait()
            await engine.load(1, folders["", 1])
            await engine.load(2, folders["judge", 2], policy="judge")
            new, judge = await asyncio.gather(reply(engine, "", 101), reply(engine, "judge", 102))
            for (policy, version), (one, last) in zip(folders, ((await old, 100), (new, 101), (judge, 102)), strict=True):
                assert (set(one.versions), len(one.ids)) == ({version}, 24)
                assert max(gaps(folders[policy, version], one, last)) < CLOSE
            assert max(gaps(folders["", 0], new, 101)) > CLOSE  # it is not the version before
            await engine.load(3, write(tmp_path, model, 3))
            named = [name.split("-")[:2] for name in await engine.listed_adapters(server)]
            assert sorted(named) == [["judge", "v2"], ["policy", "v3"]]
        finally:
            await engine.close()

    asyncio.run(case())
