"""Who is let in: every route with what it needs, tokens of devices, links, and names that are not ours."""

import json
from collections.abc import Generator
from typing import Any

import pytest
from api_cases import Served, served
from api_client import ApiClient, Refused, exchange, need

from penstock.controller.api.app import make_app
from penstock.controller.api.auth import ApiTokens
from penstock.controller.runs import Submission
from penstock.errors import ControllerError

OPEN = {
    "GET /health", "GET /device", "POST /api/cli/device/authorize", "POST /api/cli/device/token"
}  # fmt: skip
LINKS = {"GET /api/cli/links/output/{token}", "GET /api/cli/links/dataset/{token}", "PUT /api/cli/links/dataset-upload/{token}"}
OWNERS = {"POST /api/cli/device/approve", "POST /api/cli/repositories"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with served(tmp_path_factory.mktemp("home")) as found:
        yield found


def refused(client: ApiClient, method: str, path: str, body: Any = None) -> Refused:
    with pytest.raises(Refused) as caught:
        client.ask(method, path, body)
    return caught.value


def let_in(world: Served, name: str = "laptop") -> dict[str, Any]:
    """A token for a device."""
    stranger = ApiClient(world.url, None, None)
    begun = stranger.ask("POST", "device/authorize", {"deviceName": name})
    world.client().ask("POST", "device/approve", {"user_code": begun["user_code"]})
    return stranger.ask("POST", "device/token", {"device_code": begun["device_code"]})


def test_every_route_says_what_it_needs(world):
    routes = {f"{min(r.methods - {'HEAD'})} {r.path}": str(r.name) for r in make_app(world.controller, world.url).routes}  # type: ignore[attr-defined]
    by_need = {need: {route for route, each in routes.items() if each == need} for need in set(routes.values())}
    assert by_need["nothing"] == OPEN and by_need["link"] == LINKS and by_need["owner"] == OWNERS
    assert set(by_need) == {"nothing", "link", "owner", "token"} and len(by_need["token"]) >= 30


def test_nobody_without_a_token_gets_further_than_the_door(world):
    member = let_in(world)["token"]
    for route in make_app(world.controller, world.url).routes:
        path = route.path.replace("{", "").replace("}", "")  # type: ignore[attr-defined]
        method = min(route.methods - {"HEAD"})  # type: ignore[attr-defined]
        if route.name in ("token", "owner"):  # type: ignore[attr-defined]
            assert exchange(world.url, method, path, b"{}", {})[0] == 401, path
            assert exchange(world.url, method, path, b"{}", {"Authorization": "Bearer wrong"})[0] == 401, path
        if route.name == "link":  # type: ignore[attr-defined]
            assert exchange(world.url, method, path, b"", world.client().headers())[0] == 403, path
        if route.name == "owner":  # type: ignore[attr-defined]
            assert exchange(world.url, method, path, b"{}", {"Authorization": f"Bearer {member}"})[0] == 403, path


@pytest.mark.parametrize(
    "header, code",
    [(None, "AUTH_HEADER_MISSING"), ("Bearer ", "TOKEN_MISSING"), ("Basic abc", "TOKEN_MISSING"), ("Bearer wrong", "TOKEN_INVALID"),
     ("Bearer \xff", "TOKEN_INVALID")],
)  # fmt: skip
def test_a_refusal_says_which_token_is_wrong(world, header, code):
    status, body, headers = exchange(world.url, "GET", "/api/cli/verify", None, {} if header is None else {"Authorization": header})
    assert (status, json.loads(body)["code"], headers["www-authenticate"]) == (401, code, "Bearer")


def test_the_owner_is_told_who_they_are(world):
    found = world.client().ask("GET", "verify")
    assert need(found["user"], "id", "email") and "expires_at" not in found
    assert found["workspace"] == {"id": "acme/agents", "name": "acme/agents", "role": "owner"}
    assert "workspace" not in world.client(git=None).ask("GET", "verify")


def test_a_device_is_let_in_once_its_code_is_approved(world):
    stranger = ApiClient(world.url, None, None)
    begun = need(
        stranger.ask("POST", "device/authorize", {"deviceName": "laptop"}),
        "device_code", "user_code", "verification_uri", "expires_in", "interval",
    )  # fmt: skip
    waiting = refused(stranger, "POST", "device/token", {"device_code": begun["device_code"]})
    assert (waiting.status, waiting.body["error"]) == (400, "authorization_pending")
    page = exchange(world.url, "GET", begun["verification_uri_complete"].removeprefix(world.url), None, {})[1].decode()
    assert f"penstock controller approve {begun['user_code']}" in page
    typed = begun["user_code"].lower().replace("-", " ")
    assert world.client().ask("POST", "device/approve", {"user_code": typed})["device_name"] == "laptop"
    given = stranger.ask("POST", "device/token", {"device_code": begun["device_code"]})
    member = ApiClient(world.url, need(given, "token")["token"])
    assert member.ask("GET", "verify")["expires_at"] == given["expires_at"]
    assert refused(stranger, "POST", "device/token", {"device_code": begun["device_code"]}).body["error"] == "expired_token"
    assert refused(world.client(), "POST", "device/approve", {"user_code": begun["user_code"]}).code == "CODE_UNKNOWN"


def test_a_device_that_is_denied_stays_out(world):
    stranger = ApiClient(world.url, None, None)
    begun = stranger.ask("POST", "device/authorize", {})
    world.client().ask("POST", "device/approve", {"user_code": begun["user_code"], "deny": True})
    assert refused(stranger, "POST", "device/token", {"device_code": begun["device_code"]}).body["error"] == "access_denied"


def test_a_token_is_revoked_by_its_bearer_or_the_owner(world):
    first, second = let_in(world), let_in(world)
    member = ApiClient(world.url, first["token"])
    assert refused(member, "DELETE", f"tokens/{second['token_id']}").code == "FORBIDDEN"
    assert refused(world.client(), "DELETE", "tokens/owner").code == "TOKEN_PERMANENT"
    assert refused(world.client(), "DELETE", "tokens/nobody").code == "TOKEN_NOT_FOUND"
    member.ask("DELETE", f"tokens/{first['token_id']}")
    assert refused(member, "GET", "verify").code == "TOKEN_REVOKED"
    world.client().ask("DELETE", f"tokens/{second['token_id']}")
    assert refused(ApiClient(world.url, second["token"]), "GET", "verify").code == "TOKEN_REVOKED"


def test_a_token_is_kept_as_a_hash_and_ends_with_its_time(world):
    database = world.controller.database
    token, who = ApiTokens(database, "owner's").create("phone")
    assert token not in json.dumps([list(row) for row in database.rows("SELECT * FROM tokens")])
    database.write("UPDATE tokens SET expires_at = '2020-01-01T00:00:00+00:00' WHERE id = ?", [who.token_id])
    with pytest.raises(ControllerError) as caught:
        ApiTokens(database, "owner's").identify(f"Bearer {token}")
    assert caught.value.code == "TOKEN_EXPIRED"


def test_logins_that_wait_are_bounded(tmp_path):
    with served(tmp_path / "home") as found:
        stranger = ApiClient(found.url, None, None)
        for _ in range(50):
            stranger.ask("POST", "device/authorize", {"deviceName": "x"})
        assert refused(stranger, "POST", "device/authorize", {"deviceName": "x"}).status == 429


def test_a_page_that_calls_us_by_another_name_is_refused(world):
    status, body, _ = exchange(world.url, "GET", "/health", None, {"Host": "evil.example"})
    assert (status, json.loads(body)["code"]) == (421, "WRONG_HOST")
    assert exchange(world.url, "GET", "/health", None, {"Host": "localhost:1"})[0] == 200


def test_links_lead_where_the_caller_found_us(world):
    begun = json.loads(exchange(world.url, "POST", "/api/cli/device/authorize", b"{}", {"Host": "localhost:4711"})[1])
    assert begun["verification_uri"] == "http://localhost:4711/device"


def test_the_health_is_open(world):
    status, body, _ = exchange(world.url, "GET", "/health", None, {})
    assert status == 200 and json.loads(body)["status"] == "ok"


def test_repositories_are_registered_by_the_owner_and_listed_to_all(world, tmp_path):
    for folder in ("rollouts", "configs/eval", "configs/training", "data"):
        (tmp_path / folder).mkdir(parents=True)
    made = world.client().ask("POST", "repositories", {"name": "acme/Agents", "path": str(tmp_path)})
    assert made["name"] == "acme/agents"
    assert world.client(let_in(world)["token"]).ask("GET", "repositories")["repositories"][0]["path"] == str(tmp_path)
    error = refused(world.client(), "POST", "repositories", {"name": "acme/agents"})
    assert (error.code, error.body["field"]) == ("BODY_INVALID", "path")


def test_a_database_that_fails_is_told_as_such(world):
    world.controller.database.write("ALTER TABLE logins RENAME TO gone")
    try:
        error = refused(ApiClient(world.url, None, None), "POST", "device/authorize", {"deviceName": "x"})
        assert (error.status, error.code) == (503, "STORE_FAILED")
    finally:
        world.controller.database.write("ALTER TABLE gone RENAME TO logins")


def test_what_nobody_expected_is_logged_and_told_without_its_words(world, caplog):
    submission = Submission(rollout="", entrypoint="", model="", dataset="", dataset_digest="", snapshot="", tables={})
    run = world.controller.runs.add("eval", "0" * 16, "damaged", submission)
    world.controller.runs.request_stop(run.id)
    world.controller.database.write("UPDATE runs SET submission = '{secret' WHERE id = ?", [run.id])
    error = refused(world.client(), "GET", "eval-runs/damaged")
    assert (error.status, error.code) == (500, "INTERNAL") and "secret" not in json.dumps(error.body)
    assert "JSONDecodeError" in caplog.text
