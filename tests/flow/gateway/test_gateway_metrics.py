"""`/metrics`: what it says is what was done."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, chat, messages_of, renderer
from prometheus_text import read

from penstock.gateway.observability import BOUNDS_S, Histogram
from penstock.records import End
from penstock.testing import ScriptedEngine, ScriptedReply, workbench


@asynccontextmanager
async def gateway(script=lambda prompt: "Hi.", *, serves=False):
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), serves=serves) as bench:
        session = await bench.rollout()
        yield bench, session, bench.http(session.token), engine


async def metrics(bench):
    response = await bench.http(bench.gateway.tokens.admin).get("/metrics")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return Found(read(response.text))


class Found(dict):
    def value(self, family, /, **labels):
        """0 where there is no such series, as Prometheus' queries have it."""
        return self[family].values.get(tuple(labels.items()), 0) if family in self else 0


async def test_calls_are_counted_by_dialect_and_status():
    async with gateway() as (bench, _, http, _):
        for stream in (False, True, False):
            assert (await chat(http, USER, stream=stream)).status_code == 200
        assert (await chat(http, USER, temperature="hot")).status_code == 400
        body = {"model": "any", "max_tokens": 9, "messages": [USER]}
        assert (await http.post("/v1/messages", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json={"model": "any", "prompt": "Say"})).status_code == 200
        assert (await http.post("/v1/responses", json={"model": "any", "input": "Say"})).status_code == 200
        found = await metrics(bench)
        reported = {
            (dict(key)["dialect"], dict(key)["status"]): count for key, count in found["penstock_calls_total"].values.items()
        }
        expected = {
            ("chat", "200"): 3,
            ("chat", "400"): 1,
            ("messages", "200"): 1,
            ("completions", "200"): 1,
            ("responses", "200"): 1,
        }
        assert reported == expected
        assert found.value("penstock_call_seconds_count", dialect="chat") == 4
        assert found.value("penstock_first_token_seconds_count") == 6


async def test_tokens_and_steps_are_those_that_were_recorded():
    async with gateway() as (bench, session, http, engine):
        await chat(http, USER, n=3)
        await chat(http, {"role": "user", "content": "And now?"})
        found, attempt = await metrics(bench), await bench.attempt(session)
        sampled = sum(len(step.completion_ids) for step in attempt.steps)
        assert found.value("penstock_steps_total", finish="stop") == len(attempt.steps) == 4
        assert found.value("penstock_sampled_tokens_total") == found.value("penstock_exact_tokens_total") == sampled > 0
        assert found.value("penstock_prompt_tokens_total") == len(engine.prompts[0]) + len(engine.prompts[-1])
        assert (found.value("penstock_open_rollouts"), found.value("penstock_gateway_info", model="scripted")) == (1, 1)


async def test_unrecorded_tokens_are_not_exact():
    replies = iter([ScriptedReply("Hello there", fail_after=3), "fine"])
    async with gateway(lambda prompt: next(replies)) as (bench, session, http, _):
        assert (await chat(http, USER)).status_code == 502
        await bench.pool.end(session.rollout_id, End.COMPLETED)
        assert (await chat(http, USER)).status_code == 409
        found = await metrics(bench)
        assert found.value("penstock_steps_total", finish="error") == 1
        assert found.value("penstock_exact_tokens_total") == 3
        assert found.value("penstock_sampled_tokens_total") > 3


async def test_refusals_are_counted_by_code_wherever_they_are_made():
    async with gateway() as (bench, _, http, _):
        await chat(http, USER, temperature="hot")
        await chat(bench.http("sk-nobody"), USER)
        await bench.http().get("/nowhere")
        await bench.http(bench.gateway.tokens.control).post("/rollouts/nobody/end", json={})
        codes = {dict(key)["code"]: count for key, count in (await metrics(bench))["penstock_refused_total"].values.items()}
        assert codes == {"invalid_value": 1, "invalid_api_key": 1, "no_such_route": 1, "unknown_rollout": 1}


async def test_a_retry_is_counted_as_replayed_and_samples_nothing():
    async with gateway() as (bench, _, http, _):
        await chat(http, USER)
        before = await metrics(bench)
        await chat(http, USER, headers={"x-stainless-retry-count": "1"})
        after = await metrics(bench)
        assert after.value("penstock_repeated_calls_total", how="replayed") == 1
        assert after.value("penstock_calls_total", dialect="chat", status="200") == 2
        for name in ("penstock_sampled_tokens_total", "penstock_prompt_tokens_total", "penstock_exact_tokens_total"):
            assert after.value(name) == before.value(name)


async def test_running_and_joined_calls_are_counted():
    async with gateway(lambda prompt: ScriptedReply("Hello", stall_after=2), serves=True) as (bench, _, http, engine):
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(chat(http, USER))
            await engine.stalled.wait()
            group.create_task(chat(http, USER, headers={"x-stainless-retry-count": "1"}))
            while (found := await metrics(bench)).value("penstock_repeated_calls_total", how="joined") < 1:
                pass
            assert found.value("penstock_calls_in_flight") == 2
            engine.release()
        found = await metrics(bench)
        assert found.value("penstock_calls_in_flight") == 0
        assert found.value("penstock_calls_total", dialect="chat", status="200") == 2
        assert found.value("penstock_steps_total", finish="stop") == 1


async def test_breaks_are_those_of_the_pool():
    async with gateway() as (bench, _, http, _):
        talk = [USER, messages_of(await chat(http, USER))[0]]
        await chat(http, *talk, USER)
        for _ in range(2):  # the same edited history twice is one break
            await chat(http, USER, {"role": "assistant", "content": "never said"}, USER)
        reported = {dict(key)["reason"]: count for key, count in (await metrics(bench))["penstock_breaks_total"].values.items()}
        assert reported == (await bench.pool.stats()).breaks != {}


@pytest.mark.parametrize("name", ["frobnicate", 'quote"d', "back\\slash", "new\nline", "é🙂", "x" * 5000])
async def test_ignored_field_is_counted_by_its_name_whatever_it_is(name):
    async with gateway() as (bench, _, http, _):
        await chat(http, USER, **{name: 1})
        reported = {dict(key)["name"]: count for key, count in (await metrics(bench))["penstock_ignored_total"].values.items()}
        assert list(reported.values()) == [1]
        assert name.startswith(next(iter(reported))) and len(next(iter(reported))) <= 100


async def test_names_that_callers_make_up_do_not_grow_without_end():
    async with gateway() as (bench, _, http, _):
        for part in range(4):
            await chat(http, USER, **{f"made_up_{part}_{number}": 1 for number in range(300)})
        found = await metrics(bench)
        assert len(found["penstock_ignored_total"].values) <= 500
        total = sum(found["penstock_ignored_total"].values.values()) + found.value("penstock_notices_total", name="other")
        assert total == 1200


async def test_the_policy_version_is_the_engines():
    async with gateway() as (bench, _, _, engine):
        await engine.swap(7, lambda: None)
        assert (await metrics(bench)).value("penstock_policy_version") == 7


async def test_gateway_that_has_done_nothing_reports_it_in_good_form():
    async with gateway() as (bench, _, _, _):
        found = await metrics(bench)
        assert found.value("penstock_sampled_tokens_total") == 0
        assert "penstock_calls_total" not in found


def test_a_time_on_a_bound_is_below_it():
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[1], 1e9):
        histogram.add(seconds)
    assert histogram.counts[:2] + histogram.counts[-1:] == [2, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "x 1\n",
        "# HELP x y\n# TYPE x counter\nx 1\n",
        "# HELP x y\n# TYPE x gauge\nx 1\nx 2\n",
        '# HELP x y\n# TYPE x gauge\nx{a="\\q"} 1\n',
        "x 1",
    ],
)
def test_the_reader_of_these_tests_is_strict(text):
    with pytest.raises(AssertionError):
        read(text)


async def test_every_name_of_a_notice_has_one_family():
    async with gateway() as (bench, _, http, _):
        await chat(http, USER, max_tokens=5000, frobnicate=1)
        found = await metrics(bench)
        assert found.value("penstock_notices_total", name="capped:max_tokens") == 1
        assert found.value("penstock_ignored_total", name="frobnicate") == 1
        assert Counter(bench.gateway.counts) == {"capped:max_tokens": 1, "ignored:frobnicate": 1}
