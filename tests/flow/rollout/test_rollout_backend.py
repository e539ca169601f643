"""LocalBackend: how workflows and graders end, in which category, and what is reported."""

import asyncio
import contextlib
import sys
import threading
import time
from types import SimpleNamespace

import aiohttp
import httpx2
import openai
import pytest
from rollout_cases import DEADLINE_S, good_grade, make_agent
from server_cases import PROMPT, backend_of, nothing, said

from penstock import GraderConfig, get_rollout_context
from penstock.errors import ConfigError
from penstock.records import End
from penstock.rollout import author_tasks
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample
from penstock_compat.rollout_server.backend import ExecutionRequest, LocalBackend
from penstock_compat.rollout_server.protocol import CompletionReply

POLICY = "http://127.0.0.1:9/v1"


async def execute(backend, *, reply=None, grades=True, rollout_id="r", metadata=None, **fields):
    """The results that a back end reports, in order."""
    answer = []

    async def on_workflow_complete(result):
        answer.append(result)
        return reply

    async def on_grader_complete(result):
        answer.append(result)

    request = ExecutionRequest(id=rollout_id, prompt=PROMPT, label="6", metadata=metadata, **fields)
    async with asyncio.timeout(DEADLINE_S):
        with RolloutContext(base_url=POLICY, api_key="k", rollout_id=rollout_id):
            await backend.execute(request, on_workflow_complete, on_grader_complete if grades else None)
    return answer


def results(*arguments, **options):
    return asyncio.run(execute(*arguments, **options))


def raising(error):
    async def run(ctx):
        raise error

    return run


def status_error(url):
    response = httpx2.Response(500, request=httpx2.Request("POST", url))
    return openai.InternalServerError("boom", response=response, body=None)


def wrapped(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (TimeoutError("slow"), "timeout"),
        (ValueError("bad"), "validation_error"),
        (TypeError("bad"), "validation_error"),
        (AssertionError("bad"), "validation_error"),
        (RuntimeError("bug"), "agent_error"),
        (KeyError("bug"), "agent_error"),
        (status_error(f"{POLICY}/chat/completions"), "http_error"),
        (openai.APIConnectionError(request=httpx2.Request("POST", f"{POLICY}/chat/completions")), "http_error"),
        (httpx2.ConnectError("refused"), "http_error"),
        (aiohttp.ClientPayloadError("cut"), "http_error"),
        (wrapped(ValueError("the model failed"), status_error(f"{POLICY}/chat/completions")), "http_error"),
        (ExceptionGroup("several", [wrapped(RuntimeError("x"), aiohttp.ServerDisconnectedError())]), "http_error"),
        (status_error("http://api.example.com/v1/chat/completions"), "agent_error"),
    ],
)
def test_workflow_failure_has_a_category(error, category):
    completion, grade = results(backend_of(raising(error), good_grade))
    assert (completion.status, completion.err_category) == ("failure", category)
    assert (grade.status, grade.err_message) == ("failure", completion.err_message)
    assert completion.err_message.startswith("workflow 'Work': ")


def test_failed_workflow_still_reports_what_its_agents_had_said():
    class Talk:
        async def get_sample(self, name):
            return RolloutSample(id=name, messages=[{"role": "user", "content": "so far"}])

    async def run(ctx):
        get_rollout_context().register_sample_source("planner", Talk())
        raise RuntimeError("halfway")

    completion, grade = results(backend_of(run, good_grade))
    assert [list(each.samples) for each in (completion, grade)] == [["planner"], ["planner"]]
    assert grade.samples["planner"].messages == [{"role": "user", "content": "so far"}]
    assert grade.samples["planner"].reward is None


async def hang(ctx):
    await asyncio.Event().wait()


async def deaf(ctx):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


@pytest.mark.parametrize("run", [hang, deaf])
def test_late_workflow_is_ended_even_if_it_ignores_cancellation(run):
    completion, grade = results(backend_of(run, good_grade), agent_timeout_sec=0.01)
    assert (completion.err_category, grade.err_category) == ("timeout", "timeout")
    assert "agent_timeout_sec = 0.01" in completion.err_message


@pytest.mark.parametrize("grade", [hang, deaf])
def test_late_grader_is_ended(grade):
    completion, graded = results(backend_of(said, grade), grader_timeout_sec=0.01)
    assert (completion.status, graded.status, graded.err_category) == ("success", "failure", "timeout")
    assert graded.samples["main"].messages[-1]["content"] == "6"


def setting(reward):
    async def grade(ctx):
        for sample in ctx.samples.values():
            sample.reward = reward

    return grade


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0", True, 10**400])
def test_infinite_reward_is_a_validation_error(reward):
    _, graded = results(backend_of(said, setting(reward)))
    assert (graded.status, graded.err_category) == ("failure", "validation_error")
    assert "finite" in graded.err_message
    assert [sample.reward for sample in graded.samples.values()] == [None]


def test_sample_without_a_reward_is_a_validation_error():
    _, graded = results(backend_of(said, nothing))
    assert (graded.status, graded.err_category) == ("failure", "validation_error")
    assert "['main']" in graded.err_message and "set_sample_reward" in graded.err_message


def test_unknown_sample_id_is_a_validation_error():
    async def grade(ctx):
        ctx.set_sample_reward("nobody", 1.0)

    _, graded = results(backend_of(said, grade))
    assert (graded.err_category, "unknown sample 'nobody'" in graded.err_message) == ("validation_error", True)


def test_rollout_without_samples_is_reported_how_to_call_the_model():
    completion, graded = results(backend_of(nothing, good_grade))
    assert (completion.status, graded.status, graded.err_category) == ("success", "failure", "validation_error")
    assert "no model call through penstock" in graded.err_message and "ctx.openai()" in graded.err_message


def test_transcripts_in_the_reply_are_graded():
    seen = {}

    async def grade(ctx):
        seen.update(ctx.samples)
        ctx.set_step_reward(0, 0.5)
        ctx.set_reward(0.25)

    messages = [*PROMPT, {"role": "assistant", "content": "6"}]
    reply = CompletionReply.model_validate({"transcripts": {"main": {"messages": messages, "tools": [{"x": 1}], "steps": [0, 1]}}})
    _, graded = results(backend_of(nothing, grade), reply=reply)
    assert (seen["main"].messages, seen["main"].transcript, seen["main"].steps) == (messages, messages, (0, 1))
    assert (seen["main"].tools, graded.reward, graded.step_rewards) == ([{"x": 1}], 0.25, {0: 0.5})


def test_recorded_messages_win_over_returned_ones():
    sampled = [*PROMPT, {"role": "assistant", "content": "7"}]
    reply = CompletionReply.model_validate({"transcripts": {"main": {"messages": sampled, "steps": [0]}}})

    async def grade(ctx):
        assert ctx.sample.reported_messages[-1]["content"] == "6"
        assert (ctx.sample.messages, ctx.sample.transcript, ctx.sample.steps) == (sampled, sampled, (0,))
        return 1.0

    _, graded = results(backend_of(said, grade), reply=reply)
    assert (graded.status, graded.reward, graded.samples["main"].reward) == ("success", 1.0, 1.0)


@pytest.mark.parametrize("reply", [None, CompletionReply()])
def test_nothing_is_graded_without_the_record(reply):
    _, graded = results(backend_of(said, good_grade), reply=reply, records=True)
    assert (graded.status, graded.err_category, graded.end) == ("failure", "validation_error", End.GRADER_ERROR)
    assert "record of the rollout did not arrive" in graded.err_message and graded.samples == {}


def test_workflow_cannot_reach_its_grader_through_metadata_prompt_or_context():
    metadata = {"seen": []}

    async def run(ctx):
        ctx.metadata["seen"].append("cheat")
        ctx.prompt.clear()
        return PROMPT

    async def grade(ctx):
        assert (ctx.metadata, get_rollout_context()) == ({"seen": []}, None)
        return 1.0

    _, graded = results(backend_of(run, grade), metadata=metadata)
    assert (graded.status, metadata) == ("success", {"seen": []})


async def test_grading_uses_its_own_slots():
    grading, let_go, running = threading.Event(), threading.Event(), []

    async def grade(ctx):
        running.append(ctx)
        grading.set()
        await asyncio.to_thread(let_go.wait)
        running.pop()
        return 1.0

    agent = make_agent(said, grade)
    config = GraderConfig(name="g", concurrency={"max_concurrent": 1})
    backend = LocalBackend(workflow=agent.workflow, grader=agent.grader, grader_config=config, artifacts=None)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(execute(backend, rollout_id=f"r{n}")) for n in range(3)]
        await asyncio.to_thread(grading.wait)
        await execute(backend, grades=False, rollout_id="other")
        assert (len(running), backend.health()["concurrency"]["running"]) == (1, 0)
        let_go.set()
    assert [task.result()[1].status for task in tasks] == ["success"] * 3


@pytest.mark.parametrize(("most", "at_once"), [(None, 6), (2, 2)])
async def test_concurrency_follows_the_configured_limit(most, at_once):
    reached, let_go, running = threading.Event(), threading.Event(), []

    async def run(ctx):
        running.append(ctx)
        if len(running) == at_once:
            reached.set()
        await asyncio.to_thread(let_go.wait)

    backend = backend_of(run, most=most)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for n in range(6):
            group.create_task(execute(backend, grades=False, rollout_id=f"r{n}"))
        await asyncio.to_thread(reached.wait)
        counts = {"max_concurrent": most, "queued": 6 - at_once, "running": at_once}
        assert (backend.health(), len(running)) == ({"status": "ok", "concurrency": counts}, at_once)
        assert backend.max_concurrency == (most or 0)
        let_go.set()


def test_no_config_at_all_is_unlimited():
    agent = make_agent(nothing, good_grade)
    assert LocalBackend(workflow=agent.workflow).max_concurrency == 0


def test_grader_url_without_a_grader_is_reported_what_to_do():
    _, graded = results(backend_of(said))
    assert (graded.status, graded.err_category) == ("failure", "validation_error")
    assert "define a Grader subclass" in graded.err_message


def test_strings_name_workflow_grader_and_configs(monkeypatch):
    agent = make_agent(said, good_grade)
    config = GraderConfig(name="g")
    monkeypatch.setitem(sys.modules, "their_agent", SimpleNamespace(Work=agent.workflow, Check=agent.grader, config=config))
    backend = LocalBackend(
        workflow="their_agent:Work", grader="their_agent:Check", grader_config="their_agent:config", artifacts=None
    )
    assert results(backend)[1].status == "success"
    with pytest.raises(ImportError, match="Absent"):
        LocalBackend(workflow="their_agent:Absent")
    for name in ("their_agent", "their_agent:", ":Work"):
        with pytest.raises(ValueError, match="module:attribute"):
            LocalBackend(workflow=name)


def test_rollout_without_context_gets_one(monkeypatch):
    found = []

    async def run(ctx):
        found.append((ctx.base_url, ctx.api_key))

    async def ignore(result):
        found.append(result.status)

    def execute_outside(backend):
        asyncio.run(backend.execute(ExecutionRequest(id="r", prompt=PROMPT), ignore))

    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_ROLLOUT_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RolloutContext"):
        execute_outside(backend_of(run))
    execute_outside(backend_of(run, context=lambda: RolloutContext(base_url="http://a/v1", api_key="given")))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://b/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "run's")
    with pytest.raises(ConfigError):  # the user's own, of no rollout
        execute_outside(backend_of(run))
    monkeypatch.setenv("PENSTOCK_ROLLOUT_ID", "r")
    execute_outside(backend_of(run))
    assert found == [("http://a/v1", "given"), "success", ("http://b/v1", "run's"), "success"]


@pytest.mark.parametrize("rollout_id", ["", ".", "..", "a/b", "a\\b", "a\0b", "x" * 257])
def test_id_that_is_no_path_segment_is_refused(rollout_id):
    with pytest.raises(ValueError, match="id"):
        ExecutionRequest(id=rollout_id, prompt=[])


def test_artifacts_are_in_the_rollouts_folder(tmp_path):
    async def run(ctx):
        (ctx.artifacts_dir / "note").write_text(ctx.artifacts_dir.name)
        return PROMPT

    async def grade(ctx):
        return float((ctx.artifacts_dir / "note").read_text() == "r")

    assert results(backend_of(run, grade, artifacts=tmp_path))[1].reward == 1.0
    results(backend_of(said, good_grade, artifacts=tmp_path), rollout_id="empty")
    assert [folder.name for folder in tmp_path.iterdir()] == ["r"]


def test_blocking_workflow_is_reported_and_completes(monkeypatch, caplog):
    for name, value in {"NOTICE_S": 0.1, "POLL_S": 0.05}.items():
        monkeypatch.setattr(author_tasks, name, value)

    async def run(ctx):
        time.sleep(0.6)  # noqa: ASYNC251
        return await said(ctx)

    work, grade = results(backend_of(run, good_grade))
    assert (work.status, grade.status) == ("success", "success")
    [line] = [record.message for record in caplog.records if "blocks the event loop" in record.message]
    assert "'Work' blocks the event loop at rollout_cases.py, line" in line and "all other rollouts wait" in line
