"""The server executor against a double of a rollout server: who gets a rollout, and what callbacks do and cannot do."""

import asyncio
import contextlib
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from rollout_cases import good_grade, make_agent
from server_double import Double, good

from penstock.config import secret
from penstock.errors import ConfigError, EngineError, GraderError, PoolError, WorkflowError
from penstock.events import Events
from penstock.records import Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ExecutorContext, read_section
from penstock.rollout.in_process import Reward, WorkflowResult
from penstock.rollout.transcripts import Transcript
from penstock.sdk.samples import RolloutSample
from penstock_compat.rollout_server.executor import ServerExecutor, ServerSection
from penstock_compat.rollout_server.executor_callbacks import CallbackListener

DEADLINE_S = 20
TASK = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), label="6", metadata={"level": 1})
SESSION = SimpleNamespace(token="mk-model-token", base_url="http://gateway.example/v1")
SAMPLES = {"main": RolloutSample(id="main", steps=(0, 1))}
KEPT = {"main": Transcript([{"role": "user", "content": "é"}, {"role": "assistant", "content": "6"}], [{"name": "t"}], (0, 1))}


async def recorded(rollout_id):
    """As the pool: a rollout that it does not know is an error."""
    if "~" in rollout_id or rollout_id.startswith("lost"):
        raise PoolError(f"unknown rollout {rollout_id}")
    return KEPT


class Stage:
    """An executor and the events that it emitted."""

    def __init__(self, executor, answer):
        self.executor, self.reported = executor, answer

    async def run(self, rollout_id="train-0.0.1", timeout_s=DEADLINE_S, task=TASK):
        return await self.executor.run(task, SESSION, rollout_id=rollout_id, timeout_s=timeout_s)

    async def grade(self, rollout_id="train-0.0.1", timeout_s=DEADLINE_S):
        return await self.executor.grade(TASK, SAMPLES, rollout_id=rollout_id, timeout_s=timeout_s)

    async def both(self, rollout_id="train-0.0.1", **options):
        await self.run(rollout_id, **options)
        return await self.grade(rollout_id)


@contextlib.asynccontextmanager
async def stage(*doubles, grace_s=0.05, **settings):
    """An executor over these servers, all of them serving."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        for double in doubles:
            await stack.enter_async_context(double.serving())
        events, answer = Events(), []
        events.listen(lambda kind, fields: answer.append((kind, fields)))
        section = read_section("server", {"urls": [double.url for double in doubles], **settings})
        agent = make_agent(None, good_grade)
        given = ExecutorContext(
            agent=agent,
            author_tasks=AuthorTasks(Path(), events),
            section=section,
            load_transcripts=recorded,
            grader_timeout_s=7.0,
            events=events,
        )
        yield Stage(await stack.enter_async_context(ServerExecutor(given, grace_s=grace_s)), answer)


async def test_rollout_is_sent_run_and_graded():
    async def act(double, request):
        status, reply = await double.complete(request, strays=["api.openai.com"])
        assert (status, reply["transcripts"]["main"]["messages"]) == (200, KEPT["main"].messages)
        assert reply["transcripts"]["main"]["steps"] == [0, 1]
        await double.grade(request, samples={"main": {"id": "main", "reward": 0.5}}, reward=2, step_rewards={"1": 0.25})

    async with stage(double := Double(act)) as on:
        assert await on.run() == WorkflowResult({}, ("api.openai.com",))
        assert await on.grade() == [Reward(None, 2.0), Reward("main", 0.5), Reward(None, 0.25, 1)]
    (sent,) = double.requests
    assert (sent["initial_messages"], sent["label"], sent["metadata"]) == (list(TASK.prompt), "6", {"level": 1})
    assert (sent["chat_completions_url"], sent["llm_api_key"]) == (SESSION.base_url, SESSION.token)
    assert (sent["agent_timeout_sec"], sent["grader_timeout_sec"]) == (DEADLINE_S, 7.0)
    assert sent["controller_api_key"] not in (SESSION.token, "")


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_server_is_asked_again(status):
    async with stage(double := Double(good, refusals=[(status, {"retry-after": "0"})] * 2)) as on:
        assert await on.both() == [Reward("main", 1.0)]
    assert [name.partition("~")[0] for name in double.asked] == ["train-0.0.1"] * 3
    assert double.requests[0]["agent_timeout_sec"] == DEADLINE_S


async def test_free_server_is_preferred_to_a_busy_one():
    busy, free = Double(good, refusals=[(429, {"retry-after": "3600"})]), Double(good)
    async with stage(busy, free) as on:
        await on.both()
    assert (len(busy.asked), len(free.asked)) == (1, 1)


async def test_server_that_stays_busy_ends_the_rollout_with_its_words():
    async with stage(Double(refusals=[(429, {"retry-after": "3600"})])) as on:
        with pytest.raises(WorkflowError, match=r"rollout\.concurrency"):
            await on.run()


async def test_server_that_is_gone_is_left_out():
    gone, there = Double(good), Double(good)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        async with gone.serving():
            pass
        await stack.enter_async_context(there.serving())
        there_url = there.url
        on = await stack.enter_async_context(stage(Double(good), urls=[gone.url, there_url]))
        assert [(kind, fields["url"]) for kind, fields in on.reported] == [("executor.server_down", gone.url)]
        for number in range(3):
            await on.both(f"train-{number}.0.1")
        assert len(there.requests) == 3


async def test_only_the_server_that_may_have_it_is_retried():
    first, second = Double(good, refusals=[(500, {})] * 2), Double(good, refusals=[(500, {})] * 2)
    async with stage(first, second) as on:
        await on.both()
    assert sorted([len(first.asked), len(second.asked)]) == [0, 3]


async def test_two_runs_use_different_rollout_names():
    async with stage(double := Double(good)) as on, stage(Double(), urls=double.url) as other:
        await on.both()
        await other.both()
    names = [request["rollout_id"] for request in double.requests]
    assert [name.partition("~")[0] for name in names] == ["train-0.0.1"] * 2
    assert names[0] != names[1]


async def test_rollouts_are_spread_over_the_servers():
    first, second = Double(good), Double(good)
    async with stage(first, second) as on, asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(on.both(f"train-{number}.0.1"))
    assert (len(first.requests), len(second.requests)) == (3, 3)


@pytest.mark.parametrize(
    ("category", "error"),
    [
        ("timeout", TimeoutError),
        ("http_error", EngineError),
        ("validation_error", WorkflowError),
        ("agent_error", WorkflowError),
        (None, WorkflowError),
    ],
)
async def test_failure_is_put_into_its_category_with_the_servers_words(category, error):
    async def act(double, request):
        await double.complete(request, "failure", err_message="it\nbroke", err_category=category)

    async with stage(Double(act)) as on:
        with pytest.raises(error, match="broke"):
            await on.run()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"status": "failure", "err_message": "no idea"}, GraderError, "no idea"),
        ({"status": "failure"}, GraderError, "not why"),
        ({"status": "failure", "err_category": "timeout", "err_message": "late"}, TimeoutError, "late"),
        ({"samples": {}}, GraderError, "gave no reward"),
        ({"samples": {"main": {"id": "main"}}}, GraderError, "gave no reward"),
        ({"samples": {"main": {"id": "main", "reward": "high"}}}, GraderError, "samples.main.reward"),
        ({"reward": float("nan")}, GraderError, "finite"),
        ({"step_rewards": {"9": 1.0}}, GraderError, r"rewards steps \[9\]"),
    ],
)
async def test_grade_that_cannot_be_used_is_the_graders_error(fields, error, words):
    async def act(double, request):
        await double.complete(request)
        await double.grade(request, **fields)

    async with stage(Double(act)) as on:
        await on.run()
        with pytest.raises(error, match=words):
            await on.grade()


async def test_pool_that_fails_ends_the_run_not_the_rollout():
    async with stage(Double(good)) as on:
        with pytest.raises(PoolError, match="unknown"):
            await on.run("lost-0.0.1")


@pytest.mark.parametrize("kind", ["completed", "graded"])
async def test_large_callback_fails_its_rollout(kind, monkeypatch):
    monkeypatch.setattr("penstock_compat.rollout_server.executor_callbacks.MAX_CALLBACK_BYTES", 1000)

    async with CallbackListener(None, host="127.0.0.1", port=0, linger_s=0) as listener:
        pending = listener.expect("r-1")
        headers = {"authorization": f"Bearer {listener.key}"}
        url = getattr(listener.urls("r-1"), kind)
        async with aiohttp.ClientSession() as http, http.post(url, data=b"x" * 2000, headers=headers) as response:
            assert response.status == 413
        result = await asyncio.wait_for(getattr(pending, kind), 5)
        assert result.status == "failure"
        assert "1000" in result.err_message


async def test_callbacks_are_taken_once_and_answered_every_time():
    said = []

    async def act(double, request):
        said.append(await double.complete(request))
        said.append(await double.complete(request, "failure", err_message="second thoughts"))
        said.append(await double.complete(request))
        await double.grade(request, reward=1.0)
        said.append(await double.grade(request, reward=9.0))

    async with stage(double := Double(act)) as on:
        assert await on.both() == [Reward(None, 1.0)]
        late = await double.complete(double.requests[0]), await double.grade(double.requests[0], reward=5.0)
        assert [status for status, _ in (*said, *late)] == [200] * (len(said) + 2)
        assert said[0] == said[2]


async def test_grade_may_come_long_before_it_is_asked_for():
    graded = asyncio.Event()

    async def act(double, request):
        await good(double, request)
        graded.set()

    async with stage(Double(act)) as on:
        await on.run()
        await graded.wait()
        assert await on.grade() == [Reward("main", 1.0)]


async def test_strangers_and_nonsense_are_turned_away():
    said = {}

    async def act(double, request):
        elsewhere = request["completion_callback_url"].replace("train-0.0.1", "train-9.0.1")
        guessed = request["completion_callback_url"].replace("/train-0.0.1", "x/train-0.0.1")
        body = {"rollout_id": request["rollout_id"], "status": "success"}
        said["key"] = await double.complete(request, key="mk-model-token")
        said["rollout"] = await double.post(elsewhere, body, request["controller_api_key"])
        said["path"] = await double.post(guessed, body, request["controller_api_key"])
        await good(double, request)

    async with stage(Double(act)) as on:
        assert await on.both() == [Reward("main", 1.0)]
    assert {name: status for name, (status, _) in said.items()} == {"key": 401, "rollout": 404, "path": 404}


@pytest.mark.parametrize("body", [b"{", b"[]", {"rollout_id": "other", "status": "success"}, {"status": "pending"}, {"status": 3}])
async def test_malformed_completion_ends_the_rollout_at_once(body):
    answered = asyncio.get_running_loop().create_future()

    async def act(double, request):
        sent = body if isinstance(body, bytes) else {"rollout_id": request["rollout_id"], **body}
        answered.set_result(await double.post(request["completion_callback_url"], sent, request["controller_api_key"]))

    async with stage(Double(act)) as on:
        with pytest.raises(WorkflowError, match="callback"):
            await on.run()
        status, _ = await answered
        assert status == 422


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (None, WorkflowError, "said nothing of rollout train-0.0.1~.*does not know it"),
        ("grading", WorkflowError, "does it reach http://127.0.0.1"),
        ("success", WorkflowError, "does it reach http://127.0.0.1"),
        ("running", TimeoutError, "did not end"),
    ],
)
async def test_silent_server_is_asked_why_and_reported_to_stop(state, error, words):
    async with stage(double := Double(state=state)) as on:
        with pytest.raises(error, match=words):
            await on.run(timeout_s=0.05)
        assert double.cancelled == [double.requests[0]["rollout_id"]]


async def test_server_that_has_others_to_run_first_is_waited_for():
    async def act(double, request):
        await double.polled.wait()
        double.polled.clear()
        await double.polled.wait()
        await good(double, request)

    async with stage(Double(act, state="queued")) as on:
        assert await on.both(timeout_s=0.01) == [Reward("main", 1.0)]


async def test_cancelled_rollout_is_cancelled_on_its_server():
    async with stage(double := Double()) as on:
        running = asyncio.create_task(on.run())
        await double.took.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert double.cancelled == [double.requests[0]["rollout_id"]]
        status, _ = await double.complete(double.requests[0])
        assert status == 200


async def test_server_that_hangs_up_is_asked_again_and_no_other():
    calls = []

    async def hang_up(reader, writer):
        line = await reader.readline()
        if line.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        else:
            calls.append(line.split()[1])
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as rude:
        url = f"http://127.0.0.1:{rude.sockets[0].getsockname()[1]}"
        async with stage(other := Double(), urls=url) as on:
            with pytest.raises(WorkflowError, match="took"):
                await on.run(timeout_s=0.3)
    assert calls.count(b"/rollout") > 1
    assert calls[-1] == b"/rollout/cancel"
    assert other.asked == []


async def test_wrong_token_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("ROLLOUT_TOKEN", "right")
    async with stage(Double(good, token="right"), token_env="ROLLOUT_TOKEN") as on:
        assert await on.both() == [Reward("main", 1.0)]
    monkeypatch.setenv("ROLLOUT_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=r"executor\.token_env"):
        async with stage(Double(good, token="right"), token_env="ROLLOUT_TOKEN"):
            pass


async def test_start_without_any_server_says_which_were_tried():
    async with Double().serving() as double:
        pass
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1"):
        async with stage(Double(), urls=[double.url]):
            pass


async def test_ten_thousand_rollouts_leave_nothing_behind():
    async def act(double, request):
        await double.complete(request)
        if not request["rollout_id"].endswith(".1.1"):
            await double.grade(request, reward=1.0)

    async with stage(Double(act)) as on:
        for number in range(300):
            await on.both(f"train-{number}.0.1")
        callbacks = on.executor._callbacks
        for number in range(10_000):
            callbacks.expect(f"val-{number}.0.1")
            callbacks.forget(f"val-{number}.0.1")
        assert (len(callbacks), len(on.executor._pending_grades), len(callbacks._finished)) == (0, 0, 4096)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "'urls' is missing"),
        ({"urls": []}, "urls"),
        ({"urls": ["ftp://here"]}, "'ftp://here' is not an address; write it as http://host:port"),
        ({"urls": ["localhost:8000"]}, "is not an address"),
        ({"urls": ["http://u:p@host"]}, "leave out"),
        ({"urls": ["http://127.0.0.1:1", "http://127.0.0.1:1/"]}, "twice"),
        ({"url": ["http://127.0.0.1:1"]}, "unknown key 'url'; did you mean 'urls'?"),
        ({"urls": ["http://127.0.0.1:1"], "token_env": "NO_SUCH_TOKEN"}, "the environment has no NO_SUCH_TOKEN"),
        ({"urls": ["http://gpu7:8000"]}, "http://gpu7:8000 cannot call back 127.0.0.1; set callback_host"),
        ({"urls": ["http://127.0.0.1:1"], "callback_url": "gpu7"}, "is not an address"),
    ],
)
def test_bad_settings_are_named(table, words):
    with pytest.raises(ConfigError) as caught:
        read_section("server", table)
    assert str(caught.value).startswith("[executor]")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "words"), [(({"a": 1}, {}), r"\[workflow\]"), (({"a": 1}, {"b": 1}), r"\[workflow\] and \[grader\]")]
)
def test_tables_that_would_not_reach_the_agent_are_refused(tables, words):
    agent = replace(make_agent(None, good_grade), tables=tables)
    section = read_section("server", {"urls": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=f"{words}"):
        ServerExecutor(
            ExecutorContext(agent=agent, author_tasks=AuthorTasks(Path(), Events()), section=section, load_transcripts=recorded)
        )


async def test_taken_callback_port_is_named():
    async with Double().serving() as other:
        with pytest.raises(ConfigError, match=r"executor\.callback_port"):
            async with stage(Double(), callback_port=int(other.url.rpartition(":")[2])):
                pass


def test_secret_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match=r"executor\.token_env"):
        secret("NO_SUCH_TOKEN", "executor.token_env")


def test_settings_on_the_page_exist():
    page = (Path(__file__).parents[3] / "docs/environments.md").read_text()
    (sample,) = (text for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "server" in text)
    table = tomllib.loads(sample.replace("PENSTOCK_ROLLOUT_TOKEN", "PATH"))
    assert read_section(table["rollout"]["executor"], table["executor"]).urls == ("http://127.0.0.1:8000",)
    for key, setting in ServerSection.model_fields.items():
        default = "required" if setting.is_required() else f"`{setting.default}`" if setting.default != "" else "none"
        assert f"| `{key}` | {default} |" in page
