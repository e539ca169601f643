"""The gateway in front of a vLLM server that fails: what is recorded, and what the agent hears."""

import asyncio
from collections.abc import Coroutine

import pytest
from openai import APIError
from upstream_cases import Act, FakeVllm, engine_over

from penstock.chat.renderer import Renderer
from penstock.engines.retry import RetryPolicy
from penstock.records import Sampling
from penstock.testing import workbench

BODY = {"model": "any", "messages": [{"role": "user", "content": "What is 6 times 7?"}], "max_tokens": 12, "seed": 5}


def run(case: Coroutine[None, None, None]) -> None:
    """Run with a deadline, so that a hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await case

    asyncio.run(bounded())


def test_busy_server_costs_agent_nothing_and_one_step_is_recorded(renderer: Renderer):
    async def case():
        async with FakeVllm([Act(status=429)] * 2) as server, engine_over(server) as engine, workbench(engine, renderer) as bench:
            session = await bench.rollout()
            await bench.openai(session).chat.completions.create(**BODY)
            [step] = (await bench.attempt(session)).steps
        assert (step.finish, len(step.completion_ids), set(step.versions)) == ("length", 12, {0})
        assert step.full_logprobs is None
        assert len(server.requests) == 3

    run(case())


def test_reply_cut_at_any_event_is_recorded_as_error(renderer: Renderer):
    async def case():
        server, policy = FakeVllm(), RetryPolicy(failures=100)
        async with server, engine_over(server, policy=policy) as engine, workbench(engine, renderer, serves=True) as bench:
            session = await bench.rollout()
            for cut in range(1, 12):
                server.acts.append(Act(cut_after=cut))
                with pytest.raises(APIError):
                    stream = await bench.openai(session).chat.completions.create(**BODY, stream=True)
                    async for _ in stream:
                        pass
            steps = (await bench.attempt(session)).steps
        assert [step.finish for step in steps] == ["error"] * 11
        assert all(len(step.completion_ids) <= cut for cut, step in enumerate(steps, 1))

    run(case())


def test_tempered_tokens_are_recorded_with_one_probability_that_is_known(renderer: Renderer):
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine, workbench(engine, renderer) as bench:
            session = await bench.rollout(sampling=Sampling(max_tokens=12, temperature=0.5))
            await bench.openai(session).chat.completions.create(**BODY, logprobs=True)
            [step] = (await bench.attempt(session)).steps
        assert len(step.logprobs) == len(step.completion_ids) == 12
        assert step.full_logprobs is None

    run(case())


GENERATE = {"prompt_uid": "prompt-xyz", "messages": BODY["messages"], "max_tokens": 12, "temperature": 0.8}


def test_generate_at_another_temperature_works_on_server_in_default_mode(renderer: Renderer):
    async def case():
        async with FakeVllm(processed=False) as server, engine_over(server) as engine, workbench(engine, renderer) as bench:
            session = await bench.rollout()
            answer = await bench.http(session.token).post("/generate", json=GENERATE)
            [step] = (await bench.attempt(session)).steps
            counted = bench.gateway.counts["behaviour_logprob_unknown"]
        reported = answer.json()
        assert (answer.status_code, len(reported["response_ids"]), reported["log_probs"], counted) == (200, 12, None, 1)
        assert (step.behaviour_known, step.full_logprobs) == (False, None)
        assert reported["full_log_probs"] == pytest.approx(step.logprobs)

    run(case())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_engine_errors_and_retry_times_reach_the_caller(renderer: Renderer, path: str):
    async def case():
        acts = [Act(status=400, words="seed must be smaller"), Act(status=429, headers={"retry-after": "7"}, words="queue full")]
        policy, body = RetryPolicy(retries=0), BODY if path.startswith("/v1") else GENERATE
        async with (
            FakeVllm(acts) as server,
            engine_over(server, policy=policy) as engine,
            workbench(engine, renderer) as bench,
        ):
            http = bench.http((await bench.rollout()).token)
            refused, busy = await http.post(path, json=body), await http.post(path, json=body)
        assert (refused.status_code, refused.headers.get("retry-after")) == (400, None) and "seed must be smaller" in refused.text
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "7") and "queue full" in busy.text

    run(case())


def test_agent_that_disconnects_frees_server_within_second(renderer: Renderer):
    async def case():
        server = FakeVllm([Act(stall_after=3)])
        async with server, engine_over(server) as engine, workbench(engine, renderer, serves=True) as bench:
            session = await bench.rollout()
            client, body = bench.http(session.token), {**BODY, "stream": True}
            async with client.stream("POST", f"{session.base_url}/chat/completions", json=body):
                await server.stalled.wait()
            async with asyncio.timeout(1):
                await server.gone.wait()

    run(case())
