"""Who may do what: every route, as the owner, as a device of whom the thing is, as another's device, and without a token.

A route without an entry in ROUTE_ACCESS is not served, and one without a row in docs/design/controller.md fails here.
"""

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from api_cases import Served, let_in, served
from api_client import exchange

from penstock.config import RunKind
from penstock_controller.api.app import AccessControl, make_app
from penstock_controller.api.auth import ROUTE_ACCESS, AccessLevel
from penstock_controller.identity import Identity
from penstock_controller.runs import Submission, new_id, now

ANN = Identity("any", "ann", person="ann")
DOCS = Path(__file__).parents[2] / "docs" / "design" / "controller.md"
Call = tuple[str, dict[str, Any]]
"""Path and body of a request."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with served(tmp_path_factory.mktemp("home"), runs=0) as found:
        yield found


@pytest.fixture(scope="module")
def tokens(world: Served) -> dict[str, str]:
    """The owner's, one of Ann's, to whom all things below belong, and one of Bob's."""
    return {"owner": world.controller.home.token(), **{name: let_in(world, "laptop", name)["token"] for name in ("ann", "bob")}}


def own_things(world: Served) -> dict[str, Callable[[], Call]]:
    """For each route that needs the token of whom a thing is: a call on a new thing of Ann's."""
    controller = world.controller

    def run(kind: RunKind) -> Call:
        facts = Submission(
            rollout="r", entrypoint="e", model="m", dataset="d", dataset_digest="", snapshot="", tables={}, person="ann"
        )
        made = controller.runs.add(kind, new_id(), f"run-{new_id()}", facts)
        return f"/api/cli/{'eval' if kind == 'eval' else 'training'}-runs/{made.id}/stop", {}

    def dataset(route: str) -> Call:
        made = controller.datasets.begin(f"d-{new_id()}", 10, "jsonl", who=ANN)
        if route:
            return f"/api/cli/datasets/{made.id}/{route}", {}
        return "/api/cli/datasets", {
            "file_name": made.name,
            "file_size": 10,
            "extension": "jsonl",
            "overwrite_dataset_id": made.id,
        }

    def secret(**more: str) -> Call:
        name = f"KEY_{new_id().upper()}"
        controller.vault.set(name, "ann's", "workspace", who=ANN)
        return "/api/cli/environment-secrets", {"name": name, "scope": "workspace", **more}

    def deployment() -> Call:
        name = f"model-{new_id()}"
        statement = """INSERT INTO deployments (name, folder, engine, deployed_at, deployed_by, person)
            VALUES (?, '', 'embedded', ?, 'ann', 'ann')"""
        controller.database.write(statement, [name, now()])
        return f"/api/cli/models/{name}/undeploy", {}

    return {
        "POST /api/cli/eval-runs/{ref}/stop": lambda: run("eval"),
        "POST /api/cli/training-runs/{ref}/stop": lambda: run("train"),
        "POST /api/cli/datasets": lambda: dataset(""),
        "POST /api/cli/datasets/{ref}/complete": lambda: dataset("complete"),
        "POST /api/cli/datasets/{ref}/abort": lambda: dataset("abort"),
        "POST /api/cli/environment-secrets": lambda: secret(value="changed"),
        "DELETE /api/cli/environment-secrets": secret,
        "POST /api/cli/models/{name}/undeploy": deployment,
        "DELETE /api/cli/tokens/{token_id}": lambda: (f"/api/cli/tokens/{let_in(world, 'old', 'ann')['token_id']}", {}),
    }


def status(world: Served, method: str, path: str, body: dict[str, Any], token: str | None) -> int:
    headers = {"X-Osmosis-Git": "acme/agents"} | ({"Authorization": f"Bearer {token}"} if token else {})
    content = repr(body).replace("'", '"').encode()
    return exchange(world.url, method, path, content, headers)[0]


def test_the_table_has_every_route_and_no_other(world: Served) -> None:
    routes = {f"{min(route.methods - {'HEAD'})} {route.path}" for route in make_app(world.controller, world.url).routes}  # type: ignore[attr-defined]
    assert routes == set(ROUTE_ACCESS)


def test_a_route_without_an_entry_is_not_served() -> None:
    from starlette.responses import Response
    from starlette.routing import Route

    with pytest.raises(KeyError, match="/api/cli/new"):
        AccessControl(None, None).protect(Route("/api/cli/new", lambda _: Response(), methods=["GET"]))  # type: ignore[arg-type]


def test_the_documentation_has_the_same_table() -> None:
    """A row is `| route | level |`; `{a,b}` and a list of methods stand for several routes."""
    documented: dict[str, str] = {}
    for methods, path, level in re.findall(r"^\| `([A-Z, ]+) (/\S*)` \| (\w+) \|", DOCS.read_text(), re.M):
        choice = re.search(r"\{(\w[\w-]*,[\w,-]+)\}", path)
        for each in choice[1].split(",") if choice else [""]:
            for method in methods.split(", "):
                documented[f"{method} {path.replace(choice[0], each) if choice else path}"] = level
    assert documented == {route: str(level) for route, level in ROUTE_ACCESS.items()}


@pytest.mark.parametrize("route", ROUTE_ACCESS)
def test_each_caller_gets_what_the_table_says(world: Served, tokens: dict[str, str], route: str) -> None:
    method, _, path = route.partition(" ")
    level = ROUTE_ACCESS[route]
    things = own_things(world)
    assert (level is AccessLevel.OWN) == (route in things), "whose thing it is must be tested"

    def call(token: str | None) -> int:
        if level is AccessLevel.OWN:
            return status(world, method, *things[route](), token)
        return status(world, method, path.replace("{", "").replace("}", ""), {}, token)

    found = {name: call(token) for name, token in (tokens | {"nobody": None, "stranger": "pst_wrong"}).items()}
    refused = {name for name, code in found.items() if code in (401, 403)}
    expected: dict[AccessLevel, set[str]] = {
        AccessLevel.NOTHING: set(),
        AccessLevel.LINK: {"owner", "ann", "bob", "nobody", "stranger"},  # a token is no link
        AccessLevel.TOKEN: {"nobody", "stranger"},
        AccessLevel.OWN: {"bob", "nobody", "stranger"},
        AccessLevel.OWNER: {"ann", "bob", "nobody", "stranger"},
    }
    assert refused == expected[level], found
    assert all(code < 500 for code in found.values())
    assert level in (AccessLevel.NOTHING, AccessLevel.LINK) or found["nobody"] == found["stranger"] == 401


def test_device_has_no_access_to_secrets_of_the_owner(world: Served, tokens: dict[str, str]) -> None:
    owner, bob = world.client(), world.client(tokens["bob"])
    owner.ask("POST", "environment-secrets", {"name": "OWNERS", "value": "the owner's", "scope": "user"})
    assert "OWNERS" not in str(bob.ask("GET", "environment-secrets"))
    bob.ask("POST", "environment-secrets", {"name": "OWNERS", "value": "bob's", "scope": "user"})
    bob.ask("DELETE", "environment-secrets", {"name": "OWNERS", "scope": "user"})
    assert status(world, "DELETE", "/api/cli/environment-secrets", {"name": "OWNERS", "scope": "user"}, tokens["bob"]) == 404
    assert world.controller.vault.values(["OWNERS"], person="owner") == {"OWNERS": "the owner's"}
