import asyncio
import hmac

import pytest
from gateway_cases import USER, chat, renderer
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.gateway.app import Guarded
from penstock.gateway.auth import Needs, Tokens
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench


def run(steps, script=()):
    async def main():
        async with workbench(ScriptedEngine(script, renderer().tokenizer), renderer()) as bench:
            await steps(bench, await bench.rollout())

    asyncio.run(main())


def routes(bench):
    """Every route of the app with its method; a new one is in this list by itself."""
    for route in bench.gateway.app.routes:
        assert isinstance(route, Route), f"{route} is not a plain route: say here how it is guarded"
        assert isinstance(route.endpoint, Guarded), f"{route.path} says nothing of what it needs"
        yield next(iter(route.methods - {"HEAD"})), route.path.replace("{rollout_id}", "train-0.0.1"), route.endpoint.needs


def test_every_route_is_closed_to_all_but_the_token_it_needs():
    async def steps(bench, session):
        foreign = Tokens(b"another secret of another run")
        held = {
            "none": "",
            "garbage": "sk-1234",
            "not ascii": "mk-é.ü",
            "foreign model": foreign.model(session.rollout_id),
            "foreign control": foreign.control,
            "signature of another rollout": session.token.replace("train-0.0.1", "train-0.1.1"),
            "model": session.token,
            "control": bench.gateway.tokens.control,
        }
        allowed = {Needs.NOTHING: set(held), Needs.MODEL: {"model"}, Needs.CONTROL: {"control"}}
        for method, path, needs in routes(bench):
            for name, token in held.items():
                headers = {"authorization": f"Bearer {token}".encode()} if token else {}
                status = (await bench.http().request(method, path, headers=headers)).status_code
                expected = {"model": 403, "control": 403}.get(name, 401)
                assert (status in (401, 403)) == (name not in allowed[needs]), (path, name, status)
                assert name in allowed[needs] or status == expected, (path, name, status)

    run(steps)


def test_there_are_routes_of_every_kind():
    async def steps(bench, session):
        assert {needs for *_, needs in routes(bench)} == set(Needs)

    run(steps)


def test_an_anthropic_style_key_header_is_a_token_too():
    async def steps(bench, session):
        response = await bench.http().get("/v1/models", headers={"x-api-key": session.token})
        assert response.status_code == 200

    run(steps)


@pytest.mark.parametrize("scheme", ["Basic", "", "bearer"])
def test_only_the_bearer_scheme_carries_a_token(scheme):
    async def steps(bench, session):
        response = await bench.http().get("/v1/models", headers={"authorization": f"{scheme} {session.token}"})
        assert response.status_code == (200 if scheme == "bearer" else 401)

    run(steps)


def test_an_unknown_path_is_a_404_in_the_openai_shape():
    async def steps(bench, session):
        response = await bench.http(session.token).post("/v1/embeddings")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_route")
        assert (await bench.http(session.token).get("/v1/chat/completions")).status_code == 405

    run(steps)


def test_a_valid_token_for_a_rollout_that_the_pool_does_not_know_is_a_404():
    async def steps(bench, session):
        response = await chat(bench.http(bench.gateway.tokens.model("train-7.0.1")), USER)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_rollout")

    run(steps)


def test_a_token_names_its_rollout_whatever_the_id_looks_like():
    tokens = Tokens(b"0123456789abcdef")
    for rollout_id in ("train-0.0.1", "", "a.b.c.", "mk-x", "é", "." * 100):
        headers = [(b"authorization", f"Bearer {tokens.model(rollout_id)}".encode("latin-1"))]
        assert tokens.admit(Needs.MODEL, headers) == rollout_id
        with pytest.raises(RequestError):
            tokens.admit(Needs.CONTROL, headers)


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))  # no seam shows timing
    with pytest.raises(RequestError):
        Tokens(b"0123456789abcdef").admit(Needs.MODEL, [(b"x-api-key", b"guess")])
    assert compared == [b"guess", b"guess"]


def test_a_runner_elsewhere_opens_grades_and_ends_a_rollout():
    async def steps(bench, session):
        control = bench.http(bench.gateway.tokens.control)
        opened = (await control.post("/rollouts", json={"rollout_id": session.rollout_id})).json()
        assert opened == {"rollout_id": "train-0.0.1", "token": session.token, "base_url": session.base_url}
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

    run(steps, ["42."])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rollouts", b"{}"),
        ("/rollouts", b"not json"),
        ("/rollouts", b'{"rollout_id": 1}'),
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
def test_a_control_body_that_cannot_be_used_is_a_400(path, body):
    async def steps(bench, session):
        response = await bench.http(bench.gateway.tokens.control).post(path, content=body)
        assert response.status_code == 400, response.text
        assert (await bench.attempt(session)).grades == ()

    run(steps)


@pytest.mark.parametrize("path", ["/rollouts/nobody/end", "/rollouts/nobody/grade"])
def test_a_rollout_that_nobody_opened_cannot_be_graded_or_ended(path):
    async def steps(bench, session):
        body = {"reward": 1.0} if path.endswith("grade") else {}
        assert (await bench.http(bench.gateway.tokens.control).post(path, json=body)).status_code in (404, 409)

    run(steps)
