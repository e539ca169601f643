"""`penstock eval` against an endpoint: a real policy of ours behind HTTP, measured the same as when it is embedded."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import cli_cases
import pytest
from eval_cases import attempts
from text_endpoint_cases import KEY, Answer, Endpoint, base_url, in_thread

from penstock.chat.renderer import Renderer
from penstock.cli.app import run
from penstock.config import EngineSection
from penstock.engines.base import open_engine
from penstock.models import resolve
from penstock.records import Sampling
from penstock.testing import workbench

MULTIPLY = Path(__file__).parents[3] / "examples" / "multiply" / "tiny.toml"
AGENT = """
from penstock import AgentWorkflow, AgentWorkflowConfig, Grader

class Config(AgentWorkflowConfig):
    name: str = "asker"
    way: str = "chat"

class Asker(AgentWorkflow[Config]):
    async def run(self, ctx):
        stream = ctx.config.way.endswith("stream")
        if ctx.config.way.startswith("messages"):
            given = {"model": "any", "messages": ctx.prompt, "max_tokens": 20}
            if not stream:
                await ctx.anthropic().messages.create(**given)
                return
            async with ctx.anthropic().messages.stream(**given) as events:
                await events.get_final_message()
            return
        client = ctx.openai()
        if ctx.config.way.startswith("responses"):
            made = await client.responses.create(model="openai/osmosis-rollout", input=ctx.prompt, stream=stream)
        else:
            made = await client.chat.completions.create(model="any", messages=ctx.prompt, max_tokens=20, stream=stream)
        if stream:
            async for _ in made:
                pass

class Spoke(Grader):
    async def grade(self, ctx):
        return float(bool(ctx.samples["main"].messages[-1]["content"]))
"""
WAYS = {"openai": ("chat", "responses-stream", "messages"), "anthropic": ("chat-stream", "responses", "messages-stream")}


@asynccontextmanager
async def policy() -> AsyncGenerator[tuple[str, str]]:
    model = await asyncio.to_thread(resolve, "tiny", lambda *_: None)
    renderer = Renderer.load(model.path)
    section = EngineSection(device="cpu")
    engine = await open_engine(section, model.path, name="tiny", seed=0, decode=renderer.tokenizer.decode)
    try:
        async with workbench(engine, renderer, serves=True) as bench:
            session = await bench.rollout(sampling=Sampling(max_tokens=30))
            yield session.base_url, session.token
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def served() -> Generator[tuple[str, str]]:
    """The tiny policy behind a gateway: its address, and a token."""
    with in_thread(policy) as found:
        yield found


@pytest.fixture
def project(tmp_path, monkeypatch, served) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY, served[1])
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n}*3"}) + "\n" for n in range(2, 5)))
    return tmp_path


def settings(kind: str, url: str) -> list[str]:
    given = {"engine.name": kind, "engine.url": base_url(kind, url), "engine.api_key_env": KEY, "model.name": "far"}
    return [part for key, value in given.items() for part in ("--set", f"{key}={value}")]


def result(capsys, *arguments: str, code: int = 0):
    capsys.readouterr()
    assert run([*arguments, "--json"]) == code, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in WAYS.items() for way in ways])
def test_an_evaluation_needs_an_endpoint_and_no_weights(kind, way, project, served, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(project / "empty"))
    arguments = ["--agent", "agent.py", "--dataset", "tasks.jsonl", "--set", f"workflow.way={way}", *settings(kind, served[0])]
    found = result(capsys, "eval", "run", *arguments, "--set", "engine.price_in=2", "--set", "engine.price_out=10")
    assert (found["model"], found["outcome"]["ends"], found["outcome"]["reward"]["value"]) == ("far", {"completed": 3}, 1.0)
    assert found["outcome"]["prompt_tokens"] > 0 and found["outcome"]["completion_tokens"] > 0
    cost = (2 * found["outcome"]["prompt_tokens"] + 10 * found["outcome"]["completion_tokens"]) / 1e6
    assert found["outcome"]["cost"] == pytest.approx(cost)
    steps = [step for attempt in attempts(Path(found["folder"])) for step in attempt.steps]
    assert [step.completion_ids for step in steps] == [()] * 3
    assert not (project / "empty").exists()
    assert served[1] not in "".join(file.read_text(errors="replace") for file in Path(found["folder"]).rglob("*") if file.is_file())


def test_flags_name_the_endpoint_and_a_url_alone_speaks_openais(project, served, capsys):
    what = ["--agent", "agent.py", "--dataset", "tasks.jsonl", "--rows", "0-0", "--set", "workflow.way=chat"]
    where = ["--base-url", base_url("openai", served[0]), "--api-key-env", KEY, "--model", "far"]
    found = result(capsys, "eval", "run", *what, *where)
    assert (found["model"], found["outcome"]["ends"]) == ("far", {"completed": 1})


def test_a_policy_measures_the_same_behind_an_endpoint_as_embedded(project, served, capsys):
    greedy = ["eval", "run", str(MULTIPLY), "--rows", "0-7", "--set", "eval.temperature=0"]
    near = result(capsys, *greedy, "--name", "near")
    far = result(capsys, *greedy, "--name", "far", *settings("openai", served[0]))
    assert far["outcome"]["steps"] == near["outcome"]["steps"] > 8
    said = [
        [[step.message["content"] for step in attempt.steps] for attempt in attempts(Path(each["folder"]))] for each in (near, far)
    ]
    assert said[0] == said[1]
    assert far["outcome"]["completion_tokens"] == near["outcome"]["completion_tokens"]
    compared = result(capsys, "eval", "compare", near["folder"], far["folder"])
    assert (compared["tasks"], compared["difference"]["value"]) == (8, 0.0)
    again = result(capsys, "eval", "regrade", far["folder"])
    assert again["outcome"]["reward"]["value"] == far["outcome"]["reward"]["value"]
    assert run(["verify", far["folder"], "--channel", "eval"]) == 2
    assert "answered as text from an endpoint" in capsys.readouterr().err


def test_training_on_an_endpoint_is_refused_before_anything_is_made(project, served, capsys):
    assert run(["train", str(MULTIPLY), *settings("openai", served[0])]) == 2
    said = capsys.readouterr().err
    assert "asks an endpoint for text" in said and "Traceback" not in said
    assert not (project / "runs").exists()


@pytest.mark.parametrize("way", ["chat", "messages"])
def test_rollouts_of_endpoint_that_refuses_key_end_with_its_words(way, project, capsys):
    refusals = [Answer(b'{"error": {"message": "who are you?"}}', 401)] * 3
    with in_thread(lambda: Endpoint(*refusals)) as endpoint:
        arguments = ["--agent", "agent.py", "--dataset", "tasks.jsonl", "--set", f"workflow.way={way}"]
        found = result(capsys, "eval", "run", *arguments, *settings("openai", endpoint.url), code=1)["outcome"]
    assert found["ends"] == {"engine_error": 3}
    [(said, count), *_] = found["reasons"]["engine_error"].items()
    assert "who are you?" in said and f"check the key in {KEY}" in said and count >= 1


def test_a_missing_key_is_one_line_before_anything_begins(project, served, capsys, monkeypatch):
    monkeypatch.delenv(KEY)
    assert run(["eval", "run", "--agent", "agent.py", "--dataset", "tasks.jsonl", *settings("openai", served[0])]) == 2
    assert f"the environment has no {KEY}" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_a_gateway_that_stands_alone_asks_endpoints_too(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "any")
    with in_thread(Endpoint) as endpoint:
        given = ("--url", endpoint.url, "--set", f"engine.api_key_env={KEY}", "--set", "model.name=far")
        with cli_cases.served(tmp_path, *given, engine="openai") as gateway:
            opened = gateway.rollout()
            status, answer = gateway.chat(opened["token"], cli_cases.USER)
            assert (status, answer["choices"][0]["message"]["content"], answer["usage"]["total_tokens"]) == (200, "42", 9)
            assert gateway.stop()[0] == 0
        assert endpoint.requests[0]["model"] == answer["model"] == "far"
