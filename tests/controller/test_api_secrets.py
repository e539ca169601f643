"""Secrets over HTTP: set, listed, deleted; no answer has a value."""

import asyncio

import pytest
from served_controller import served_controller

PATH = "environment-secrets"
VALUE = "s3cr3t-value"


def test_secrets_are_set_listed_by_scope_and_deleted(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            for name, scope in (("B", "workspace"), ("A", "user"), ("A", "workspace")):
                status, made = await caller.ask("POST", PATH, {"name": name, "value": VALUE, "scope": scope})
                assert (status, made["name"], made["scope"], made["creator_name"]) == (200, name, scope, "owner") and made["id"]
                assert VALUE not in str(made)
            listed = (await caller.ask("GET", f"{PATH}?limit=2&offset=0&scope=all"))[1]
            assert [(each["name"], each["scope"]) for each in listed["environment_secrets"]] == [("A", "user"), ("A", "workspace")]
            assert (listed["total_count"], listed["next_offset"]) == (3, 2) and VALUE not in str(listed)
            assert (await caller.ask("GET", f"{PATH}?scope=user"))[1]["total_count"] == 1
            assert (await caller.ask("DELETE", PATH, {"name": "A", "scope": "user"}))[0] == 200
            status, gone = await caller.ask("DELETE", PATH, {"name": "A", "scope": "user"})
            assert (status, gone["code"]) == (404, "SECRET_NOT_FOUND")

    asyncio.run(whole())


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a", "value": VALUE, "scope": "user"},
        {"name": "A", "value": "", "scope": "user"},
        {"name": "A", "value": [VALUE], "scope": "user"},
        {"name": "A", "scope": "user"},
        {"name": "A", "value": VALUE, "scope": "all"},
        {"name": ["A"], "value": VALUE, "scope": "user"},
        f'{{"name": "A", "value": "{VALUE}'.encode(),
    ],
)
def test_what_cannot_be_a_secret_is_refused_and_never_shown(tmp_path, body, caplog):
    async def whole():
        async with served_controller(tmp_path) as caller:
            status, refused = await caller.ask("POST", PATH, body)
            assert status == 400 and refused["code"] in ("SECRET_INVALID", "BODY_INVALID")
            assert VALUE not in str(refused) + caplog.text
            assert (await caller.ask("GET", PATH))[1]["total_count"] == 0

    asyncio.run(whole())


def test_an_unknown_scope_is_refused(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            assert (await caller.ask("GET", f"{PATH}?scope=team"))[0] == 400

    asyncio.run(whole())
