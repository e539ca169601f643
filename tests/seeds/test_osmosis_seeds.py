"""Every code block of seeds 000 to 002, run through the facade: unchanged, as a rollout on a real gateway.

A block that holds a workflow is a file that discovery reads; one that holds less gets only the names it lacks.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Generic

import pytest
from seed_blocks import FOLDER, read_seed
from seed_rollouts import TASK, agent_around, agent_of, execute, run_rollouts

from penstock.records import End
from penstock.rollout.runner import NO_CALL

SEEDS = {number: read_seed(number) for number in ("000", "001", "002")}
BLOCKS = {block.name: block for blocks in SEEDS.values() for block in blocks}

pytestmark = pytest.mark.skipif(not BLOCKS, reason=f"no seed documents in {FOLDER}; set PENSTOCK_SEEDS")

SILENT = ["000-0", "000-6", "001-0", "001-4"]
"""Workflows that are left for the reader to fill in: they make no call."""
SHAPES = ["000-1", "001-1"]
"""The base class, as the documents show it."""
CONFIGS = ["000-2", "000-3"]
"""A config class alone."""
ONE_CALL_STRANDS = {"000-4": "simple", "001-2": "simple-strands-agent"}
TOOLS_STRANDS = ["000-5", "001-5"]
ONE_CALL_OPENAI = {"001-3": "simple-openai-agent", "002-0": "assistant"}
GRADED = ["002-1"]
FRAGMENTS = ["002-2", "002-3", "002-4", "002-5", "002-6", "002-7"]
COMMANDS = ["002-8"]
"""Lines for a terminal: `test_osmosis_cli_runs.py` types them."""

SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "7"}}\n</tool_call>'
MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
WORKFLOW = """
from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowContext

my_config = MyConfig()

class SmallWorkflow(AgentWorkflow[MyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MyConfig]) -> None:
        await ctx.openai(ctx.config.name).chat.completions.create(model="any", messages=ctx.prompt)
"""


def test_every_block_of_the_seeds_is_run_here():
    assert {number: len(blocks) for number, blocks in SEEDS.items()} == {"000": 7, "001": 6, "002": 9}
    run = [*SILENT, *SHAPES, *CONFIGS, *ONE_CALL_STRANDS, *TOOLS_STRANDS, *ONE_CALL_OPENAI, *GRADED, *FRAGMENTS, *COMMANDS]
    assert sorted(run) == sorted(BLOCKS)
    assert [name for name, block in BLOCKS.items() if block.language != "python"] == COMMANDS


@pytest.mark.parametrize("name", SILENT)
def test_workflow_without_a_call_is_an_error(renderer, tmp_path, name):
    ran = run_rollouts(renderer, agent_of(tmp_path, BLOCKS[name].code), [])
    assert (ran.attempt.end, ran.heard) == (End.AGENT_ERROR, [])
    assert NO_CALL in ran.attempt.message


def test_config_object_and_toml_set_the_fields(tmp_path):
    own = agent_of(tmp_path, BLOCKS["001-4"].code).workflow_config
    assert (own.name, own.max_iterations, own.concurrency.max_concurrent) == ("search-workflow", 8, 4)
    set_by_table = agent_of(tmp_path, BLOCKS["000-6"].code, {"max_iterations": 3}).workflow_config
    assert (set_by_table.max_iterations, set_by_table.temperature) == (3, 0.7)


@pytest.mark.parametrize("name", SHAPES)
def test_base_class_has_the_documented_shape(renderer, name):
    from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowContext
    from penstock.sdk.workflow import TConfig

    lacked = {"ABC": ABC, "Any": Any, "Generic": Generic, "TConfig": TConfig, "abstractmethod": abstractmethod}
    names = {**lacked, "AgentWorkflowContext": AgentWorkflowContext}
    exec(BLOCKS[name].code, names)
    shown = names["AgentWorkflow"]
    for cls in (shown, AgentWorkflow):
        assert cls.__abstractmethods__ == {"run"} and inspect.iscoroutinefunction(cls.run)
        assert cls.__parameters__ == (TConfig,)
        assert list(inspect.signature(cls.run).parameters) == ["self", "ctx"]
        assert inspect.signature(cls).parameters["config"].default is None

    async def run(self, ctx):
        assert self.config is ctx.config is None
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    one = type("One", (AgentWorkflow,), {"__init__": shown.__init__, "run": run})
    ran = run_rollouts(renderer, replace(agent_around(run), workflow=one), ["42"])
    assert (ran.ids, ran.attempt.reward) == ([(ran.attempt.ref.id, "main")], 0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_class_serves_a_workflow(renderer, tmp_path, name):
    agent = agent_of(tmp_path, BLOCKS[name].code + WORKFLOW)
    ran = run_rollouts(renderer, agent, ["42"] * 12, count=12)
    config = agent.workflow_config
    limit = config.concurrency.max_concurrent
    assert sorted(ran.ids) == sorted((attempt.ref.id, config.name) for attempt in ran.attempts)
    assert {attempt.end for attempt in ran.attempts} == {End.COMPLETED}
    assert limit == {"000-2": None, "000-3": 5}[name] and ran.most <= (limit or 12)
    assert type(config)(any_field=1).any_field == 1


@pytest.mark.parametrize("name", ONE_CALL_STRANDS)
def test_strands_agent_is_recorded_and_graded(renderer, tmp_path, name):
    ran = run_rollouts(renderer, agent_of(tmp_path, BLOCKS[name].code), ["It is 42."])
    transcript = ONE_CALL_STRANDS[name]
    assert ran.ids == [(ran.attempt.ref.id, transcript)]
    assert [step.transcript for step in ran.attempt.steps] == [transcript]
    (sample,) = ran.samples.values()
    assert [(m["role"], m["content"][0]["text"]) for m in sample.messages][-2:] == [
        ("user", "6 times 7?"),
        ("assistant", "It is 42."),
    ]
    assert [m["role"] for m in sample.transcript] == ["system", "user", "assistant"]
    assert (sample.id, ran.attempt.end, ran.attempt.reward) == (transcript, End.COMPLETED, 0.5)


@pytest.mark.parametrize("name", TOOLS_STRANDS)
def test_strands_agent_ends_without_a_tool_call(renderer, tmp_path, name):
    agent = agent_of(tmp_path, BLOCKS[name].code)
    ran = run_rollouts(renderer, agent, [SEARCH, "Found it."])
    assert ran.ids == [(ran.attempt.ref.id, "search-agent")] * 2
    messages = ran.samples["search-agent"].messages
    (use,) = [block["toolUse"] for message in messages for block in message["content"] if "toolUse" in block]
    (result,) = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    assert (use["name"], use["input"], use["toolUseId"]) == ("search", {"query": "7"}, result["toolUseId"])
    assert (result["status"], result["content"]) == ("success", [{"text": "results for 7"}])
    assert [tool["function"]["name"] for tool in ran.samples["search-agent"].tools] == ["search"]
    assert (ran.attempt.end, ran.attempt.reward) == (End.COMPLETED, 0.5)


@pytest.mark.parametrize("name", ONE_CALL_OPENAI)
def test_openai_agent_is_recorded_and_graded(renderer, tmp_path, name):
    ran = run_rollouts(renderer, agent_of(tmp_path, BLOCKS[name].code), ["It is 42."])
    transcript = ONE_CALL_OPENAI[name]
    assert ran.ids == [(ran.attempt.ref.id, transcript)]
    *given, said = ran.samples[transcript].messages
    assert given == list(TASK.prompt)
    assert (said["type"], said["role"], said["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in said["content"]] == [("output_text", "It is 42.")]
    (step,) = ran.attempt.steps
    assert (step.transcript, step.sampling.max_tokens, step.sampling.temperature) == (transcript, 200, 1.0)
    assert (ran.attempt.end, ran.attempt.reward) == (End.COMPLETED, 0.5)


@pytest.mark.parametrize("name", GRADED)
@pytest.mark.parametrize(("answer", "reward"), [("It is 42.", 1.0), ("It is 41.", 0.0)])
def test_whole_example_is_graded_by_its_own_grader(renderer, tmp_path, name, answer, reward):
    ran = run_rollouts(renderer, agent_of(tmp_path, BLOCKS[name].code), [MULTIPLY, answer])
    assert ran.ids == [(ran.attempt.ref.id, "multiply-agent")] * 2
    items = ran.samples["multiply-agent"].messages[len(TASK.prompt) :]
    assert [item["type"] for item in items] == ["function_call", "function_call_output", "message"]
    call, output, _ = items
    assert (call["name"], call["call_id"], output["output"]) == ("multiply", output["call_id"], "42")
    assert (ran.attempt.end, ran.attempt.reward) == (End.COMPLETED, reward)


def agent_named(name="assistant", **given):
    from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisAgent, OsmosisRolloutModel

    return OsmosisAgent(**{"name": name, "model": OsmosisRolloutModel(), **given})


async def run_agent(agent, ctx, session=None):
    from agents import Runner

    from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisMemorySession

    await Runner.run(agent, ctx.prompt, session=session or OsmosisMemorySession(name="main"))


def played_fragment(renderer, name, script, after, **lacked):
    """A fragment run inside a rollout, then `after` with the names it left."""

    async def run(ctx):
        names = {key: make() for key, make in lacked.items()} | {"ctx": ctx}
        await execute(BLOCKS[name].code, names)
        await after(names, ctx)

    return run_rollouts(renderer, agent_around(run), script)


def session_class():
    from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisMemorySession

    return OsmosisMemorySession


def runner_class():
    from agents import Runner

    return Runner


def test_model_settings_of_the_fragment_are_used(renderer):
    async def after(names, ctx):
        await run_agent(names["agent"], ctx)

    ran = played_fragment(renderer, "002-2", ["42"], after)
    (step,) = ran.attempt.steps
    assert ran.ids == [(ran.attempt.ref.id, "main")]
    assert (step.sampling.temperature, step.sampling.top_p, ran.attempt.reward) == (1.0, 1.0, 0.5)


@pytest.mark.parametrize("name", ["002-3", "002-7"])
def test_fragment_with_a_session_names_the_transcript(renderer, name):
    async def after(names, ctx):
        assert names["session"].name == names["session"].session_id == "main"

    lacked = {"OsmosisMemorySession": session_class, "Runner": runner_class, "agent": agent_named}
    ran = played_fragment(renderer, name, ["42"], after, **lacked)
    assert ran.ids == [(ran.attempt.ref.id, "main")]
    assert [item["role"] for item in ran.samples["main"].messages] == ["system", "user", "assistant"]
    assert (ran.attempt.end, ran.attempt.reward) == (End.COMPLETED, 0.5)


def test_fragment_with_two_sessions_makes_two_transcripts(renderer):
    async def after(names, ctx):
        for role in ("planner", "executor"):
            await run_agent(agent_named(role), ctx, names[f"{role}_session"])

    ran = played_fragment(renderer, "002-4", ["a plan", "a deed"], after, OsmosisMemorySession=session_class)
    assert ran.ids == [(ran.attempt.ref.id, role) for role in ("planner", "executor")]
    said = {name: sample.messages[-1]["content"][0]["text"] for name, sample in ran.samples.items()}
    assert said == {"planner": "a plan", "executor": "a deed"}


def test_fragment_that_imports_the_agent_class_makes_agents(renderer):
    async def after(names, ctx):
        from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisRolloutModel

        await run_agent(names["OsmosisAgent"](name="assistant", model=OsmosisRolloutModel()), ctx)

    ran = played_fragment(renderer, "002-5", ["42"], after)
    assert ran.ids == [(ran.attempt.ref.id, "main")]


def test_fragment_that_replaces_the_model_routes_the_agent(renderer):
    async def after(names, ctx):
        await run_agent(agent_named(model=names["model"]), ctx)

    ran = played_fragment(renderer, "002-6", ["42"], after)
    assert ran.ids == [(ran.attempt.ref.id, "main")]
