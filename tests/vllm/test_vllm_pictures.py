"""A real vLLM server whose model sees pictures: what is recorded is what the model was shown."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vision import BLUE, RED, image, url_of, write_tiny_vision
from transformers import Idefics3ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vllm_server import HOME, vllm_server

from penstock.chat.renderer import Renderer
from penstock.engines.servers.vllm import VllmSection, open_engine
from penstock.gateway.graph import TokenGraph
from penstock.pool.rows import PictureStore
from penstock.records import Rollout, Step
from penstock.testing import workbench
from penstock.train.sequences import exactness, read_graph, why_untrainable

CLOSE = 1e-3
"""Of two float32 implementations of one model."""
AGENT = """
import json, os, sys, urllib.request
talk = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": sys.argv[1]}}]}]
for _ in range(2):
    body = json.dumps({"model": "any", "messages": talk, "max_tokens": 4}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))
    talk += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(not HOME, reason="$PENSTOCK_VLLM is not set")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_server(model, folder, mode="processed_logprobs", context=1024, arguments=["--enable-scale-out"]) as url:
        yield url


def test_conversation_with_pictures_has_log_probabilities_of_what_is_recorded(server: str, model: Path, tmp_path: Path):
    talk: list[dict[str, Any]] = []
    turns = ["Hello.", [{"type": "text", "text": "And <image>?"}, image(RED)], "More.", [image(BLUE), image(RED)]]

    async def case() -> Rollout:
        section = VllmSection(name="vllm", url=(server,))
        engine = await asyncio.to_thread(open_engine, model, name="any", section=section, seed=0)
        async with workbench(engine, Renderer.load(model), pictures=tmp_path) as bench:
            session = await bench.rollout()
            client = bench.openai(session)
            for number, turn in enumerate(turns):
                talk.append({"role": "user", "content": turn})
                answer = await client.chat.completions.create(model="any", messages=talk, max_tokens=6, seed=number)
                talk.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert not [name for name in bench.gateway.counts if name.startswith("placeholder")]
            attempt = await bench.attempt(session)
        await engine.close()
        return attempt

    attempt = asyncio.run(case())
    assert [node.parent for node in attempt.nodes] == [None, 0, 1, 2] and exactness(attempt).rate == 1.0
    masks = [why_untrainable(step, read_graph(attempt)) for step in attempt.steps]
    assert masks == [None, *["picture_in_context"] * 3]
    shown = Idefics3ForConditionalGeneration.from_pretrained(model).eval()
    for step in attempt.steps:
        truth = scores(shown, model, attempt, step, PictureStore(tmp_path))
        assert step.logprobs == pytest.approx(truth, abs=CLOSE), step.index


def test_what_a_call_asks_for_holds_next_to_pictures_too(server: str, model: Path, tmp_path: Path):
    async def case() -> None:
        section = VllmSection(name="vllm", url=(server,))
        engine = await asyncio.to_thread(open_engine, model, name="any", section=section, seed=0)
        async with workbench(engine, Renderer.load(model), pictures=tmp_path) as bench:
            session = await bench.rollout()

            async def ask(**fields: Any) -> Step:
                body = {"model": "any", "messages": [{"role": "user", "content": [image(RED)]}], "temperature": 0, "max_tokens": 8}
                answer = await bench.http(session.token).post("/v1/chat/completions", json={**body, **fields})
                assert answer.status_code == 200, answer.text
                return (await bench.attempt(session)).steps[-1]

            free = await ask()
            banned = await ask(logit_bias={str(free.completion_ids[0]): -100})
            stopped = await ask(max_tokens=1)
            formed = await ask(response_format={"type": "json_object"}, temperature=1)
        await engine.close()
        assert banned.completion_ids[0] != free.completion_ids[0] == stopped.completion_ids[0]
        assert len(stopped.completion_ids) == 1 and formed.message["content"].lstrip().startswith("{")

    asyncio.run(case())


def test_a_command_is_recorded_with_the_pictures_that_it_showed(server: str, model: Path, tmp_path: Path):
    record = tmp_path / "record"
    penstock = [sys.executable, "-m", "penstock"]
    options = ["--engine", "vllm", "--model", str(model), "--url", server, "--folder", str(record), "--json"]
    done = subprocess.run(
        [*penstock, "run", *options, "--", sys.executable, "-c", AGENT, url_of(RED)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stderr.splitlines()[-1])["exact_token_rate"] == 1.0
    audit = subprocess.run([*penstock, "verify", str(record), "--channel", "adhoc", "--json"], capture_output=True, text=True)
    reported = json.loads(audit.stdout)
    assert (reported["status"], reported["exact_token_rate"], reported["masked"]) == ("unproven", 1.0, {"picture_in_context": 2})
    assert [file.read_bytes() for file in (record / "pictures").iterdir()] == [RED]


@torch.no_grad()
def scores(shown: Any, model: Path, attempt: Rollout, step: Step, pictures: PictureStore) -> list[float]:
    """What transformers gives to a reply after the recorded ids and pictures."""
    graph = TokenGraph(attempt)
    prompt, seen = graph.prompt(step.node), graph.pictures(step.index)
    ids = torch.tensor([[*prompt, *step.completion_ids]])
    given: dict[str, Any] = {}
    if seen:
        opened = [Image.open(io.BytesIO(pictures.read(picture.digest))).convert("RGB") for picture in seen]
        given = dict(Idefics3ImageProcessorPil.from_pretrained(model)([opened], return_tensors="pt"))
        given = {name: given[name] for name in ("pixel_values", "pixel_attention_mask")}
    logits = shown(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
