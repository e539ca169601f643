"""The rollout server on a socket: what it accepts, what it calls back with, once, and how it stops."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import httpx2
import pytest
import uvicorn
from rollout_cases import DEADLINE_S, good_grade
from server_cases import PROMPT, QUICK, Listener, backend_of, graded, nothing, request, said, served

from penstock.errors import ConfigError
from penstock.http.listen import bind
from penstock.records import Sampling, make_rollout
from penstock.testing import ScriptedEngine, workbench
from penstock_compat.rollout_server.app import authorize, create_rollout_server
from penstock_compat.rollout_server.backend import ExecutionBackend, ExecutionResult
from penstock_compat.rollout_server.delivery import DeliveryPolicy
from penstock_compat.rollout_server.journal import open_journal
from penstock_compat.rollout_server.rollouts import ServerLimits


@asynccontextmanager
async def serving(backend, *, answers=(), **options):
    """A server of the back end and a listener for its callbacks."""
    async with Listener(answers).listening() as listener, served(backend, **options) as server:
        yield server, listener


async def test_rollout_is_accepted_completed_and_graded():
    async with serving(backend_of(said, good_grade)) as (server, listener):
        assert (await server.post(graded(listener, extra_fields={"row": 7})))[:2] == (200, {})
        completion, grade = await listener.next(2)
        assert completion == (
            "/completed",
            {"rollout_id": "r-1", "status": "success", "extra_fields": {"row": 7}, "err_message": None, "err_category": None},
        )
        sample = {"id": "main", "messages": [*PROMPT, {"role": "assistant", "content": "6"}], "label": None, "reward": 1.0}
        sample |= {"remove_sample": False, "metrics": {}, "extra_fields": {}}
        answer = {"rollout_id": "r-1", "status": "success", "samples": {"main": sample}, "err_message": None, "err_category": None}
        assert grade == ("/graded", answer)
        assert await server.status("r-1") == "success"


async def test_rollout_without_a_grader_url_is_not_graded():
    async with serving(backend_of(said, good_grade)) as (server, listener):
        await server.post(request(listener, label="6"))
        await listener.next()
        await server.app.state.rollouts.drain()
        assert [path for path, _ in listener.taken()] == ["/completed"]


async def test_failed_workflow_has_a_failed_grade():
    async def run(ctx):
        raise ValueError("bad row")

    async with serving(backend_of(run, good_grade)) as (server, listener):
        await server.post(graded(listener))
        (_, completion), (_, grade) = await listener.next(2)
        for answer in (completion, grade):
            assert (answer["status"], answer["err_category"]) == ("failure", "validation_error")
            assert "bad row" in answer["err_message"]
        assert grade["samples"] == {}
        _, status, _ = await server.ask("GET", "/rollout/r-1/status")
        assert (status["status"], status["message"]) == ("failure", completion["err_message"])


async def test_repeated_request_runs_once():
    runs = []

    async def run(ctx):
        runs.append(ctx)

    async with serving(backend_of(run)) as (server, listener):
        first = request(listener, metadata={"a": 1, "b": 2})
        again = json.dumps(first | {"metadata": {"b": 2, "a": 1}}, indent=2).encode()
        answers = await asyncio.gather(*(server.post(body) for body in (first, again, first)))
        await listener.next()
        answers.append(await server.post(first))
        assert [answer[0] for answer in answers] == [200] * 4
        status, body, _ = await server.post(request(listener, metadata={"a": 2}))
        assert (status, body["error"]["code"]) == (409, "rollout_exists")
        await server.app.state.rollouts.drain()
        assert (len(runs), len(listener.taken())) == (1, 1)


async def test_rollouts_beyond_the_limit_are_refused_for_now():
    let_go = asyncio.Event()

    async def run(ctx):
        await let_go.wait()

    async with serving(backend_of(run), max_accepted=2) as (server, listener):
        assert [(await server.post(request(listener, f"r-{n}")))[0] for n in range(2)] == [200, 200]
        status, body, headers = await server.post(request(listener, "r-2"))
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "too_many_rollouts", "5")
        assert (await server.post(request(listener, "r-0")))[0] == 200
        let_go.set()
        await listener.next(2)
        while (await server.ask("GET", "/health"))[1]["accepted"]:
            pass
        assert (await server.post(request(listener, "r-2")))[0] == 200


async def test_workflows_beyond_the_limit_are_queued():
    let_go, started = asyncio.Event(), asyncio.Queue()

    async def run(ctx):
        started.put_nowait(ctx)
        await let_go.wait()

    async with serving(backend_of(run, most=1)) as (server, listener):
        for n in range(3):
            await server.post(request(listener, f"r-{n}"))
        await started.get()
        assert [await server.status(f"r-{n}") for n in range(3)] == ["running", "queued", "queued"]
        counts = (await server.ask("GET", "/health"))[1]["concurrency"]
        assert counts == {"max_concurrent": 1, "queued": 2, "running": 1}
        let_go.set()
        assert len(await listener.next(3)) == 3


async def test_status_of_grading_and_unknown_rollouts():
    grading, let_go = asyncio.Event(), asyncio.Event()

    async def grade(ctx):
        grading.set()
        await let_go.wait()
        return 1.0

    async with serving(backend_of(said, grade)) as (server, listener):
        await server.post(graded(listener))
        await grading.wait()
        assert [await server.status(name) for name in ("r-1", "r-2")] == ["grading", "unknown"]
        let_go.set()
        await listener.next(2)


@pytest.mark.parametrize("body", [{"ids": ["a-0", "a-1", "nobody"]}, {"prefix": "a-"}])
async def test_cancelled_rollouts_end_once(body):
    let_go, started = asyncio.Event(), asyncio.Event()

    async def run(ctx):
        started.set()
        await let_go.wait()

    async with serving(backend_of(run, good_grade, most=1)) as (server, listener):
        for name in ("a-0", "a-1", "b-0"):
            await server.post(graded(listener, name))
        await started.wait()
        status, answer, _ = await server.ask("POST", "/rollout/cancel", body)
        assert (status, sorted(answer["cancelled"])) == (200, ["a-0", "a-1"])
        assert [await server.status(name) for name in ("a-0", "a-1")] == ["cancelled", "cancelled"]
        reply = await listener.next(4)
        assert {reply["err_message"] for _, reply in reply} == {"cancelled by whoever asked for it"}
        assert (await server.ask("POST", "/rollout/cancel", body))[1] == {"cancelled": []}
        let_go.set()
        (_, completion), _ = await listener.next(2)
        assert (completion["rollout_id"], completion["status"], len(listener.taken("a-0"))) == ("b-0", "success", 2)


async def test_rollout_cancelled_while_it_is_graded_keeps_its_completion():
    grading = asyncio.Event()

    async def grade(ctx):
        grading.set()
        await asyncio.Event().wait()

    async with serving(backend_of(said, grade)) as (server, listener):
        await server.post(graded(listener))
        await grading.wait()
        assert (await server.ask("POST", "/rollout/cancel", {"all": True}))[1] == {"cancelled": ["r-1"]}
        (_, completion), (_, answer) = await listener.next(2)
        assert (completion["status"], answer["status"]) == ("success", "failure")
        assert await server.status("r-1") == "cancelled"


async def test_callbacks_are_retried_with_the_same_body():
    answers = [503, 500, 429, {"transcripts": {}}, 502, {}]

    async with serving(backend_of(said, good_grade), answers=answers) as (server, listener):
        await server.post(graded(listener, controller_api_key="secret"))
        await listener.next(2)
        assert [status for *_, status in listener.got] == [503, 500, 429, 200, 502, 200]
        assert len({json.dumps(body) for path, _, body, _ in listener.got if path == "/completed"}) == 1
        assert {headers["authorization"] for _, headers, _, _ in listener.got} == {"Bearer secret"}


async def test_refused_callback_ends_the_rollout():
    async def grade(ctx):
        await asyncio.Event().wait()

    async with serving(backend_of(said, grade), answers=[404]) as (server, listener):
        await server.post(graded(listener))
        while await server.status("r-1") in ("running", "queued", "grading"):
            pass
        _, status, _ = await server.ask("GET", "/rollout/r-1/status")
        assert (status["status"], status["message"]) == (
            "failure",
            "the completion of rollout r-1 was refused: the listener answered 404",
        )
        await server.app.state.rollouts.drain()
        assert len(listener.got) == 1


async def test_redirects_are_not_followed():
    async with serving(backend_of(nothing), answers=[(307, [(b"location", b"/elsewhere")])]) as (server, listener):
        await server.post(request(listener))
        while not (status := (await server.ask("GET", "/rollout/r-1/status"))[1])["message"]:
            pass
        assert (status["status"], "answered 307" in status["message"]) == ("success", True)
        assert len(listener.got) == 1


async def test_callback_carries_no_key_where_none_was_given(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    keys = []

    async def run(ctx):
        keys.append((ctx.api_key, ctx.openai().api_key))

    async with serving(backend_of(run, most=1)) as (server, listener):
        await server.post(request(listener, "none"))
        await server.post(request(listener, "controller", controller_api_key="c"))
        await server.post(request(listener, "llm", controller_api_key="c", llm_api_key="l"))
        await listener.next(3)
        assert keys == [("none", "none"), ("c", "c"), ("l", "l")]
        sent = {body["rollout_id"]: headers.get("authorization") for _, headers, body, _ in listener.got}
        assert sent == {"none": None, "controller": "Bearer c", "llm": "Bearer c"}
        assert "sk-mine" not in str(listener.got)


async def test_bad_reply_is_ignored():
    async with serving(backend_of(said, good_grade), answers=[b"<html>fine</html>"]) as (server, listener):
        await server.post(graded(listener))
        _, (_, grade) = await listener.next(2)
        assert (grade["status"], grade["samples"]["main"]["reward"]) == ("success", 1.0)


async def test_plain_agent_is_graded_on_the_recorded_transcripts():
    reply = {"transcripts": {"main": {"messages": [*PROMPT, {"role": "assistant", "content": "6"}], "steps": [0]}}}

    async def grade(ctx):
        ctx.set_step_reward(0, float(ctx.sample.messages[-1]["content"] == ctx.label))

    async with serving(backend_of(nothing, grade), answers=[reply]) as (server, listener):
        await server.post(graded(listener))
        _, (_, answer) = await listener.next(2)
        assert (answer["status"], answer["step_rewards"], list(answer["samples"])) == ("success", {"0": 1.0}, ["main"])


async def test_values_that_json_lacks_are_converted():
    async def run(ctx):
        return [{"role": "assistant", "content": "half \ud800", "big": 2**70, "odd": {1, 2}}]

    async def grade(ctx):
        ctx.sample.metrics = {"loss": float("nan"), "at": object, 3: "three"}
        return 1.0

    async with serving(backend_of(run, grade)) as (server, listener):
        await server.post(graded(listener))
        _, (_, answer) = await listener.next(2)
        sample = answer["samples"]["main"]
        assert (sample["messages"][0]["content"], sample["messages"][0]["big"]) == ("half ?", 2**70)
        assert (sample["metrics"]["loss"], sample["metrics"]["3"], sample["reward"]) == (None, "three", 1.0)


class Odd(ExecutionBackend):
    """A back end of somebody else's."""

    def __init__(self, act):
        self.act = act

    async def execute(self, request, on_workflow_complete, on_grader_complete=None):
        await self.act(on_workflow_complete, on_grader_complete)


WELL = ExecutionResult(status="success")


async def say_nothing(complete, grade):
    pass


async def crash(complete, grade):
    raise RuntimeError("no such machine")


async def complete_twice(complete, grade):
    await complete(WELL)
    await complete(ExecutionResult(status="failure", err_message="no, it failed"))
    await grade(WELL)


async def crash_after(complete, grade):
    await complete(WELL)
    raise RuntimeError("late trouble")


async def bad_reward(complete, grade):
    await complete(WELL)
    sample = SimpleNamespace(id="main", messages=[], label=None, reward=float("nan"), remove_sample=False)
    await grade(ExecutionResult(status="success", samples={"main": SimpleNamespace(**vars(sample), metrics={}, extra_fields={})}))


@pytest.mark.parametrize(
    ("act", "completion", "grade", "message"),
    [
        (say_nothing, "failure", "failure", "without saying how the workflow ended"),
        (crash, "failure", "failure", "no such machine"),
        (complete_twice, "success", "success", None),
        (crash_after, "success", "failure", "late trouble"),
        (bad_reward, "success", "failure", "reward nan is not a finite number"),
    ],
)
async def test_rollout_is_reported_once_for_any_backend(act, completion, grade, message):
    async with serving(Odd(act)) as (server, listener):
        await server.post(graded(listener))
        answer = [body for _, body in await listener.next(2)]
        await server.app.state.rollouts.drain()
        assert [body["status"] for body in answer] == [completion, grade]
        assert (message or "") in (answer[-1]["err_message"] or "")
        assert len(listener.got) == 2


async def test_stopping_server_gives_grace_then_fails_rollouts():
    started, finish = asyncio.Event(), asyncio.Event()

    async def run(ctx):
        started.set()
        await (finish if ctx.metadata["ends"] else asyncio.Event()).wait()

    async with serving(backend_of(run), limits=ServerLimits(delivery=QUICK, drain_s=1.5)) as (server, listener):
        await server.post(request(listener, "ends", metadata={"ends": True}))
        await server.post(request(listener, "hangs", metadata={"ends": False}))
        await started.wait()
        drain = asyncio.create_task(server.app.state.rollouts.drain())
        await asyncio.sleep(0)
        status, body, headers = await server.post(request(listener, "late", metadata={}))
        assert (status, body["error"]["code"], "retry-after" in headers) == (503, "stopping", True)
        assert (await server.ask("GET", "/health"))[0] == 503
        finish.set()
        await drain
        answer = {body["rollout_id"]: body["err_message"] for _, body in listener.taken()}
        assert answer == {"ends": None, "hangs": "the server was stopped while it ran"}


async def test_undelivered_results_and_queue_survive_a_restart(tmp_path):
    started = asyncio.Event()

    async def wait(ctx):
        started.set()
        await asyncio.Event().wait()

    async with Listener([503] * 1000).listening() as listener:
        impatient = ServerLimits(delivery=QUICK, drain_s=0, final_delivery_s=0.1)
        async with served(backend_of(wait, most=1), journal=tmp_path / "j.db", limits=impatient) as server:
            await server.post(request(listener, "broken-off"))
            await server.post(request(listener, "waits"))
            await started.wait()
        listener.answers.clear()
        async with served(backend_of(nothing), journal=tmp_path / "j.db") as server:
            answer = {body["rollout_id"]: body["status"] for _, body in await listener.next(2)}
            assert answer == {"broken-off": "failure", "waits": "success"}
            assert (await server.post(request(listener, "waits")))[0] == 200
        assert len(listener.taken()) == 2


async def test_next_server_delivers_an_expired_result(tmp_path):
    async with Listener([503]).listening() as listener:
        hasty = ServerLimits(delivery=DeliveryPolicy(first_wait_s=1, deadline_s=0.5), drain_s=0)
        async with served(backend_of(said, good_grade), journal=tmp_path / "j.db", limits=hasty) as server:
            await server.post(graded(listener))
            while (await server.ask("GET", "/health"))[1]["accepted"]:
                pass
            assert (await server.status("r-1"), len(listener.got)) == ("success", 1)
        async with served(backend_of(nothing), journal=tmp_path / "j.db"):
            assert [body["status"] for _, body in await listener.next(2)] == ["success", "success"]


async def test_unreadable_journal_entry_does_not_stop_others(tmp_path):
    async with Listener().listening() as listener:
        journal = open_journal(tmp_path / "j.db")
        await journal.accept("old", "digest", b'{"rollout_id": "old"}')
        await journal.accept("r-1", "digest", json.dumps(request(listener)).encode())
        await journal.close()
        async with served(backend_of(nothing), journal=tmp_path / "j.db") as server:
            await listener.next()
            assert (await server.status("old"), await server.status("r-1")) == ("queued", "success")


async def test_second_server_on_the_same_journal_is_refused(tmp_path):
    async with served(backend_of(nothing), journal=tmp_path / "j.db"):
        with pytest.raises(ConfigError, match="journal"):
            async with served(backend_of(nothing), journal=tmp_path / "j.db"):
                pass


URL_MATRIX = [
    ("ftp://127.0.0.1/x", "http:// or https://"),
    ("file:///etc/passwd", "http:// or https://"),
    ("127.0.0.1:80", "http:// or https://"),
    ("http://", "http:// or https://"),
    ("http://169.254.169.254/latest", "may not call"),
    ("http://2130706433/x", "may not call"),
    ("http://127.0.0.1.evil.example/", "may not call"),
    ("http://user:pw@127.0.0.1/", "user or password"),
    ("http://127.0.0.1\\@evil.example/", "no URL"),
    ("http://127.0.0.1:99999/", "no URL"),
    ("http://localhost/\r\nx: y", "no URL"),
    ("", "http:// or https://"),
]


@pytest.mark.parametrize("field", ["chat_completions_url", "completion_callback_url", "grader_callback_url"])
async def test_urls_that_may_not_be_called_are_refused_by_name(field):
    async with serving(backend_of(nothing)) as (server, listener):
        for url, reason in URL_MATRIX:
            status, body, _ = await server.post(request(listener) | {field: url})
            assert (status, body["detail"][0]["loc"]) == (422, ["body", field])
            assert reason in body["error"]["message"], url
        assert listener.got == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout_id": "a/b"}, "rollout_id"),
        ({"rollout_id": ".."}, "rollout_id"),
        ({"rollout_id": "x" * 257}, "rollout_id"),
        ({"rollout_id": "r\n1"}, "rollout_id"),
        ({"rollout_id": "рол"}, "rollout_id"),
        ({"rollout_id": 7}, "rollout_id"),
        ({"initial_messages": "hi"}, "initial_messages"),
        ({"initial_messages": [1]}, "initial_messages.0"),
        ({"metadata": [1]}, "metadata"),
        ({"label": 6}, "label"),
        ({"agent_timeout_sec": 0}, "agent_timeout_sec"),
        ({"grader_timeout_sec": -1}, "grader_timeout_sec"),
        ({"controller_api_key": "a\r\nx: y"}, "controller_api_key"),
        ({"llm_api_key": " k"}, "llm_api_key"),
    ],
)
async def test_field_that_is_wrong_is_named(change, field):
    async with serving(backend_of(nothing)) as (server, listener):
        status, body, _ = await server.post(request(listener) | change)
        assert (status, [".".join(map(str, each["loc"])) for each in body["detail"]]) == (422, [f"body.{field}"])
        assert body["error"]["message"].startswith(f"{field}: ") and "\n" not in body["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"agent_timeout_sec": NaN}', b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
async def test_body_that_is_no_json_object_is_one_clear_line(body):
    async with serving(backend_of(nothing)) as (server, _):
        status, answer, _ = await server.post(body)
        assert (status, answer["error"]["code"], answer["detail"][0]["loc"]) == (422, "invalid_body", ["body"])
        assert "\n" not in answer["error"]["message"]


async def test_large_body_is_refused(monkeypatch):
    monkeypatch.setattr("penstock_compat.rollout_server.app.MAX_REQUEST_BYTES", 1000)  # 16 MB would make a slow test

    async with serving(backend_of(nothing)) as (server, listener):
        status, body, _ = await server.post(request(listener, metadata={"x": "y" * 1000}))
        assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("body", [{}, {"ids": ["a"], "all": True}, {"prefix": ""}, {"all": False}, {"id": "a"}, {"ids": "a"}])
async def test_cancel_without_exactly_one_choice_is_refused(body):
    async with serving(backend_of(nothing)) as (server, _):
        assert (await server.ask("POST", "/rollout/cancel", body))[0] == 422


async def test_wrong_methods_and_paths_say_what_there_is():
    async with serving(backend_of(nothing)) as (server, _):
        for method, path, expected in [("GET", "/rollout", 405), ("POST", "/health", 405), ("GET", "/rollout/a/b/status", 404)]:
            status, body, _ = await server.ask(method, path)
            assert (status, "POST /rollout/cancel" in body["error"]["message"]) == (expected, True)


async def test_token_opens_all_routes_and_nothing_else_does():
    async with serving(backend_of(nothing), token="right") as (server, listener):
        asks = [("POST", "/rollout"), ("POST", "/rollout/cancel"), ("GET", "/rollout/x/status")]
        for shown in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}, {"authorization": "right"}):
            for method, path in asks:
                status, body, _ = await server.ask(method, path, **shown)
                assert (status, body["error"]["code"]) == (401, "invalid_token")
        assert (await server.post(request(listener), authorization="Bearer right"))[0] == 200
        assert (await server.ask("GET", "/health"))[0] == 200
        await listener.next()


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/rollout", {"initial_messages": PROMPT * 10_001}, 422, "at most 10000"),
        ("/rollout", {"metadata": {"x": [0] * 200_000}}, 422, "more than 200000 JSON values"),
        ("/rollout", {"metadata": json.loads('{"a":' * 75 + "1" + "}" * 75)}, 422, "nested more than 72 levels"),
        ("/rollout", {"rollout_id": "x" * 257}, 422, "use 1 to 256"),
        ("/rollout/cancel", {"ids": ["x"] * 10_001}, 422, "at most 10000"),
        ("/rollout/cancel", {"prefix": "x" * 257}, 422, "at most 256"),
    ],
)
async def test_every_part_of_a_request_is_bounded(path, fields, status, words):
    async with serving(backend_of(nothing)) as (server, listener):
        body = fields if path.endswith("cancel") else request(listener) | fields
        answered, answer, _ = await server.ask("POST", path, body)
        assert (answered, words in answer["error"]["message"]) == (status, True), answer


@pytest.mark.parametrize(
    ("client", "headers", "admitted"),
    [
        (("127.0.0.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("::ffff:127.0.0.1", 1), {}, True),
        (("testclient", 1), {}, True),
        (("10.0.0.7", 1), {}, False),
        (("::ffff:10.0.0.7", 1), {}, False),
        (None, {}, False),
        (("127.0.0.1", 1), {"x-forwarded-for": "10.0.0.7"}, False),
        (("127.0.0.1", 1), {"origin": "https://evil.example"}, False),
    ],
)
def test_without_a_token_only_this_machine_is_served(client, headers, admitted):
    asked = SimpleNamespace(client=client and SimpleNamespace(host=client[0]), headers=headers)
    if admitted:
        authorize(asked, None)
    else:
        with pytest.raises(Exception, match="PENSTOCK_ROLLOUT_TOKEN") as refused:
            authorize(asked, None)
        assert refused.value.status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:9000", "[::1]:9000", "agent.localhost", "testserver", "evil.example", "["]
)
def test_without_a_token_only_local_names_are_served(host):
    asked = SimpleNamespace(client=SimpleNamespace(host="127.0.0.1"), headers={"host": host})
    if host not in ("evil.example", "["):
        authorize(asked, None)
        return
    with pytest.raises(Exception, match="PENSTOCK_ROLLOUT_TOKEN") as refused:
        authorize(asked, None)
    assert refused.value.status == 421


async def test_token_and_hosts_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ROLLOUT_TOKEN", "from-env")
    monkeypatch.setenv("PENSTOCK_ROLLOUT_HOSTS", "example.com, 10.0.0.0/8")

    async with serving(backend_of(nothing)) as (server, listener):
        body = request(listener)
        assert (await server.post(body))[0] == 401
        status, answer, _ = await server.post(body, authorization="Bearer from-env")
        assert (status, "127.0.0.1" in answer["error"]["message"]) == (422, True)
        allowed = {"completion_callback_url": "http://10.1.2.3/", "chat_completions_url": "https://example.com/v1"}
        assert (await server.post(body | allowed | {"rollout_id": 1}, authorization="Bearer from-env"))[1]["detail"] == [
            {"loc": ["body", "rollout_id"], "msg": "input should be a valid string"}
        ]


def test_empty_token_is_refused_when_the_server_is_made():
    with pytest.raises(ConfigError, match="token"):
        create_rollout_server(backend=backend_of(nothing), token=" ", configure_logging=False)


async def test_given_lifespan_is_entered_around_the_rollouts():
    seen = []

    @asynccontextmanager
    async def lifespan(app):
        seen.append("up")
        yield {"their": "state"}
        seen.append("down")

    async with serving(backend_of(nothing), lifespan=lifespan) as (_, _):
        seen.append("serving")
    assert seen == ["up", "serving", "down"]


async def test_app_runs_under_uvicorn(tmp_path):
    app = create_rollout_server(backend=backend_of(said, good_grade), journal=tmp_path / "j.db", configure_logging=False)
    with bind("127.0.0.1", 0) as sock:
        sock.listen()  # so that a caller who comes before the server is up waits
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        async with Listener().listening() as listener, aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE_S):
            serves = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/rollout"
            async with session.post(url, json=graded(listener)) as response:
                assert (response.status, await response.json()) == (200, {})
            assert [body["status"] for _, body in await listener.next(2)] == ["success", "success"]
            server.should_exit = True
            await serves


async def test_app_runs_without_lifespan_events():
    app = create_rollout_server(backend=backend_of(said), journal=None, configure_logging=False)
    async with (
        Listener().listening() as listener,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://testserver") as client,
    ):
        assert (await client.post("/rollout", json=request(listener))).status_code == 200
        await listener.next()
        await app.state.rollouts.close()


async def test_model_calls_reach_the_gateway_under_the_rollouts_own_key(renderer):
    async def run(ctx):
        client = ctx.openai().with_options(max_retries=0)
        answer = await client.chat.completions.create(model="any", messages=ctx.prompt)
        return [*ctx.prompt, {"role": "assistant", "content": answer.choices[0].message.content}]

    engine = ScriptedEngine(["6"], renderer.tokenizer)
    async with (
        workbench(engine, renderer, serves=True) as bench,
        Listener().listening() as listener,
        served(backend_of(run, good_grade)) as server,
    ):
        session = await bench.rollout()
        body = graded(listener, session.rollout_id, llm_api_key=session.token, chat_completions_url=session.base_url)
        await server.post(body)
        _, (_, reply) = await listener.next(2)
        assert reply["samples"]["main"]["messages"][-1] == {"role": "assistant", "content": "6"}
        assert [step.message["content"] for step in (await bench.attempt(session)).steps] == ["6"]


async def test_refusal_of_the_policy_is_an_http_error(renderer):
    async def run(ctx):
        await ctx.openai().with_options(max_retries=0).chat.completions.create(model="any", messages=ctx.prompt, temperature=-1)

    engine = ScriptedEngine([], renderer.tokenizer)
    async with workbench(engine, renderer, serves=True) as bench, Listener().listening() as listener:
        session = bench.reopen(make_rollout("g", "t", 0), sampling=Sampling())
        async with served(backend_of(run)) as server:
            body = request(listener, session.rollout_id, llm_api_key=session.token, chat_completions_url=session.base_url)
            await server.post(body)
            [(_, answer)] = await listener.next()
            assert (answer["status"], answer["err_category"]) == ("failure", "http_error")
