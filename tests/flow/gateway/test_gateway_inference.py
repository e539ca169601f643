"""`/inference/v1/generate`, as training clients call it: token ids in; ids and log-probabilities out, recorded as one path."""

from contextlib import asynccontextmanager

from gateway_cases import renderer

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, workbench

PATH = "/inference/v1/generate"


@asynccontextmanager
async def gateway(script):
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), sessions=True) as bench:
        yield bench, await bench.rollout(), engine


async def test_ids_continue_from_ids_and_log_probabilities_are_recorded_ones():
    async with gateway(["It is 42.", "Yes."]) as (bench, session, engine):
        http, ids = bench.http(session.token), list(engine.tokenizer.encode("What is 6 times 7?"))
        params = {"max_tokens": 50, "temperature": 0.7, "logprobs": 1, "skip_special_tokens": False}
        body = {"model": "any", "token_ids": ids, "sampling_params": params, "request_id": "r-1"}
        first = (await http.post(PATH, json=body)).json()
        [choice] = first["choices"]
        more = ids + choice["token_ids"] + list(engine.tokenizer.encode(" Sure?"))
        await http.post(PATH, json=body | {"token_ids": more})
        attempt = await bench.attempt(session)
        assert [node.parent for node in attempt.nodes] == [None, 0]
        assert tuple(choice["token_ids"]) == attempt.steps[0].completion_ids and first["request_id"] == "r-1"
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == list(attempt.steps[0].logprobs)
        assert prompts(attempt)[1] == tuple(more) and attempt.steps[0].sampling.temperature == 0.7
        assert not bench.gateway.counts


async def test_sessions_of_a_training_client_are_rollouts():
    async with gateway(["One.", "Two."]) as (bench, _, _):
        http = bench.http(bench.gateway.tokens.session_key)
        for name in ("a", "b"):
            body = {"token_ids": [5, 6], "sampling_params": {}}
            assert (await http.post(PATH, json=body, headers={"X-Session-ID": name})).status_code == 200
            assert len((await bench.pool.rollout(f"session-{name}")).steps) == 1


async def test_bad_requests_are_named():
    async with gateway([]) as (bench, session, _):
        http = bench.http(session.token)
        for body, param in [
            ({}, "token_ids"),
            ({"token_ids": []}, "token_ids"),
            ({"token_ids": [10**6]}, "token_ids"),
            ({"token_ids": [1], "stream": True}, "stream"),
            ({"token_ids": [1], "sampling_params": {"n": 2}}, "n"),
            ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ]:
            answer = await http.post(PATH, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
