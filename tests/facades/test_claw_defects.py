"""Weak points of the reference that no other suite looks at, each as a test that would fail there."""

import asyncio
import json
import socket

import pytest
from openai import APIStatusError, AsyncOpenAI
from seed_rollouts import run_rollouts

from claw_r1.agent_flow import MultiStepAgentFlow
from claw_r1.agent_flow.agent_flow import AgentFlowBase
from claw_r1.async_main import run_config
from claw_r1.convert import convert, read_overrides
from penstock.chat.renderer import Renderer
from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.records import End, Task
from penstock.sdk.discovery import open_agent
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model"), corpus=["hello there " * 9]))


class Calls(AgentFlowBase):
    """A flow that is driven from outside."""

    async def run(self, sampling_params, **kwargs):
        return 1


def on_open_gateway(renderer, script, scenario, **options):
    """What `scenario(bench, flow)` gives, with a flow of an open gateway."""

    async def run():
        engine = ScriptedEngine(script, renderer.tokenizer)
        async with asyncio.timeout(60), workbench(engine, renderer, serves=True, is_open=True, **options) as bench:
            return await scenario(bench, Calls(gateway_url=bench.gateway.base_url.removesuffix("/v1")))

    return asyncio.run(run())


def test_registered_channel_is_kept(renderer):
    async def scenario(bench, flow):
        http, base = bench.http(), "/traj/7/v1"
        await http.post(f"{base}/register_trajectory", json={"channel": "val"})
        root = bench.gateway.base_url.removesuffix("/v1")
        async with AsyncOpenAI(base_url=f"{root}{base}", api_key="any", max_retries=0) as client:
            await client.chat.completions.create(model="default", messages=HI)
            done = await http.post(f"{base}/complete_trajectory", json={"reward": 0.5})
            with pytest.raises(APIStatusError, match="410"):
                await client.chat.completions.create(model="default", messages=HI)
        unknown = await http.post("/complete_trajectory/nobody", json={})
        return done.status_code, unknown.status_code, await bench.pool.rollout("traj")

    done, unknown, attempt = on_open_gateway(renderer, ["hello"], scenario)
    assert (done, unknown) == (200, 404)
    assert (attempt.ref.channel, attempt.end, attempt.reward, len(attempt.steps)) == ("val", End.COMPLETED, 0.5, 1)


def test_row_whose_flow_fails_fails_alone(renderer, tmp_path):
    (tmp_path / "flows.py").write_text(
        "from claw_r1.agent_flow import SingleStepSingleTurnAgentFlow\n"
        "from penstock import Grader\n"
        "class Half(Grader):\n"
        "    async def grade(self, ctx):\n"
        "        ctx.set_reward(0.5)\n"
        "class Moody(SingleStepSingleTurnAgentFlow):\n"
        "    async def run(self, sampling_params, **kwargs):\n"
        "        if kwargs['trajectory_uid'].endswith('.1.1'):\n"
        "            raise ValueError('no luck')\n"
        "        return await super().run(sampling_params, **kwargs)\n"
    )
    agent = open_agent(AgentSection(entry=tmp_path / "flows.py"), {}, {})
    ran = run_rollouts(renderer, agent, ["hello"] * 4, count=4)
    assert [attempt.end for attempt in ran.attempts] == [End.COMPLETED, End.AGENT_ERROR, End.COMPLETED, End.COMPLETED]
    assert "no luck" in ran.attempts[1].message


def test_rollout_of_several_steps_is_graded_once(renderer, tmp_path):
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if solution_str.endswith(ground_truth) and extra_info['num_turns'] == 4 else 0.0\n"
    )
    source = AgentSection(entry=tmp_path / "none.py", flow="multi_step_agent")
    agent = open_agent(source, {}, {"path": str(tmp_path / "score.py")})
    assert issubclass(agent.workflow.flows.pick("multi_step_agent").cls, MultiStepAgentFlow)
    ran = run_rollouts(renderer, agent, ["41", "42"], task=Task(id="t", prompt=tuple(HI), label="42", metadata={}))
    assert (ran.attempt.end, len(ran.attempt.steps), ran.attempt.reward) == (End.COMPLETED, 2, 1.0)
    assert [grade.step for grade in ran.attempt.grades] == [1]


def test_settings_that_the_reference_ignores_work_or_are_refused():
    declared = ("staleness_threshold=0", "trigger_parameter_sync_step=1", "max_queue_size=8", "partial_rollout=true")
    given = [f"async_training.{each}" for each in declared]
    converted = convert(read_overrides(["data.train_files=a.jsonl", *given]))
    made = run_config(converted).rollout
    assert (made.max_staleness, made.max_waiting, made.overflow) == (0, 8, "drop")
    assert ["partial_rollout" in notice for notice in converted.notices] == [True]
    with pytest.raises(ConfigError, match="require_batches"):
        convert(read_overrides(["async_training.require_batches=2"]))


def test_no_metadata_of_a_row_is_copied_onto_its_steps(renderer):
    async def scenario(bench, flow):
        row = {"secret": "x" * 1000}
        await bench.http().post("/t/1/v1/register_trajectory", json={"metadata": row})
        for turn in range(3):
            await flow.gateway_generate(trajectory_uid="t", prompt_uid="1", messages=[*HI] * (turn + 1))
        return await bench.pool.rollout("t"), await bench.pool.task("t")

    attempt, task = on_open_gateway(renderer, ["hello"] * 3, scenario)
    assert task.metadata["secret"] == "x" * 1000
    assert "x" * 1000 not in json.dumps([str(step) for step in attempt.steps])


@pytest.mark.slow
def test_workers_on_other_nodes_get_a_reachable_address():
    from penstock.scale.cluster import open_cluster, own_node, reachable_url

    def seen(url, *, several_nodes):
        return asyncio.run(reachable_url(url, several_nodes=several_nodes))

    with open_cluster("", namespace="test"), socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as all_:
        port, own = all_.getsockname()[1], own_node()["NodeManagerAddress"]
        loopback = f"http://127.0.0.1:{here.getsockname()[1]}/v1"
        assert seen(loopback, several_nodes=False) == loopback
        with pytest.raises(ConfigError, match=r"gateway\.host"):
            seen(loopback, several_nodes=True)
        if not own.startswith("127."):
            assert seen(f"http://127.0.0.1:{port}/v1", several_nodes=True) == f"http://{own}:{port}/v1"
        assert seen("http://10.0.0.5:8100/v1", several_nodes=True) == "http://10.0.0.5:8100/v1"
