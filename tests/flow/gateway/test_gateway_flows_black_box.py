"""Black-box agents: a trajectory's base URL in every shape, what is registered of it, and its one end."""

import pytest
from gateway_cases import TOOL, USER, events_of
from gateway_flow_cases import gateway, generate, open_gateway, opened
from openai import APIStatusError, AsyncOpenAI

from penstock.pool import POOLS
from penstock.records import End

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


async def begun(http):
    """A new trajectory: its uid, and its base URL as it was given."""
    answer = (await http.post("/init_trajectory")).json()
    return answer["trajectory_uid"], answer["base_url"]


def agent(bench, base_url):
    """A plain client that knows a base URL, and sends whatever key."""
    return AsyncOpenAI(api_key="not-needed", base_url=base_url, http_client=bench.http(), max_retries=0)


async def ask(client, *messages, **fields):
    return await client.chat.completions.create(model="default", messages=list(messages) or [USER], **fields)


def whole_way(bench, http):
    """A flow's three steps around an agent, and the recorded attempt."""

    async def go(base_url, uid, work):
        register = await http.post(f"{base_url}/register_trajectory", json={"channel": "train", "metadata": {"row": 1}})
        assert (register.status_code, register.json()) == (200, {"status": "ok"})
        await work(agent(bench, base_url))
        complete = await http.post(f"{base_url}/complete_trajectory", json={"reward": 0.5})
        assert (complete.status_code, complete.json()) == (200, {"status": "ok"})
        return await bench.pool.rollout(uid)

    return go


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("shape", ["", "/v1", "/v1/v1"])
async def test_plain_client_is_recorded_under_every_base_url(shape, is_open):
    async with opened(["Hi.", "So."], is_open=is_open, serves=True) as (bench, _):
        http = bench.http("" if is_open else bench.gateway.tokens.control)
        uid, base_url = await begun(http)
        base_url = base_url.removesuffix("/v1") + shape

        async def work(client):
            assert (await ask(client)).choices[0].message.content == "Hi."
            chunks = [chunk async for chunk in await ask(client, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "So."
            assert [model.id async for model in client.models.list()] == ["scripted"]

        attempt = await whole_way(bench, http)(base_url, uid, work)
        assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 0.5, 2)
        assert {step.transcript for step in attempt.steps} == {"main"}


async def test_tool_calls_are_parsed_for_agents():
    async with opened([CALL, "It is 42."], is_open=True, serves=True) as (bench, engine):
        client = agent(bench, (await begun(bench.http()))[1])
        first = (await ask(client, USER, tools=[TOOL])).choices[0]
        assert (first.finish_reason, first.message.tool_calls[0].function.name) == ("tool_calls", "multiply")
        result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "42"}
        second = await ask(client, USER, first.message.model_dump(exclude_none=True), result, tools=[TOOL])
        assert second.choices[0].message.content == "It is 42."
        assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]


async def test_agent_may_read_tool_calls_from_the_content():
    """As Claw-R1's own GSM8K agent does: it looks for the markup in the content, and sends back the content alone."""

    async with opened([f"So. {CALL}", "It is 42."], is_open=True, serves=True) as (bench, engine):
        uid, base_url = await begun(bench.http())
        client = agent(bench, base_url)
        first = (await ask(client, USER, tools=[TOOL])).choices[0].message
        assert first.content == f"So. {CALL}" and first.tool_calls[0].function.name == "multiply"
        turn = [{"role": "assistant", "content": first.content}, {"role": "tool", "tool_call_id": "call_0", "content": "42"}]
        second = await ask(client, USER, *turn, tools=[TOOL])
        assert second.choices[0].message.content == "It is 42."
        assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
        attempt = await bench.pool.rollout(uid)
        assert not [node.reason for node in attempt.nodes if node.reason]
        assert attempt.steps[0].message["content"] == "So." and len(attempt.steps[0].message["tool_calls"]) == 1


async def test_tool_call_text_is_streamed_under_a_base_url_only():
    async with opened([f"So. {CALL}"] * 2, is_open=True, serves=True) as (bench, _):
        client = agent(bench, (await begun(bench.http()))[1])
        chunks = [chunk async for chunk in await ask(client, tools=[TOOL], stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == f"So. {CALL}"
        session = await bench.rollout()
        plain = {"model": "m", "messages": [USER], "tools": [TOOL]}
        answer = (await bench.http(session.token).post("/v1/chat/completions", json=plain)).json()
        assert answer["choices"][0]["message"]["content"] == "So."


async def test_uid_from_init_opens_only_its_model_routes():
    async with opened(["Hi."]) as (bench, _):
        uid, base_url = await begun(bench.http(bench.gateway.tokens.control))
        path = base_url.split("/", 3)[3]
        assert len(uid) == 32 and set(uid) <= set("0123456789abcdef") and path == f"{uid}/1/v1"
        body = {"messages": [USER]}
        assert (await bench.http().post(f"/{path}/chat/completions", json=body)).status_code == 200
        assert (await bench.http(uid).post("/v1/chat/completions", json=body)).status_code == 401
        guess = uid[:-1] + ("0" if uid[-1] != "0" else "1")
        assert (await bench.http().post(f"/{guess}/1/v1/chat/completions", json=body)).status_code == 401
        for verb in ("register_trajectory", "complete_trajectory"):
            assert (await bench.http().post(f"/{path}/{verb}")).status_code == 401
        assert (await bench.http(uid).post("/submit_steps", json={"steps": []})).status_code == 401


async def test_flow_token_gives_the_running_rollout_its_base_url():
    async with gateway(["Hi."]) as (bench, session, _):
        flow = bench.http(session.flow_token)
        uid, base_url = await begun(flow)
        assert uid == session.rollout_id
        path = "/" + base_url.split("/", 3)[3]
        assert (await flow.post(f"{path}/register_trajectory", json={"channel": "train", "metadata": {"a": 1}})).status_code == 200
        assert (await bench.http().post(f"{path}/chat/completions", json={"messages": [USER]})).status_code == 200
        assert (await flow.post(f"{path}/complete_trajectory", json={"reward": 1.0})).status_code == 200
        assert (await bench.http().post(f"{path}/chat/completions", json={"messages": [USER]})).status_code == 410
        attempt = await bench.attempt(session)
        assert (attempt.end, attempt.grades[0].reward, attempt.grades[0].step) == (None, 1.0, None)
        assert attempt.steps[0].transcript == "main"


async def test_registration_survives_a_restart(tmp_path):
    pool = POOLS.load("sqlite")(tmp_path)
    async with opened(is_open=True, pool=pool) as (bench, _):
        said = {"channel": "val", "metadata": {"row": 7, "policy_version": 5}, "sampling": {"temperature": 0.0}}
        assert (await bench.http().post("/t1/p9/v1/register_trajectory", json=said)).status_code == 200
        assert bench.gateway.counts["ignored:policy_version"] == 1
    async with opened(["Hi."], is_open=True, pool=pool) as (bench, engine):
        assert (await bench.http().post("/t1/p9/v1/chat/completions", json={"messages": [USER]})).status_code == 200
        assert engine.samplings[0].temperature == 0.0
        assert (await bench.http().post("/t1/p9/v1/complete_trajectory", json={"reward": 1.0, "channel": "train"})).json()
    attempt, task = await pool.rollout("t1"), await pool.task("t1")
    assert (attempt.ref.channel, attempt.end, attempt.reward) == ("val", End.COMPLETED, 1.0)
    assert (task.metadata["row"], task.metadata["prompt_uid"]) == (7, "p9")
    await pool.close()


async def test_sampling_may_be_registered_in_the_metadata():
    async with open_gateway(["Hi."]) as (http, _, engine):
        said = {"metadata": {"sampling": {"temperature": 0.5, "top_p": 0.9}}}
        await http.post("/t1/1/v1/register_trajectory", json=said)
        await generate(http)
        assert (engine.samplings[0].temperature, engine.samplings[0].top_p) == (0.5, 0.9)


async def test_sampling_changes_only_before_the_first_call():
    async with gateway(["Hi."]) as (bench, session, engine):
        flow, path = bench.http(session.flow_token), f"/{session.rollout_id}/1/register_trajectory"
        assert (await flow.post(path, json={"sampling": {"temperature": 0.5}})).status_code == 200
        await generate(bench.http(session.token), session.rollout_id)
        assert engine.samplings[0].temperature == 0.5
        assert (await flow.post(path, json={"sampling": {"temperature": 0.5}})).status_code == 200
        assert (await flow.post(path, json={"sampling": {"temperature": 0.9}})).status_code == 409
        assert (await flow.post(path, json={"channel": "val"})).status_code == 409


async def test_registering_the_same_again_is_fine_and_otherwise_a_conflict():
    async with open_gateway() as (http, _, _):
        path, said = "/t1/p1/v1/register_trajectory", {"channel": "val", "metadata": {"row": 1}}
        statuses = [
            (await http.post(where, json=body)).status_code
            for where, body in [
                (path, said),
                (path, said),
                (path, {}),
                (path, said | {"channel": "train"}),
                (path, {"metadata": {"row": 2}}),
                (path, {"sampling": {"temperature": 1.0}}),
                (path.replace("p1", "p2"), said),
            ]
        ]
        assert statuses == [200, 200, 200, 409, 409, 409, 409]


async def test_late_registration_is_a_conflict():
    async with open_gateway(["Hi."]) as (http, _, _):
        await http.post("/t1/p1/v1/chat/completions", json={"messages": [USER]})
        assert (await http.post("/t1/p1/v1/register_trajectory")).status_code == 200
        late = await http.post("/t1/p1/v1/register_trajectory", json={"channel": "val"})
        assert (late.status_code, late.json()["code"]) == (409, "registered_otherwise")


@pytest.mark.parametrize(
    "path", ["/nobody/1/v1/complete_trajectory", "/nobody/1/complete_trajectory", "/complete_trajectory/nobody"]
)
async def test_completing_what_nobody_began_is_a_404(path):
    async with open_gateway() as (http, bench, _):
        assert (await http.post(path)).status_code == 404
        assert await bench.pool.channels() == []


async def test_complete_trajectory_stays_as_it_is():
    async with opened(["Hi."], is_open=True, serves=True) as (bench, _):
        http = bench.http()
        uid, base_url = await begun(http)
        await ask(agent(bench, base_url))
        assert (await http.post(f"/complete_trajectory/{uid}", json={"reward": 1.0})).status_code == 200
        with pytest.raises(APIStatusError) as refused:
            await ask(agent(bench, base_url))
        assert refused.value.status_code == 410
        for path in (f"{base_url}/complete_trajectory", f"{base_url}/register_trajectory"):
            assert (await http.post(path, json={})).status_code == 410
        attempt = await bench.pool.rollout(uid)
        assert (len(attempt.steps), attempt.reward) == (1, 1.0)


async def test_completing_without_a_body_gives_no_reward():
    async with open_gateway(["Hi."]) as (http, bench, _):
        await generate(http)
        assert (await http.post("/complete_trajectory/t1")).json() == {"status": "ok"}
        attempt = await bench.pool.rollout("t1")
        assert (attempt.end, attempt.grades) == (End.COMPLETED, ())


async def test_retry_of_an_sdk_makes_no_second_step():
    async with opened(["Hi."], is_open=True, serves=True) as (bench, engine):
        uid, base_url = await begun(bench.http())
        client = agent(bench, base_url)
        retried = {"x-stainless-retry-count": "1"}
        first = await ask(client)
        again = await ask(client, extra_headers=retried)
        assert (again.id, len(engine.prompts)) == (first.id, 1)
        assert len((await bench.pool.rollout(uid)).steps) == 1


async def test_unsupported_options_are_refused():
    async with open_gateway(["Hi."]) as (http, _, engine):
        fields = {"stop": ["END"], "seed": 7, "top_k": 5, "min_p": 0.1}
        path = "/t1/1/v1/chat/completions"
        assert (await http.post(path, json={"messages": [USER], **fields})).status_code == 200
        asked = engine.samplings[0]
        assert (asked.stop, asked.seed, asked.top_k, asked.min_p) == (("END",), 7, 5, 0.1)
        for name, value in {"logit_bias": {"1": 1}, "response_format": {"type": "xml"}}.items():
            refused = await http.post(path, json={"messages": [USER], name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_errors_under_a_base_url_have_the_shape_of_openai():
    async with open_gateway() as (http, _, _):
        response = await http.post("/t1/1/v1/chat/completions", json={"messages": [{"content": "no role"}]})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
        unknown = await http.post("/t1/1/v1/embeddings", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_such_route")


async def test_every_dialect_is_served_under_a_base_url():
    async with open_gateway(["a", "b", "c", "d", "e"]) as (http, bench, _):
        bodies = {
            "chat/completions": {"messages": [USER], "stream": True},
            "completions": {"prompt": "Once"},
            "messages": {"messages": [USER], "max_tokens": 5},
            "responses": {"input": "Hi"},
            "generate": {"messages": [USER]},
        }
        for path, body in bodies.items():
            response = await http.post(f"/t1/1/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            if body.get("stream"):
                assert events_of(response)[-1] == "[DONE]"
        assert len((await bench.pool.rollout("t1")).steps) == len(bodies)


async def test_recorded_version_is_the_engines():
    async with open_gateway(["Hi."], engine={"version": 4}) as (http, bench, _):
        await http.post("/t1/1/v1/register_trajectory", json={"metadata": {"policy_version": 99}})
        await generate(http)
        assert set((await bench.pool.rollout("t1")).steps[0].versions) == {4}


async def test_gateway_says_that_it_is_ready_until_it_stops():
    async with open_gateway() as (http, bench, _):
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        assert (await http.get("/docs")).status_code == 200
        async with bench.gateway:
            pass
        answer = await http.get("/ready")
        assert answer.status_code == 503 and answer.json()["detail"]
