"""Every sample of seed 003, read from the document and run on a real gateway: flows as rollouts, registration, the command line."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from claw_blocks import NAMES, arguments, filled, read_samples, with_body
from openai import APIStatusError, AsyncOpenAI
from seed_blocks import FOLDER
from seed_rollouts import TASK, execute, run_rollouts

from claw_r1.agent_flow.agent_flow import AgentFlowBase
from claw_r1.blackbox_agent.gsm8k_agent_flow import BlackBoxGSM8KAgentFlow
from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.records import End, Sampling, Task
from penstock.sdk.discovery import open_agent
from penstock.testing import ScriptedEngine, workbench

SEED = read_samples()
pytestmark = pytest.mark.skipif(SEED is None, reason=f"no seed documents in {FOLDER}; set PENSTOCK_SEEDS")

GRADER = """
from penstock import Grader

class Half(Grader):
    async def grade(self, ctx):
        return ctx.set_reward(0.5)
"""
MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
}


def agent_of(folder, code, **source):
    entry = folder / "flows.py"
    entry.write_text(NAMES + code + GRADER)
    return open_agent(AgentSection(entry=entry, **source), {}, {})


def test_single_step_sample_submits_the_sampled_step(renderer, tmp_path):
    ran = run_rollouts(renderer, agent_of(tmp_path, SEED.single), ["It is 42."])
    (step,), attempt = ran.attempt.steps, ran.attempt
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 0.0)
    assert [(grade.step, grade.source) for grade in attempt.grades] == [(0, "flow")]
    assert renderer.tokenizer.decode(step.completion_ids).startswith("It is 42.")
    assert len(step.logprobs) == len(step.versions) == len(step.completion_ids)
    assert attempt.nodes[0].messages == TASK.prompt  # a list of messages as content is those messages, not their print


@pytest.mark.parametrize("tools", [{}, {"multiply": "lambda a, b: a * b"}])
def test_tool_sample_ends_without_a_tool_call(renderer, tmp_path, tools):
    given = "".join(f'\nToolAgentFlow.tools = {{"{name}": {code}}}\n' for name, code in tools.items())
    task = Task(id="t", prompt=(), label="42", metadata={"task": "6 times 7?"})
    ran = run_rollouts(renderer, agent_of(tmp_path, filled(SEED.multi) + given), [MULTIPLY, "It is 42."], task=task)
    assert (ran.attempt.end, ran.attempt.message, ran.attempt.reward) == (End.COMPLETED, "", 0.5)
    first, second = ran.attempt.steps
    (asked, answer) = ran.attempt.nodes
    assert (asked.messages, answer.parent) == (({"role": "user", "content": "6 times 7?"},), first.index)
    (result,) = answer.messages
    assert result["role"] == "tool" and ("42" if tools else "no tool 'multiply'") in result["content"]
    assert second.message["content"] == "It is 42."


def test_generate_sample_returns_text_and_ids(renderer):
    async def scenario():
        engine = ScriptedEngine(["A summary."], renderer.tokenizer)
        longest = {"": Sampling(max_tokens=1024)}
        async with asyncio.timeout(60), workbench(engine, renderer, serves=True, is_open=True, sampling=longest) as bench:
            flow = MakesCalls(gateway_url=bench.gateway.base_url.removesuffix("/v1"))
            names = {"self": flow}
            await execute(SEED.generate, names)
            return SimpleNamespace(**names), engine, await bench.pool.rollout("traj-abc")

    answer, engine, attempt = asyncio.run(scenario())
    (step,) = attempt.steps
    assert (answer.text, tuple(answer.response_ids)) == ("A summary.", step.completion_ids)
    assert tuple(answer.prompt_ids) == engine.prompts[0]
    assert (step.sampling.max_tokens, step.sampling.temperature) == (512, 0.8)


class MakesCalls(AgentFlowBase):
    async def run(self, sampling_params, **kwargs):
        return 1


def test_flow_is_registered_by_the_decorator(renderer, tmp_path):
    agent = agent_of(tmp_path, with_body(SEED.registered, SEED.single), flow="my_agent_flow")
    assert agent.workflow.flows.pick("my_agent_flow").cls.__bases__ == (AgentFlowBase,)
    ran = run_rollouts(renderer, agent, ["It is 42."])
    assert (ran.attempt.end, ran.attempt.reward, len(ran.attempt.steps)) == (End.COMPLETED, 0.0, 1)


def test_flow_is_registered_by_the_yaml_as_printed(renderer, tmp_path):
    (tmp_path / "agent_flow_config.yaml").write_text(SEED.yaml)
    source = AgentSection(entry=tmp_path / "none.py", flow="blackbox_gsm8k_agent", flows=tmp_path / "agent_flow_config.yaml")
    agent = open_agent(source, {}, {})
    assert agent.workflow.flows.pick("blackbox_gsm8k_agent").cls is BlackBoxGSM8KAgentFlow
    task = Task(
        id="t", prompt=tuple(ROW["prompt"]), label="42", metadata={key: ROW[key] for key in ("data_source", "reward_model")}
    )
    check = '<tool_call>\n{"name": "check_answer", "arguments": {"answer": "42"}}\n</tool_call>'
    ran = run_rollouts(renderer, agent, [check, "6 * 7 = 42\n#### 42"], task=task)
    assert (ran.attempt.end, ran.attempt.message, ran.attempt.reward) == (End.COMPLETED, "", 1.0)
    assert len(ran.attempt.steps) == 2 and ran.attempt.nodes[1].parent == 0


def test_unknown_flow_is_reported_with_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="blackbox_gsm8k_agent"):
        agent_of(tmp_path, SEED.single, flow="my_flow")


def call_shapes(base_url):
    """The documented base URL has no `/v1`, the coded one has; a client may add one to either."""
    root = base_url.removesuffix("/v1")
    return [root, f"{root}/v1", f"{root}/v1/v1"]


@pytest.mark.parametrize("shape", [0, 1, 2])
def test_plain_client_works_under_every_base_url(renderer, shape):
    async def scenario():
        script = ["Hello there.", "It is 42.", MULTIPLY]
        async with (
            asyncio.timeout(60),
            workbench(ScriptedEngine(script, renderer.tokenizer), renderer, serves=True, is_open=True) as bench,
        ):
            http = bench.http()
            begun = (await http.post("/init_trajectory")).json()
            base_url = call_shapes(begun["base_url"])[shape]
            register = await http.post(f"{base_url}/register_trajectory", json={"metadata": {"level": 1}})
            async with AsyncOpenAI(base_url=base_url, api_key="not-needed", max_retries=0) as client:
                said = await talk(client)
                done = await http.post(f"{base_url}/complete_trajectory", json={"reward": 0.25})
                with pytest.raises(APIStatusError, match="410"):
                    await talk(client)
            return said, (register.status_code, done.status_code), await bench.pool.rollout(begun["trajectory_uid"])

    (plain, streamed, calls), codes, attempt = asyncio.run(scenario())
    assert (plain, streamed, codes) == ("Hello there.", "It is 42.", (200, 200))
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("multiply", {"a": 6, "b": 7})]
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 0.25, 3)


async def talk(client):
    """A whole answer, a streamed one, and one that calls a tool."""
    asked = [{"role": "user", "content": "Hi"}]
    plain = await client.chat.completions.create(model="default", messages=asked)
    parts = []
    async for chunk in await client.chat.completions.create(model="default", messages=[*asked, *asked], stream=True):
        parts += [choice.delta.content or "" for choice in chunk.choices]
    called = await client.chat.completions.create(model="default", messages=asked, tools=[TOOL])
    assert len(parts) > 2 and called.choices[0].finish_reason == "tool_calls"
    return plain.choices[0].message.content, "".join(parts), called.choices[0].message.tool_calls


TINY = (
    *("actor_rollout_ref.model.path=tiny", "data.train_files=rows.jsonl", "data.max_response_length=8"),
    *("trainer.total_training_steps=1", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("where", [["penstock.scale.name=none"], []], ids=["one process", "ray"])
def test_command_line_trains_with_tiny_settings_appended(tmp_path, where):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    command = [sys.executable, "-m", "claw_r1.async_main", *arguments(SEED.command), *TINY, *where]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Run run finished and learned nothing: 1 steps" in done.stdout and "rollouts    2: 2 completed" in done.stdout
