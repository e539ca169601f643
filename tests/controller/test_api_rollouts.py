"""Rollouts over HTTP: those of the repository that the caller's workspace has for origin."""

import asyncio

from served_controller import served_controller
from test_repositories import git, repository


def test_rollouts_of_the_repository_are_paged(tmp_path):
    sha = repository(tmp_path / "r", "a", "b", "c")
    git(tmp_path / "r", "branch", "other")

    async def whole():
        async with served_controller(tmp_path) as caller:
            status, _ = await caller.ask("POST", "repositories", {"name": "Acme/Agents", "path": str(tmp_path / "r")})
            assert status == 201
            status, page = await caller.ask("GET", "rollouts?limit=2&offset=0", **{"X-Osmosis-Git": "acme/agents"})
            assert status == 200 and [each["name"] for each in page["rollouts"]] == ["a", "b"]
            assert (page["total_count"], page["next_offset"]) == (3, 2)
            first = page["rollouts"][0]
            assert (first["last_synced_commit_sha"], first["repo_full_name"], first["is_active"]) == (sha, "acme/agents", True)
            last = (await caller.ask("GET", "rollouts?limit=2&offset=2&branch=other", **{"X-Osmosis-Git": "acme/agents"}))[1]
            assert [each["name"] for each in last["rollouts"]] == ["c"] and last["next_offset"] is None

    asyncio.run(whole())


def test_unknown_repository_or_branch_has_a_remedy(tmp_path):
    repository(tmp_path / "r", "a")

    async def whole():
        async with served_controller(tmp_path) as caller:
            caller.controller.repositories.register("a/b", tmp_path / "r")
            status, refused = await caller.ask("GET", "rollouts", **{"X-Osmosis-Git": "a/c"})
            assert (status, refused["code"]) == (404, "REPOSITORY_UNKNOWN")
            assert "penstock controller register PATH --name a/c" in refused["error"]
            status, refused = await caller.ask("GET", "rollouts?branch=none", **{"X-Osmosis-Git": "a/b"})
            assert (status, refused["code"]) == (404, "BRANCH_UNKNOWN")
            status, refused = await caller.ask("GET", "rollouts", **{"X-Osmosis-Git": ""})
            assert (status, refused["code"]) == (400, "GIT_SCOPE_HEADER_REQUIRED")

    asyncio.run(whole())
