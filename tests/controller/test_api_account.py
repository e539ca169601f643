"""Who is let in: tokens of devices, their logins, links, and names that are not ours."""

import json
from collections.abc import Generator
from typing import Any

import pytest
from api_cases import Served, let_in, served
from api_client import ApiClient, Refused, exchange, need
from starlette.requests import Request

from penstock.errors import ControllerError
from penstock_controller.api.auth import MAX_LOGINS, MAX_LOGINS_OF_CALLER, ApiTokens, DeviceLogins, caller_address
from penstock_controller.api.links import SignedLinks
from penstock_controller.database import ControllerDatabase
from penstock_controller.runs import Submission


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with served(tmp_path_factory.mktemp("home")) as found:
        yield found


def refused(client: ApiClient, method: str, path: str, body: Any = None) -> Refused:
    with pytest.raises(Refused) as caught:
        client.ask(method, path, body)
    return caught.value


@pytest.mark.parametrize(
    "header, code",
    [(None, "AUTH_HEADER_MISSING"), ("Bearer ", "TOKEN_MISSING"), ("Basic abc", "TOKEN_MISSING"), ("Bearer wrong", "TOKEN_INVALID"),
     ("Bearer \xff", "TOKEN_INVALID")],
)  # fmt: skip
def test_a_refusal_says_which_token_is_wrong(world, header, code):
    status, body, headers = exchange(world.url, "GET", "/api/cli/verify", None, {} if header is None else {"Authorization": header})
    assert (status, json.loads(body)["code"], headers["www-authenticate"]) == (401, code, "Bearer")


def test_owner_sees_their_identity(world):
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


def test_token_is_stored_as_a_hash_and_expires(world):
    database = world.controller.database
    token, who = ApiTokens(database, "owner's").create("phone")
    assert token not in json.dumps([list(row) for row in database.rows("SELECT * FROM tokens")])
    database.write("UPDATE tokens SET expires_at = '2020-01-01T00:00:00+00:00' WHERE id = ?", [who.token_id])
    with pytest.raises(ControllerError) as caught:
        ApiTokens(database, "owner's").identify(f"Bearer {token}")
    assert caught.value.code == "TOKEN_EXPIRED"


def begin(world: Served, code: str = "", **headers: str) -> dict[str, Any]:
    body = json.dumps({"deviceName": "x"}).encode()
    status, content, _ = exchange(world.url, "POST", "/api/cli/device/authorize", body, headers)
    assert status == 200, content
    return json.loads(content)


def test_a_flood_of_logins_pushes_out_itself_and_nobody_else(tmp_path):
    with served(tmp_path / "home") as found:
        logins = DeviceLogins(found.controller.database, ApiTokens(found.controller.database, "owner's"))
        ours, approved = logins.begin("laptop", "192.0.2.1"), logins.begin("phone", "198.51.100.1")
        logins.answer(approved.user_code, approve=True)
        for number in range(3 * MAX_LOGINS):
            logins.begin("flood", ("198.51.100.1", f"2001:db8::{number:x}", f"::ffff:203.0.113.{number // 3 % 9}")[number % 3])
        waiting = found.controller.database.rows("SELECT count(*) FROM logins")[0][0]
        assert waiting == 2 + MAX_LOGINS_OF_CALLER * 11, "one of ours, the approved one, and the flood's eleven addresses"
        assert logins.answer(ours.user_code, approve=True) == "laptop"
        assert logins.token(ours.device_code)[1].label == "laptop (device)"
        assert logins.token(approved.device_code)[1].label == "phone (device)"


def test_flood_of_logins_is_bounded_per_address(tmp_path):
    with served(tmp_path / "home") as found:
        logins = DeviceLogins(found.controller.database, ApiTokens(found.controller.database, "owner's"))
        ours = logins.begin("laptop", "192.0.2.1")
        for number in range(MAX_LOGINS + 200):
            logins.begin("flood", f"198.51.{number // 2 % 250}.1")
        assert found.controller.database.rows("SELECT count(*) FROM logins")[0][0] == MAX_LOGINS
        assert logins.answer(ours.user_code, approve=True) == "laptop"


def test_anyone_may_always_begin_a_login(tmp_path):
    with served(tmp_path / "home") as found:
        for _ in range(MAX_LOGINS_OF_CALLER + 5):
            last = begin(found)
        assert found.client().ask("POST", "device/approve", {"user_code": last["user_code"]})["device_name"] == "x"
        assert found.controller.database.rows("SELECT count(*) FROM logins")[0][0] == MAX_LOGINS_OF_CALLER


def test_behind_a_proxy_a_caller_is_who_the_proxy_says(tmp_path):
    request = Request({"type": "http", "client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-for", b"1.1.1.1, 192.0.2.7")]})
    key = b"k" * 43
    assert caller_address(request, SignedLinks(key, "https://runs.example.org")) == "192.0.2.7"
    assert caller_address(request, SignedLinks(key, "http://127.0.0.1:1")) == "127.0.0.1"


def test_a_device_is_let_in_as_a_persons(world):
    first, second, other = (let_in(world, name, person) for name, person in (("a", "Ann@Home"), ("b", "ann@home"), ("c", None)))
    assert first["user"]["name"] == second["user"]["name"] == "ann@home" and other["user"]["name"] == "c"
    ann = ApiClient(world.url, first["token"])
    listed = ann.ask("GET", "tokens")["tokens"]
    assert [(each["id"], each["device_name"], each["person"]) for each in sorted(listed, key=lambda each: each["device_name"])] == [
        (first["token_id"], "a", "ann@home"), (second["token_id"], "b", "ann@home")
    ]  # fmt: skip
    everyones = {each["id"] for each in world.client().ask("GET", "tokens")["tokens"]}
    assert {first["token_id"], second["token_id"], other["token_id"]} <= everyones
    ann.ask("DELETE", f"tokens/{second['token_id']}")
    assert refused(ApiClient(world.url, second["token"]), "GET", "verify").code == "TOKEN_REVOKED"
    assert second["token_id"] not in {each["id"] for each in world.client().ask("GET", "tokens")["tokens"]}
    assert refused(ann, "DELETE", f"tokens/{other['token_id']}").status == refused(ann, "DELETE", "tokens/nobody").status == 403


def test_a_device_of_the_owners_is_not_the_owner(world):
    device = ApiClient(world.url, let_in(world, "laptop", "owner")["token"])
    assert device.ask("GET", "verify")["workspace"]["role"] == "member"
    assert refused(device, "POST", "device/approve", {"user_code": "AAAA-BBBB"}).status == 403
    world.client().ask("POST", "environment-secrets", {"name": "MINE", "value": "x", "scope": "user"})
    assert [each["name"] for each in device.ask("GET", "environment-secrets", scope="user")["environment_secrets"]] == ["MINE"]
    begun = begin(world)
    assert (
        refused(world.client(), "POST", "device/approve", {"user_code": begun["user_code"], "person": "a b"}).code
        == "PERSON_INVALID"
    )


def test_token_of_an_older_version_is_a_separate_device(tmp_path):
    database = ControllerDatabase(tmp_path / "c.db")
    try:
        token, who = ApiTokens(database, "owner's").create("old")
        database.write("ALTER TABLE tokens DROP COLUMN person")
        assert ApiTokens(database, "owner's").identify(f"Bearer {token}") == who
        assert who.person == f"device:{who.token_id}"
    finally:
        database.close()


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


def test_database_failure_has_a_code(world):
    world.controller.database.write("ALTER TABLE logins RENAME TO gone")
    try:
        error = refused(ApiClient(world.url, None, None), "POST", "device/authorize", {"deviceName": "x"})
        assert (error.status, error.code) == (503, "STORE_FAILED")
    finally:
        world.controller.database.write("ALTER TABLE gone RENAME TO logins")


def test_unexpected_error_is_logged_and_not_exposed(world, caplog):
    submission = Submission(rollout="", entrypoint="", model="", dataset="", dataset_digest="", snapshot="", tables={})
    run = world.controller.runs.add("eval", "0" * 16, "damaged", submission)
    world.controller.runs.request_stop(run.id)
    world.controller.database.write("UPDATE runs SET submission = '{secret' WHERE id = ?", [run.id])
    error = refused(world.client(), "GET", "eval-runs/damaged")
    assert (error.status, error.code) == (500, "INTERNAL") and "secret" not in json.dumps(error.body)
    assert "JSONDecodeError" in caplog.text
