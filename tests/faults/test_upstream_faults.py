"""Engines behind HTTP that fail: before the first token a caller does not notice, after it the reply breaks off."""

import asyncio
import contextlib
import email.utils
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing

import pytest
from upstream_cases import Act, FakeVllm, edited, engine_over, event, replaced

from penstock.engines.base import SampledChunk
from penstock.engines.fleet import EngineServer, Fleet
from penstock.engines.retry import LONGEST_WAIT_S, RetryPolicy, backoff_s
from penstock.engines.servers.vllm import VllmEngine
from penstock.errors import EngineBusy, EngineError
from penstock.http.client import RequestTimeouts, UpstreamError, retry_after_s
from penstock.records import Sampling

PROMPT = [3, 1, 4, 1, 5]
SAMPLING = Sampling(max_tokens=12, seed=7)
SHORT = RequestTimeouts(first_token_s=0.2, stall_s=0.2)

BEFORE_THE_FIRST_TOKEN = {
    "429": Act(status=429),
    "429 with a wait": Act(status=429, headers={"retry-after": "0"}),
    "503": Act(status=503),
    "500": Act(status=500),
    "502": Act(status=502),
    "401": Act(status=401),
    "404": Act(status=404),
    "reset before the head": Act(reset=True),
    "reset after the head": Act(cut_after=0),
    "ended after the head": Act(end_after=0),
    "silence": Act(stall_after=0),
    "an error event": Act(edit=replaced(0, event({"error": {"message": "engine died", "code": 500}}))),
    "a busy event": Act(edit=replaced(0, event({"error": {"message": "overloaded", "code": 503}}))),
    "done without a token": Act(edit=lambda events: events[-1:]),
    "aborted without a token": Act(edit=edited(0, finish_reason="abort")),
}

AFTER_THE_FIRST_TOKEN = {
    "reset": (Act(cut_after=4), r"completions"),
    "ended": (Act(end_after=4), "without saying how"),
    "done": (Act(edit=lambda events: [*events[:4], events[-1]]), "without saying how"),
    "silence": (Act(stall_after=4), r"silent for 0\.2 s"),
    "an error event": (Act(edit=replaced(4, event({"error": {"message": "engine died", "code": 500}}))), "engine died"),
    "an error in words": (Act(edit=replaced(4, event({"error": "gone"}))), "reported an error: gone"),
    "aborted": (Act(edit=edited(4, finish_reason="abort")), r"broke the reply off \(abort\)"),
    "not JSON": (Act(edit=replaced(4, b"data: {nope\n\n")), "no reply has: {nope"),
    "not an object": (Act(edit=replaced(4, b"data: 17\n\n")), "no reply has: 17"),
    "no choices": (Act(edit=replaced(4, event({"object": "other"}))), "no reply has"),
    "half a character": (Act(edit=replaced(4, b'data: {"choices": [{"text": "\xc3"}]}\n\n')), "no reply has"),
    "no token ids": (Act(edit=replaced(4, event({"choices": [{"text": "x"}]}))), "return_token_ids"),
    "ids that are no numbers": (Act(edit=edited(4, token_ids=["7"])), "token ids that are none"),
    "ids that are fractions": (Act(edit=edited(4, token_ids=[7.5])), "token ids that are none"),
    "more ids than logprobs": (Act(edit=edited(4, token_ids=[7, 8])), "2 token ids with 1 log-probabilities"),
    "no logprobs": (Act(edit=edited(4, logprobs=None)), "1 token ids with 0 log-probabilities"),
    "a logprob that is null": (Act(edit=edited(4, logprobs={"token_logprobs": [None]})), "no reply has"),
    "a logprob above zero": (Act(edit=edited(4, logprobs={"token_logprobs": [3.25]})), "--logprobs-mode"),
    "minus infinity": (Act(edit=edited(4, logprobs={"token_logprobs": [-9999.0]})), "--logprobs-mode"),
}

NOT_TO_BE_RETRIED = {
    "400": (Act(status=400, words="top_p must be in (0, 1]"), "400 Bad Request: top_p must be"),
    "422": (Act(status=422), "422 Unprocessable"),
    "a redirect": (Act(status=307, headers={"location": "http://127.0.0.1:1/"}), "307 Temporary Redirect"),
    "context": (
        Act(status=400, words="This model's maximum context length is 8 tokens."),
        "maximum context length is 8 tokens.*shorten one of them",
    ),
    "a refusing event": (Act(edit=replaced(0, event({"error": {"message": "no such token", "code": 400}}))), "no such token"),
    "not JSON": (Act(edit=replaced(0, b"data: {nope\n\n")), "no reply has: {nope"),
}


def run(case: Coroutine[None, None, None]) -> None:
    """Run with a deadline, so that a hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await case

    asyncio.run(bounded())


async def read(engine: VllmEngine, sampling: Sampling = SAMPLING, rollout_id: str = "") -> SampledChunk:
    """The whole reply; with the EngineError, where there is one, what came before it is lost."""
    ids, finish = await partial(engine, sampling, rollout_id)
    if isinstance(finish, EngineError):
        raise finish
    return SampledChunk(ids=ids, logprobs=(), full_logprobs=(), versions=(), finish=finish)


async def partial(engine, sampling=SAMPLING, rollout_id=""):
    """The ids of a reply, and how it finished: as it said, or with what error."""
    ids, finish = (), None
    try:
        async for chunk in engine.generate(PROMPT, sampling, rollout_id=rollout_id):
            assert len(chunk.ids) == len(chunk.logprobs) == len(chunk.versions)
            ids, finish = ids + chunk.ids, chunk.finish
    except EngineError as error:
        return ids, error
    return ids, finish


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_TOKEN)
def test_a_fault_before_the_first_token_is_not_noticed(name: str):
    async def case():
        async with FakeVllm([BEFORE_THE_FIRST_TOKEN[name]] * 2) as server, engine_over(server, timeouts=SHORT) as engine:
            reply = await read(engine)
            assert (len(reply.ids), reply.finish) == (12, "length")
            assert len(server.requests) == 3
            assert engine.client.counts.total() == 2

    run(case())


@pytest.mark.parametrize("name", BEFORE_THE_FIRST_TOKEN)
def test_fault_that_lasts_is_reported_once_budget_is_spent(name: str):
    async def case():
        policy = RetryPolicy(retries=2, first_wait_s=0.0, failures=100)
        async with FakeVllm() as server, engine_over(server, policy=policy, timeouts=SHORT) as engine:
            server.otherwise = BEFORE_THE_FIRST_TOKEN[name]
            kind = EngineBusy if "429" in name or "503" in name or "busy" in name else EngineError
            with pytest.raises(EngineError, match="attempts") as shown:
                await read(engine, rollout_id="train-0.1.1")
            assert type(shown.value) is kind
            assert str(shown.value).startswith(f"rollout train-0.1.1: {server.url}/v1/completions")
            assert len(server.requests) == 3

    run(case())


@pytest.mark.parametrize("name", AFTER_THE_FIRST_TOKEN)
def test_fault_after_the_first_token_ends_the_reply(name: str):
    async def case():
        act, message = AFTER_THE_FIRST_TOKEN[name]
        async with FakeVllm([act]) as server, engine_over(server, timeouts=SHORT) as engine:
            ids, error = await partial(engine)
            assert len(server.requests) == 1
            whole = await read(engine)
        assert isinstance(error, EngineError) and not isinstance(error, EngineBusy)
        with pytest.raises(EngineError, match=message):
            raise error
        assert ids == whole.ids[:4]

    run(case())


@pytest.mark.parametrize("name", NOT_TO_BE_RETRIED)
def test_a_request_that_is_at_fault_itself_is_sent_once(name: str):
    async def case():
        act, message = NOT_TO_BE_RETRIED[name]
        async with FakeVllm([act]) as server, engine_over(server) as engine:
            with pytest.raises(EngineError, match=message):
                await read(engine)
            assert len(server.requests) == 1
            assert engine.client.fleet.servers[0].failures == 0

    run(case())


def test_reply_cut_at_any_event_never_says_that_it_finished():
    async def case():
        async with FakeVllm() as server, engine_over(server, policy=RetryPolicy(retries=0, failures=1000)) as engine:
            whole = (await read(engine)).ids
            for cut in range(12):
                server.acts.append(Act(cut_after=cut))
                ids, error = await partial(engine)
                assert isinstance(error, EngineError)
                assert ids == whole[: len(ids)] and len(ids) <= cut
            server.acts.append(Act(cut_after=12))  # all tokens and the finish were sent: nothing is missing
            assert await partial(engine) == (whole, "length")

    run(case())


@pytest.mark.parametrize("size", [1, 2, 7])
def test_events_may_arrive_in_pieces_of_any_size(size: int):
    async def case():
        def windows(events: list[bytes]) -> list[bytes]:
            return [b": keep-alive\r\n\r\n", *(e.replace(b"\n", b"\r\n") for e in events)]

        async with FakeVllm([Act(split=size), Act(split=size, edit=windows)]) as server, engine_over(server) as engine:
            pieces = [await read(engine) for _ in range(2)]
            assert pieces == [await read(engine)] * 2

    run(case())


def test_trickling_bytes_do_not_count_as_tokens():
    async def case():
        chatter = Act(edit=lambda events: [*events[:4], *[b": still here\n\n"] * 1_000_000])
        async with FakeVllm([chatter]) as server, engine_over(server, timeouts=SHORT) as engine:
            ids, error = await partial(engine)
        assert len(ids) == 4
        assert "silent for 0.2 s" in str(error)

    run(case())


def test_a_wait_longer_than_the_budget_is_not_begun():
    async def case():
        act = Act(status=429, headers={"retry-after": "3600"}, words="Come back in an hour")
        async with FakeVllm([act]) as server, engine_over(server) as engine:
            with pytest.raises(EngineBusy, match="429"):
                await read(engine)
            assert len(server.requests) == 1

    run(case())


def test_a_servers_words_are_shortened_and_carry_no_key():
    async def case():
        act = Act(status=400, words="bad header Authorization: Bearer abc123, " + "x" * 5000)
        async with FakeVllm([act]) as server, engine_over(server) as engine:
            with pytest.raises(EngineError, match="header") as shown:
                await read(engine)
        assert len(str(shown.value)) < 500
        assert "abc123" not in str(shown.value)

    run(case())


@pytest.mark.parametrize("place", [0, 3])
def test_closing_the_reply_hangs_up_at_once(place: int):
    async def case():
        async with FakeVllm([Act(stall_after=place)]) as server, engine_over(server) as engine:
            reply = engine.generate(PROMPT, SAMPLING)
            waiting = asyncio.ensure_future(exhaust(reply))
            await server.stalled.wait()
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            async with asyncio.timeout(1):
                await server.gone.wait()
            await server.until_running(0)
            assert engine.client.fleet.servers[0].load == 0

    run(case())


def test_leaving_off_in_the_middle_hangs_up_at_once():
    async def case():
        async with FakeVllm([Act(stall_after=3)]) as server, engine_over(server) as engine:
            async with aclosing(engine.generate(PROMPT, SAMPLING)) as reply:
                await anext(reply)
                await server.stalled.wait()
            async with asyncio.timeout(1):
                await server.gone.wait()

    run(case())


def test_closing_the_engine_fails_what_runs_and_what_comes():
    async def case():
        async with FakeVllm([Act(stall_after=3)]) as server, engine_over(server) as engine:
            running = asyncio.ensure_future(partial(engine))
            await server.stalled.wait()
            await engine.close()
            _, error = await running
            assert str(error) == "the engine is closed"
            with pytest.raises(EngineError, match="closed"):
                await read(engine)

    run(case())


def test_callers_do_not_notice_a_killed_server():
    async def case():
        async with FakeVllm() as one, FakeVllm() as other, engine_over(one, other) as engine:
            one.otherwise = other.otherwise = Act(stall_after=0)
            async with asyncio.TaskGroup() as group:
                load = [group.create_task(read(engine, rollout_id=f"train-{n}.0.1")) for n in range(40)]
                await one.until_running(20)
                await other.until_running(20)
                await one.kill()
                other.release()
                load += [group.create_task(read(engine, rollout_id=f"train-{n}.0.1")) for n in range(80)]
            assert Counter(len(task.result().ids) for task in load) == {12: 120}
            assert not engine.client.fleet.servers[0].up.is_set()

    run(case())


def test_failed_or_busy_server_passes_requests_to_another():
    async def case():
        one, other = FakeVllm([Act(status=500)]), FakeVllm([Act(), Act(status=429)])
        async with one, other, engine_over(one, other, policy=RetryPolicy(retries=0)) as engine:
            for _ in range(3):
                assert len((await read(engine)).ids) == 12
            assert engine.client.counts == {"retried_broken": 1, "retried_busy": 1}

    run(case())


def test_server_rests_after_repeated_failures_and_returns():
    async def case():
        policy = RetryPolicy(first_wait_s=0.0, recheck_s=0.0, failures=3)
        one, other = FakeVllm([Act(status=500)] * 3), FakeVllm()
        async with one, other, engine_over(one, other, policy=policy) as engine:
            address = engine.client.fleet.servers[0]
            one.healthy = False
            for _ in range(8):
                await read(engine)
            assert (len(one.requests), len(other.requests)) == (3, 8)
            one.asked.clear()
            await one.asked.wait()
            assert not address.up.is_set()
            one.healthy = True
            await address.up.wait()
            await read(engine)
            assert len(one.requests) == 4

    run(case())


def test_failures_with_successes_between_them_send_no_server_to_rest():
    async def case():
        acts = [Act(status=500), Act(), Act(status=500), Act(), Act(status=500), Act()]
        async with FakeVllm(acts) as server, engine_over(server, policy=RetryPolicy(first_wait_s=0.0, failures=2)) as engine:
            for _ in range(3):
                async with aclosing(engine.generate(PROMPT, SAMPLING)) as reply:
                    while (await anext(reply)).finish is None:  # and no further, as the gateway reads
                        pass
            assert len(server.requests) == 6
            assert engine.client.fleet.servers[0].up.is_set()

    run(case())


def test_server_that_comes_back_as_another_model_is_left_out():
    async def case():
        policy = RetryPolicy(first_wait_s=0.0, recheck_s=0.0, failures=1)
        async with FakeVllm() as one, FakeVllm() as other, engine_over(one, other, policy=policy) as engine:
            one.acts.append(Act(status=500))
            one.processed = False
            await read(engine)
            one.asked.clear()
            await one.asked.wait()
            one.asked.clear()
            await one.asked.wait()  # a second time: the first answer was not good enough
            assert not engine.client.fleet.servers[0].up.is_set()

    run(case())


def test_a_lone_server_that_restarts_is_used_again():
    async def case():
        policy = RetryPolicy(first_wait_s=0.0, recheck_s=0.0, retries=1, failures=1)
        async with FakeVllm() as server, engine_over(server, policy=policy) as engine:
            await read(engine)
            await server.kill()
            with pytest.raises(EngineError, match="Connect"):
                await read(engine)
            await server.start()
            await engine.client.fleet.servers[0].up.wait()
            assert len((await read(engine)).ids) == 12

    run(case())


def test_rollout_stays_with_server_and_others_go_to_least_loaded():
    async def case():
        fleet = Fleet(["a", "b", "c"], never)
        with fleet.route("r1") as first, fleet.route("r2") as second, fleet.route("") as third:
            assert {first.server.url, second.server.url, third.server.url} == {"a", "b", "c"}
            with fleet.route("r1") as again, fleet.route("r3") as new:
                assert again.server is first.server
                assert new.server is not first.server
        with fleet.route("r2", avoid={second.server}) as moved:
            assert moved.server is not second.server
        with fleet.route("r2") as home:
            assert home.server is moved.server

    run(case())


def test_only_broken_servers_count_as_failing():
    async def case():
        fleet = Fleet(["a"], never, failures=1)
        for kind in ("busy", "refused", "garbled"):
            with pytest.raises(UpstreamError), fleet.route(""):
                raise UpstreamError("no", kind=kind)
        assert fleet.servers[0].up.is_set()
        assert fleet.servers[0].load == 0

    run(case())


def test_waits_double_up_to_a_limit():
    waits = [[backoff_s(rounds, first_s=1.0) for _ in range(200)] for rounds in range(8)]
    for rounds, drawn in enumerate(waits):
        bound = min(2.0**rounds, LONGEST_WAIT_S)
        assert all(0.0 <= wait <= bound for wait in drawn)
        assert max(drawn) > bound / 2 > min(drawn)
    assert all(7.0 <= backoff_s(0, first_s=1.0, retry_after_s=7.0) <= 8.0 for _ in range(200))


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 0), ("", 0), ("7", 7), ("0.5", 0.5), ("-3", 0), ("nan", 0), ("soon", 0), ("inf", 0)]
)
def test_retry_after_in_seconds(header: str | None, seconds: float):
    assert retry_after_s(header) == seconds


def test_retry_after_as_a_date():
    assert 50 < retry_after_s(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0


async def exhaust(reply) -> None:
    async for _ in reply:
        pass


async def never(address: EngineServer) -> None:
    raise UpstreamError(f"{address.url} is not asked in these tests", kind="broken")
