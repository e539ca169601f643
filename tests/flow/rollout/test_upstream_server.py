"""Rollout servers that run the upstream Osmosis SDK, driven by the server executor: one key for model and callbacks, null fields.

The double says what SDK 0.2.31 was recorded to say. The SDK itself is driven where PENSTOCK_OSMOSIS_SDK names a Python (3.12 or
newer) of an environment with it: `pip install "osmosis-ai[server]==0.2.31" litellm==1.91.1 strands-agents==1.62.0
openai-agents==0.18.3 mcp==1.28.1`.
"""

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

import aiohttp
import pytest
from rollout_cases import good_grade, make_agent
from server_double import Double

from penstock.cli.scaffold import EXAMPLES
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.http.listen import bind
from penstock.records import End, Sampling, Task, make_rollout
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import open_runner
from penstock.testing import ScriptedEngine, workbench

SDK = os.environ.get("PENSTOCK_OSMOSIS_SDK", "")
TASK = Task(id="t", prompt=({"role": "user", "content": "6 times 7?"},), label="42")
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


async def run_rollouts(url, renderer, script, count):
    """The attempts of `count` rollouts that a rollout server carries out."""
    limits = RolloutSection(executor="server", agent_timeout_s=60, grader_timeout_s=60)
    engine = ScriptedEngine(list(script) * count, renderer.tokenizer)
    async with contextlib.AsyncExitStack() as stack:
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        section = read_section("server", {"urls": [url]})
        agent = make_agent(None, good_grade)
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=limits, section=section)
        runner = await stack.enter_async_context(opened)
        rollouts = [make_rollout("train-0", TASK.id, index) for index in range(count)]
        await bench.pool.open_group(TASK, rollouts, seq=0)
        for rollout in rollouts:
            await runner.run(rollout, TASK, Sampling(max_tokens=200))
        return [await bench.pool.rollout(rollout.id) for rollout in rollouts]


async def act_as_upstream(double, request):
    """SDK 0.2.31: it knows no `llm_api_key`, and sends null for fields that it does not fill."""
    key, rollout = request["controller_api_key"], request["rollout_id"]
    body = {"model": "osmosis-rollout", "messages": request["initial_messages"], "stream": True, "tools": []}
    headers = {"authorization": f"Bearer {key}", "x-rollout-id": rollout, "x-sample-id": "solver"}
    url = f"{request['chat_completions_url']}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    messages = [*request["initial_messages"], {"role": "assistant", "content": "42"}]
    sample = {"id": "solver", "messages": messages, "label": None, "reward": 1.0, "remove_sample": False}
    await double.complete(request, extra_fields=None, err_message=None, err_category=None)
    samples = {"solver": sample | {"metrics": None, "extra_fields": None}}
    await double.grade(request, samples=samples, err_message=None, err_category=None)


def test_server_with_one_key_and_null_fields_is_driven(renderer):
    async def main():
        async with asyncio.timeout(60), Double(act_as_upstream, separate_keys=False).serving() as double:
            return await run_rollouts(double.url, renderer, ["42"], 2)

    for attempt in asyncio.run(main()):
        assert (attempt.end, attempt.message) == (End.COMPLETED, "")
        assert [(grade.transcript, grade.reward) for grade in attempt.grades] == [("solver", 1.0)]
        assert [step.transcript for step in attempt.steps] == ["solver"]


def test_server_gets_separate_keys_for_model_and_callbacks(renderer):
    async def act(double, request):
        assert request["llm_api_key"] != request["controller_api_key"]
        refused, _ = await double.complete(request, key=request["llm_api_key"])
        await double.complete(request, status="failure", err_message=f"the model's key was answered {refused}")

    async def main():
        async with asyncio.timeout(60), Double(act).serving() as double:
            return await run_rollouts(double.url, renderer, [], 1)

    assert asyncio.run(main())[0].message == "the model's key was answered 401"


@pytest.mark.osmosis
@pytest.mark.skipif(not SDK, reason="set PENSTOCK_OSMOSIS_SDK to a Python with osmosis-ai 0.2.31")
@pytest.mark.parametrize("integration", ["strands", "agents"])
def test_upstream_sdk_itself_is_driven(integration, renderer, tmp_path):
    async def main(url):
        async with asyncio.timeout(240):
            await up(url)
            return await run_rollouts(url, renderer, [CALL, "It is 42."], 4)

    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    command = [SDK, str(Path(__file__).with_name("upstream_agent.py")), integration, str(port)]
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
        try:
            attempts = asyncio.run(main(f"http://127.0.0.1:{port}"))
        finally:
            process.terminate()
    assert [(attempt.end, attempt.message) for attempt in attempts] == [(End.COMPLETED, "")] * 4
    assert [[grade.reward for grade in attempt.grades] for attempt in attempts] == [[1.0]] * 4
    assert [[step.transcript for step in attempt.steps] for attempt in attempts] == [["solver", "solver"]] * 4
    assert not [node.reason for attempt in attempts for node in attempt.nodes if node.reason]


@pytest.mark.osmosis
@pytest.mark.skipif(not SDK, reason="set PENSTOCK_OSMOSIS_SDK to a Python with osmosis-ai 0.2.31")
@pytest.mark.parametrize("main", ["plain_main.py", "strands_main.py", "openai_main.py"])
def test_written_templates_run_on_the_upstream_sdk(main, renderer, tmp_path):
    async def work(url):
        async with asyncio.timeout(240):
            await up(url)
            return await run_rollouts(url, renderer, [CALL, "42"], 2)

    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "_OSMOSIS_ROLLOUT_PORT": str(port)}
    with subprocess.Popen([SDK, str(EXAMPLES / "osmosis" / main)], env=environment, cwd=tmp_path) as process:
        try:
            attempts = asyncio.run(work(f"http://127.0.0.1:{port}"))
        finally:
            process.terminate()
    assert [(attempt.end, attempt.message, attempt.reward) for attempt in attempts] == [(End.COMPLETED, "", 1.0)] * 2


async def up(url):
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
