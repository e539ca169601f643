import hmac
from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, chat, renderer

from penstock.errors import ConfigError, RequestError
from penstock.gateway import Gateway
from penstock.gateway.auth import Access, GatewayTokens
from penstock.http.listen import LOOPBACK, known_names
from penstock.records import End
from penstock.testing import ScriptedEngine, memory_pool, workbench


@asynccontextmanager
async def gateway(script=(), *, is_open=False):
    async with workbench(ScriptedEngine(script, renderer().tokenizer), renderer(), is_open=is_open) as bench:
        yield bench, await bench.rollout()


def routes(bench):
    """Every route of the app with its method; a new one is in this list on its own."""
    for route in bench.gateway.app.listed:
        path = route.path.replace("{rollout_id}", "train-0.0.1").replace("{trajectory}", "train-0.0.1")
        yield route.method, path.replace("{prompt}", "1").replace("{model}", "scripted"), route.access


async def held_by_whom(bench, session):
    """What a caller may hold, by name."""
    foreign = GatewayTokens(b"another secret of another run")
    ended = await bench.rollout("train-9")
    await bench.pool.end(ended.rollout_id, End.COMPLETED)
    bench.gateway.close(ended.rollout_id)
    return {
        "none": "",
        "garbage": "sk-1234",
        "not ascii": "mk-é.ü",
        "foreign model": foreign.model(session.rollout_id),
        "foreign flow": foreign.flow(session.rollout_id),
        "foreign control": foreign.control,
        "foreign admin": foreign.admin,
        "signature of another rollout": session.token.replace("train-0.0.1", "train-0.1.1"),
        "signature of another kind": session.token.replace("mk-", "fk-"),
        "trajectory": bench.gateway.tokens.new_signed_id(),
        "expired": ended.token,
        "expired flow": ended.flow_token,
        "model": session.token,
        "flow": session.flow_token,
        "control": bench.gateway.tokens.control,
        "admin": bench.gateway.tokens.admin,
    }


def expected_status(access, name, path):
    """What a route answers to what it does not need; None where it is served."""
    if access is Access.NONE or name == access.value or (access, name) == (Access.FLOW, "control"):
        return None
    if name == "expired":
        return 409 if access is Access.MODEL else 403
    if name == "expired flow" and access is Access.FLOW:
        return 403 if "train-0.0.1" in path else None  # of the right kind, but another rollout's
    return 403 if name in ("model", "flow", "control", "admin", "expired flow") else 401


async def test_every_route_is_closed_to_all_but_token_it_needs():
    async with gateway() as (bench, session):
        held, checked = await held_by_whom(bench, session), 0
        for method, path, access in routes(bench):
            for name, token in held.items():
                headers = {"authorization": f"Bearer {token}".encode()} if token else {}
                status = (await bench.http().request(method, path, headers=headers, content=b"{}")).status_code
                expected = expected_status(access, name, path)
                if expected == 409 and method == "GET":
                    expected = None  # what the model is called is no secret to whoever once held a token
                assert status == expected or (expected is None and status not in (401, 403)), (method, path, name, status)
                checked += 1
        assert checked == len(held) * len(bench.gateway.app.listed)


async def test_an_open_gateway_asks_for_the_control_token_only():
    async with gateway(is_open=True) as (bench, session):
        held = await held_by_whom(bench, session)
        for method, path, access in routes(bench):
            for name, token in held.items():
                headers = {"authorization": f"Bearer {token}".encode()} if token else {}
                status = (await bench.http().request(method, path, headers=headers, content=b"{}")).status_code
                if access is Access.CONTROL:
                    kind = 403 if name in ("model", "flow", "admin", "expired", "expired flow") else 401
                    assert name == "control" or status == kind, (method, path, name, status)
                elif not (access is Access.FLOW and name == "expired flow"):
                    assert status not in (401, 403), (method, path, name, status)


async def test_flow_token_opens_only_its_own_open_rollout():
    async with gateway() as (bench, session):
        ended = await bench.rollout("train-9")
        await bench.pool.end(ended.rollout_id, End.COMPLETED)
        bench.gateway.close(ended.rollout_id)
        http, own, other = bench.http(ended.flow_token), ended.rollout_id, session.rollout_id
        for verb in ("complete_trajectory", "register_trajectory"):
            assert (await http.post(f"/{other}/1/v1/{verb}")).status_code == 403
            assert (await http.post(f"/{own}/1/v1/{verb}")).status_code == 409
        assert (await http.post("/init_trajectory")).status_code == 409
        step = {"prompt_ids": [1], "response_ids": [2]}
        assert (await http.post("/submit_steps", json={"steps": [step | {"trajectory_uid": other}]})).status_code == 403
        assert (await http.post("/submit_steps", json={"steps": [step]})).status_code == 409
        assert (await bench.attempt(session)).end is None


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "gateway.example"])
def test_an_open_gateway_that_others_could_reach_is_not_made(host):
    with pytest.raises(ConfigError, match="machine"):
        Gateway(ScriptedEngine([], renderer().tokenizer), renderer(), memory_pool(), secret=b"s" * 16, host=host, is_open=True)


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("null", 403), ("http://127.0.0.1:9", 200), ("http://localhost", 200)]
)
async def test_an_open_gateway_serves_no_page_of_another_site(origin, status):
    async with gateway(is_open=True) as (bench, _):
        assert (await bench.http().get("/api/stats", headers={"origin": origin})).status_code == status


async def test_open_gateway_still_knows_tokens_and_refuses_call_of_nobody():
    async with gateway(["Hi.", "Ho."], is_open=True) as (bench, session):
        assert (await chat(bench.http(session.token), USER)).status_code == 200
        assert len((await bench.attempt(session)).steps) == 1
        refused = await chat(bench.http("sk-any"), USER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_caller")
        named = await chat(bench.http(), USER, headers={"x-rollout-id": "mine"})
        assert named.status_code == 200 and len((await bench.pool.rollout("mine")).steps) == 1


async def test_token_in_path_opens_same_routes_as_one_in_header():
    async with gateway() as (bench, session):
        held = await held_by_whom(bench, session)
        for method, path, access in routes(bench):
            for name in ("model", "flow", "control", "admin", "foreign model", "expired"):
                status = (await bench.http().request(method, f"/{held[name]}{path}", content=b"{}")).status_code
                if access is not Access.MODEL:
                    assert status in (404, 405), (path, name, status)
                elif name == "model":
                    missing = "{response}" in path  # nothing was answered yet: the route is there, the response is not
                    assert status == 404 if missing else status not in (401, 403, 404, 405), (path, name, status)
                elif name == "expired":
                    assert status == (200 if method == "GET" and "{response}" not in path else 409), (path, name, status)
                else:
                    assert status == (401 if name == "foreign model" else 403), (path, name, status)


@pytest.mark.parametrize("before", ["", "/v1", "/v1/v1", "/{token}", "/{token}/v1", "/{token}/v1/v1", "/{token}/planner/v1"])
async def test_base_urls_may_hold_token_and_transcript(before):
    async with gateway(["Hi."]) as (bench, session):
        headers = {} if "token" in before else {"authorization": f"Bearer {session.token}"}
        path = before.format(token=session.token) + "/chat/completions"
        response = await bench.http().post(path, json={"messages": [USER]}, headers=headers)
        assert response.status_code == 200
        assert (await bench.attempt(session)).steps[0].transcript == ("planner" if "planner" in before else "main")


async def test_foreign_key_yields_to_the_token_in_the_path():
    async with gateway() as (bench, session):
        http = bench.http("sk-some-key-that-the-client-insists-on")
        assert (await http.get(f"/{session.token}/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:80", 200), ("LOCALHOST", 200), ("[::1]:9", 200), ("evil.example", 421), ("[", 421)]
)
async def test_request_under_name_that_is_not_ours_is_rejected(host, status):
    async with gateway() as (bench, _):
        assert (await bench.http().get("/health", headers={"host": host})).status_code == status


@pytest.mark.parametrize(("host", "names"), [("127.0.0.2", (LOOPBACK | {"127.0.0.2"})), ("0.0.0.0", None), ("10.0.0.1", None)])
def test_every_address_of_this_machine_has_known_names(host, names):
    assert known_names(host, ()) == names


async def test_there_are_routes_of_every_kind():
    async with gateway() as (bench, _):
        assert {access for *_, access in routes(bench)} == set(Access)


async def test_an_anthropic_style_key_header_is_a_token_too():
    async with gateway() as (bench, session):
        response = await bench.http().get("/v1/models", headers={"x-api-key": session.token})
        assert response.status_code == 200


@pytest.mark.parametrize("scheme", ["Basic", "", "bearer"])
async def test_only_the_bearer_scheme_carries_a_token(scheme):
    async with gateway() as (bench, session):
        response = await bench.http().get("/v1/models", headers={"authorization": f"{scheme} {session.token}"})
        assert response.status_code == (200 if scheme == "bearer" else 401)


async def test_an_unknown_path_is_a_404_in_the_openai_shape():
    async with gateway() as (bench, session):
        response = await bench.http(session.token).post("/v1/embeddings")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_route")
        assert (await bench.http(session.token).get("/v1/chat/completions")).status_code == 405


async def test_token_for_an_unknown_rollout_is_a_404():
    async with gateway() as (bench, _):
        response = await chat(bench.http(bench.gateway.tokens.model("train-7.0.1")), USER)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_rollout")


def test_a_token_names_its_rollout_whatever_the_id_looks_like():
    tokens = GatewayTokens(b"0123456789abcdef")
    for rollout_id in ("train-0.0.1", "", "a.b.c.", "mk-x", "é", "." * 100):
        headers = [(b"authorization", f"Bearer {tokens.model(rollout_id)}".encode("latin-1"))]
        assert tokens.authorize(Access.MODEL, headers) == rollout_id
        with pytest.raises(RequestError):
            tokens.authorize(Access.CONTROL, headers)


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))  # no seam shows timing
    with pytest.raises(RequestError):
        GatewayTokens(b"0123456789abcdef").authorize(Access.MODEL, [(b"x-api-key", b"guess")])
    assert compared == [b"guess"] * 4


async def test_a_runner_elsewhere_opens_grades_and_ends_a_rollout():
    async with gateway(["42."]) as (bench, session):
        control = bench.http(bench.gateway.tokens.control)
        opened = (await control.post("/rollouts", json={"rollout_id": session.rollout_id})).json()
        urls = {"base_url": session.base_url, "anthropic_base_url": session.base_url.removesuffix("/v1")}
        assert opened == {"rollout_id": "train-0.0.1", "token": session.token, **urls}
        await chat(bench.http(opened["token"]), USER)
        graded = await control.post("/rollouts/train-0.0.1/grade", json={"reward": 1})
        assert graded.json() == {"rollout_id": "train-0.0.1", "reward": 1.0}
        ended = (await control.post("/rollouts/train-0.0.1/end", json={"end": "completed"})).json()
        assert ended == {"rollout_id": "train-0.0.1", "end": "completed", "first": True}
        again = (await control.post("/rollouts/train-0.0.1/end", json={"end": "timeout"})).json()
        assert (again["end"], again["first"]) == ("completed", False)
        attempt = await bench.attempt(session)
        assert (attempt.end, attempt.reward) == (End.COMPLETED, 1.0)
        assert (await chat(bench.http(opened["token"]), USER)).status_code == 409
        assert (await control.post("/rollouts", json={"rollout_id": session.rollout_id})).status_code == 409
        assert (await control.post("/rollouts/train-0.0.1/grade", json={"reward": 0})).status_code == 409


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rollouts", b"[]"),
        ("/rollouts", b"not json"),
        ("/rollouts", b'{"rollout_id": 1}'),
        ("/rollouts", b'{"rollout_id": "a/b"}'),
        ("/rollouts", b'{"group_id": ""}'),
        ("/rollouts", b'{"sampling": {"temperature": -1}}'),
        ("/rollouts", b'{"sampling": {"top_p": 0}}'),
        ("/rollouts", b'{"sampling": {"heat": 1}}'),
        ("/rollouts/train-0.0.1/grade", b"{}"),
        ("/rollouts/train-0.0.1/grade", b'{"reward": NaN}'),
        ("/rollouts/train-0.0.1/grade", b'{"reward": 1e999}'),
        ("/rollouts/train-0.0.1/grade", b'{"reward": null}'),
        ("/rollouts/train-0.0.1/grade", b'{"reward": true}'),
        ("/rollouts/train-0.0.1/grade", b'{"reward": "1"}'),
        ("/rollouts/train-0.0.1/grade", b'{"reward": 1, "bonus": 1}'),
        ("/rollouts/train-0.0.1/end", b'{"end": "vanished"}'),
    ],
)
async def test_a_control_body_that_cannot_be_used_is_a_400(path, body):
    async with gateway() as (bench, session):
        response = await bench.http(bench.gateway.tokens.control).post(path, content=body)
        assert response.status_code == 400, response.text
        assert (await bench.attempt(session)).grades == ()


@pytest.mark.parametrize("path", ["/rollouts/nobody/end", "/rollouts/nobody/grade"])
async def test_a_rollout_that_nobody_opened_cannot_be_graded_or_ended(path):
    async with gateway() as (bench, _):
        body = {"reward": 1.0} if path.endswith("grade") else {}
        assert (await bench.http(bench.gateway.tokens.control).post(path, json=body)).status_code in (404, 409)
