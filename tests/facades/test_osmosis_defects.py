"""Where upstream goes wrong, or the seeds and upstream disagree: what happens here, shown through the facade.

`docs/osmosis.md` has the whole list; what it names that is not here is shown where the core is tested.
"""

import asyncio
import contextlib
import threading

import pytest
from agents import Agent, Runner, function_tool
from seed_rollouts import TASK, agent_around, run_rollouts, serving
from strands import tool

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowOutput,
    ExecutionRequest,
    Grader,
    LocalBackend,
    OsmosisRolloutModel,
    OsmosisStrandsAgent,
    RolloutContext,
    RolloutSample,
    RolloutStatus,
    get_rollout_context,
)
from osmosis_ai.rollout.context import SampleSource
from osmosis_ai.rollout.integrations.agents import openai_agents as sdk
from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.records import End
from penstock.run.inputs import preflight
from penstock.testing import ScriptedReply

CALL = '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
HANDOFF = '<tool_call>\n{"name": "transfer_to_second", "arguments": {}}\n</tool_call>'


def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


async def with_strands(ctx, *, params=None, **settings):
    model = OsmosisRolloutModel(params=params)
    settings = {"callback_handler": None, "system_prompt": "Be brief.", **settings}
    await OsmosisStrandsAgent(name="one", model=model, messages=ctx.prompt[1:], **settings).invoke_async()


async def with_agents(ctx, **settings):
    agent = sdk.OsmosisAgent(name="one", instructions="Be brief.", model=sdk.OsmosisRolloutModel(), **settings)
    await Runner.run(agent, ctx.prompt[1:], session=sdk.OsmosisMemorySession(name="one"))


FORMS = pytest.mark.parametrize(
    ("run", "tools"), [(with_strands, [tool(double)]), (with_agents, [function_tool(double)])], ids=["strands", "agents"]
)


@FORMS
def test_each_call_has_the_tokens_that_were_sampled(renderer, run, tools):
    ran = run_rollouts(renderer, agent_around(lambda ctx: run(ctx, tools=tools)), [CALL, "42"])
    assert (ran.attempt.end, len(ran.attempt.steps)) == (End.COMPLETED, 2)
    for step, text in zip(ran.attempt.steps, [CALL, "42"], strict=True):
        assert renderer.tokenizer.decode(step.completion_ids).startswith(text)
        assert len(step.completion_ids) == len(step.logprobs) == len(step.versions)
    first, second = ran.attempt.nodes
    assert second.parent == ran.attempt.steps[0].index and len(second.token_ids) < len(first.token_ids)


@FORMS
def test_sample_has_transcript_with_system_prompt_and_tools(renderer, run, tools):
    ran = run_rollouts(renderer, agent_around(lambda ctx: run(ctx, tools=tools)), [CALL, "42"])
    sample = ran.samples["one"]
    assert [message["role"] for message in sample.transcript] == ["system", "user", "assistant", "tool", "assistant"]
    assert (sample.transcript[0]["content"], sample.transcript[-1]["content"]) == ("Be brief.", "42")
    assert [(each["function"]["name"], each["function"]["description"]) for each in sample.tools] == [("double", "Twice a number.")]
    assert sample.steps == (0, 1)


def test_handoff_starts_a_new_path(renderer):
    async def run(ctx):
        second = sdk.OsmosisAgent(name="second", instructions="You are second.", model=sdk.OsmosisRolloutModel())
        await with_agents(ctx, handoffs=[second])

    ran = run_rollouts(renderer, agent_around(run), [HANDOFF, "42"])
    assert [step.transcript for step in ran.attempt.steps] == ["one", "one"]
    assert [node.parent for node in ran.attempt.nodes] == [None, None]
    assert [node.messages[0]["content"] for node in ran.attempt.nodes] == ["Be brief.", "You are second."]


@FORMS
def test_without_a_key_the_users_own_is_not_sent(renderer, monkeypatch, run, tools):
    monkeypatch.setenv("OPENAI_API_KEY", "the-users-own")
    monkeypatch.delenv("OSMOSIS_API_KEY", raising=False)

    async def main():
        async with serving(renderer, []) as (bench, log):
            with RolloutContext(bench.gateway.base_url, rollout_id="r"), contextlib.suppress(Exception):
                await run(AgentWorkflowContextOf(TASK))
            return log.heard

    heard = asyncio.run(main())
    assert heard and "the-users-own" not in str(heard)


class AgentWorkflowContextOf:
    """As much of a context as the two agents above look at."""

    def __init__(self, task):
        self.prompt = list(task.prompt)


def test_context_without_address_is_an_error(monkeypatch):
    monkeypatch.delenv("OSMOSIS_CHAT_COMPLETIONS_URL", raising=False)
    with RolloutContext() as context, pytest.raises(Exception, match="base_url"):
        context.openai()


def test_direct_call_is_named_with_the_remedy(renderer):
    async def run(ctx):
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().getaddrinfo("api.openai.com", 443)

    ran = run_rollouts(renderer, agent_around(run), [])
    assert ran.attempt.end is End.AGENT_ERROR
    assert "but called api.openai.com directly; use" in ran.attempt.message


def test_plain_client_needs_the_contexts_headers_only(renderer):
    async def run(ctx):
        from openai import AsyncOpenAI

        here = get_rollout_context()
        headers = {"x-rollout-id": here.rollout_id, "x-sample-id": "plain"}
        async with AsyncOpenAI(base_url=here.chat_completions_url, api_key=here.api_key, default_headers=headers) as client:
            await client.chat.completions.create(model="openai/osmosis-rollout", messages=ctx.prompt)

    ran = run_rollouts(renderer, agent_around(run), ["42"])
    assert ran.ids == [(ran.attempt.ref.id, "plain")]
    assert (ran.samples["plain"].messages[-1]["content"], ran.attempt.end) == ("42", End.COMPLETED)


def test_context_is_there_in_threads(renderer):
    async def run(ctx):
        await with_agents(ctx)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(get_rollout_context().rollout_id))
        thread.start()
        thread.join()
        pooled = await asyncio.get_running_loop().run_in_executor(None, lambda: get_rollout_context().rollout_id)
        assert [*seen, pooled] == [get_rollout_context().rollout_id] * 2

    assert run_rollouts(renderer, agent_around(run), ["42"]).attempt.end is End.COMPLETED


def executed(renderer, run, script, *, grade=None, monkeypatch=None, **request):
    """The results of workflow and grader that a LocalBackend reported for one rollout on a real gateway."""

    class Work(AgentWorkflow):
        async def run(self, ctx):
            return await run(ctx)

    class Check(Grader):
        async def grade(self, ctx):
            return await grade(ctx)

    async def main():
        answer, graded = [], []

        async def on_workflow(result):
            answer.append(result)

        async def on_grader(result):
            graded.append(result)

        async with serving(renderer, script) as (bench, _):
            session = await bench.rollout()
            given = (bench.gateway.base_url, session.token, session.rollout_id)
            backend = LocalBackend(workflow=Work, grader=Check if grade else None)
            asked = ExecutionRequest(id="r1", prompt=list(TASK.prompt), label=TASK.label, **request)
            if monkeypatch is None:
                with RolloutContext(*given):
                    await backend.execute(asked, on_workflow, on_grader if grade else None)
                return answer, graded
            for name, value in zip(("CHAT_COMPLETIONS_URL", "API_KEY", "ROLLOUT_ID"), given, strict=True):
                monkeypatch.setenv(f"OSMOSIS_{name}", value)
            await backend.execute(asked, on_workflow, on_grader if grade else None)
            return answer, graded

    answer, graded = asyncio.run(main())
    assert len(answer) == 1 and len(graded) == (1 if grade else 0)
    return [*answer, *graded]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Back ends put artifacts below the folder they run in."""
    monkeypatch.chdir(tmp_path)


def test_outside_of_any_context_a_back_end_takes_the_environments(renderer, monkeypatch):
    async def grade(ctx):
        ctx.set_sample_reward("one", 1.0)

    worked, graded = executed(renderer, with_strands, ["42"], grade=grade, monkeypatch=monkeypatch)
    assert (worked.status, graded.status) == (RolloutStatus.SUCCESS, RolloutStatus.SUCCESS)
    assert graded.samples["one"].reward == 1.0


def test_no_config_at_all_is_no_limit():
    assert LocalBackend(workflow=type("Work", (AgentWorkflow,), {"run": with_strands})).max_concurrency == 0


def test_what_a_failed_workflow_had_said_is_kept(renderer):
    async def run(ctx):
        await with_agents(ctx)
        raise KeyError("after the call")

    (worked,) = executed(renderer, run, ["42"])
    assert (worked.status, worked.err_category) == (RolloutStatus.FAILURE, "agent_error")
    assert worked.samples["one"].messages[-1]["content"][0]["text"] == "42"


def test_deadline_is_kept(renderer):
    async def run(ctx):
        await asyncio.Event().wait()

    (worked,) = executed(renderer, run, [], agent_timeout_sec=0.05)
    assert (worked.status, worked.err_category) == (RolloutStatus.FAILURE, "timeout")
    assert "agent_timeout_sec = 0.05" in worked.err_message


@pytest.mark.parametrize("params", [{"temperature": -1}, {}], ids=["refused", "failed"])
def test_failing_policy_is_an_http_error(renderer, params):
    (worked,) = executed(renderer, lambda ctx: with_strands(ctx, params=params), [ScriptedReply("never", fail_after=1)])
    assert (worked.status, worked.err_category) == (RolloutStatus.FAILURE, "http_error")


def test_two_agents_of_one_name_are_refused(renderer):
    async def run(ctx):
        sdk.OsmosisMemorySession(name="same")
        sdk.OsmosisMemorySession(name="same")

    (worked,) = executed(renderer, run, [])
    assert (worked.err_category, "'same' is registered already" in worked.err_message) == ("validation_error", True)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0"])
def test_bad_reward_fails_only_the_grader(renderer, reward):
    async def grade(ctx):
        ctx.set_sample_reward("one", reward)

    worked, graded = executed(renderer, with_agents, ["42"], grade=grade)
    assert (worked.status, graded.status, graded.err_category) == ("success", "failure", "validation_error")
    assert "not a finite number" in graded.err_message and graded.samples["one"].reward is None


def test_workflow_cannot_reach_its_grader_through_the_metadata(renderer):
    async def run(ctx):
        ctx.metadata["answer"] = "42"
        await with_agents(ctx)

    async def grade(ctx):
        assert ctx.metadata == {"level": 1}
        ctx.set_reward(1.0)

    _, graded = executed(renderer, run, ["42"], grade=grade, metadata={"level": 1})
    assert graded.status == "success"


def test_message_names_the_classes_of_this_api(renderer):
    async def run(ctx):
        await Runner.run(sdk.OsmosisAgent(name="a", model=sdk.OsmosisRolloutModel()), ctx.prompt)

    assert "session=OsmosisMemorySession(name=…)" in run_rollouts(renderer, agent_around(run), []).attempt.message
    with pytest.raises(RuntimeError, match=r"OsmosisAgent\(model=OsmosisRolloutModel\(\)\)"):
        sdk.OsmosisAgent(name="a", model=sdk.OsmosisRolloutModel())
    with pytest.raises(RuntimeError, match="OsmosisStrandsAgent"):
        OsmosisStrandsAgent(name="a", model=OsmosisRolloutModel())


def test_placeholder_becomes_the_model_that_the_documents_name(renderer):
    async def run(ctx):
        agent = sdk.OsmosisAgent(name="a", model=sdk.OsmosisRolloutModel())
        assert isinstance(agent, Agent) and isinstance(agent.model, sdk.OsmosisLitellmModel)
        assert sdk.OsmosisAgent(name="b", model="other").model == "other"
        await Runner.run(agent, ctx.prompt, session=sdk.OsmosisMemorySession())

    ran = run_rollouts(renderer, agent_around(run), ["42"])
    (name,) = ran.samples
    assert len(name) == 32 and ran.ids == [(ran.attempt.ref.id, name)]


def test_newer_spellings_work_too(renderer):
    class Source(SampleSource):
        async def get_sample(self, name):
            return RolloutSample(id=name, messages=[{"role": "assistant", "content": "own words"}])

    async def run(ctx):
        await with_agents(ctx)
        get_rollout_context().set_sample_source(Source())

    ran = run_rollouts(renderer, agent_around(run), ["42"])
    assert list(ran.samples) == ["one", "main"]
    assert ran.samples["one"].messages[-1]["role"] == "assistant"
    assert ran.samples["main"].reported_messages == [{"role": "assistant", "content": "own words"}]
    assert ran.samples["main"].messages == []  # nobody sampled that


@pytest.mark.parametrize("wrap", [lambda messages: messages, lambda messages: AgentWorkflowOutput(messages=messages)])
def test_messages_that_run_returns_are_what_the_grader_sees(renderer, wrap):
    async def run(ctx):
        here = get_rollout_context()
        async with here.openai() as client:
            await client.chat.completions.create(model="any", messages=ctx.prompt)
        return wrap([{"role": "assistant", "content": "as returned"}])

    async def grade(ctx):
        assert ctx.sample.messages == [{"role": "assistant", "content": "as returned"}]
        ctx.set_reward(0.25)

    worked, graded = executed(renderer, run, ["42"], grade=grade)
    assert (worked.status, graded.reward, graded.samples["main"].reward) == ("success", 0.25, 0.25)


@pytest.mark.parametrize(
    ("first_line", "answer"),
    [("import not_installed_anywhere", "No module named 'not_installed_anywhere'"), ("import os; os._exit(3)", "exit")],
)
def test_preflight_refuses_a_file_that_cannot_be_imported(tmp_path, first_line, answer):
    entry = tmp_path / "main.py"
    entry.write_text(f"{first_line}\nfrom osmosis_ai.rollout import AgentWorkflow, Grader\n")
    with pytest.raises(ConfigError, match=answer):
        preflight(AgentSection(entry=entry), {}, {})
