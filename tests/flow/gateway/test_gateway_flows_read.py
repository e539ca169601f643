"""The read API: pages of what the pool holds, one cursor for each channel, and a curator's marks."""

import asyncio
import threading

import pytest
from gateway_cases import USER, renderer
from gateway_flow_cases import gateway, generate, open_gateway, step_of, submit

from penstock.pool.memory import MemoryPool
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench
from penstock_compat.gateway import read_api


def endless(prompt):
    return "Hi."


async def trajectories(http, count, channel="train"):
    """Complete trajectories of one step each."""
    for number in range(count):
        uid = f"{channel}-{number}"
        await http.post(f"/{uid}/p/v1/register_trajectory", json={"channel": channel})
        await submit(http, step_of(await generate(http, uid), reward=float(number), is_last=True))


async def walk(http, path, name, **params):
    """Everything, page by page; the sizes of the pages too."""
    found, sizes, cursor = [], [], {}
    while True:
        reply = ",".join(f"{channel}:{place}" for channel, place in cursor.items())
        answer = (await http.get(path, params={**params, "cursor": reply} if reply else params)).json()
        found += answer[name]
        sizes.append(len(answer[name]))
        cursor = answer["cursors"]
        if not answer["more"]:
            return found, sizes


@pytest.mark.parametrize(("path", "name"), [("/api/steps", "steps"), ("/api/trajectories", "trajectories")])
async def test_pages_follow_each_other_over_channels_without_gap_or_repetition(path, name):
    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 7)
        await trajectories(http, 4, "val")
        found, sizes = await walk(http, path, name, channels="train,val", limit=3)
        expected = [f"train-{number}" for number in range(7)] + [f"val-{number}" for number in range(4)]
        assert [entry["trajectory_uid"] for entry in found] == expected
        assert max(sizes) == 3
        only = (await http.get(path, params={"channel": "val", "offset": 1, "limit": 2})).json()[name]
        assert [entry["trajectory_uid"] for entry in only] == ["val-1", "val-2"]


async def test_step_shows_ids_only_on_request():
    async with open_gateway(endless) as (http, _, _):
        answer = await generate(http, "t1")
        await submit(http, step_of(answer, reward=0.5, is_last=True))
        shown = (await http.get("/api/steps", params={"trajectory_uid": "t1"})).json()["steps"][0]
        assert (shown["key"], shown["reward"], shown["is_last"], shown["text"]) == ("t1:0", 0.5, True, "Hi.")
        assert (shown["prompt_length"], shown["response_length"]) == (len(answer["prompt_ids"]), len(answer["response_ids"]))
        assert (shown["prompt_uid"], shown["channel"], "prompt_ids" in shown) == ("p1", "train", False)
        whole = (await http.get("/api/steps", params={"tokens": "true"})).json()["steps"][0]
        assert (whole["prompt_ids"], whole["response_ids"]) == (answer["prompt_ids"], answer["response_ids"])
        assert whole["rollout_log_probs"] == answer["log_probs"]


async def test_running_and_complete_trajectories_are_listed():
    async with open_gateway(endless) as (http, _, _):
        answer = await generate(http, "t1")
        await submit(http, step_of(answer, reward=0.5))
        shown = (await http.get("/api/trajectories")).json()["trajectories"][0]
        assert (shown["status"], shown["complete"], shown["reward"], shown["steps"]) == ("running", False, 0.5, 1)
        await http.post("/complete_trajectory/t1", json={"reward": 2.0})
        shown = (await http.get("/api/trajectories")).json()["trajectories"][0]
        assert (shown["status"], shown["complete"], shown["reward"]) == (End.COMPLETED, True, 2.0)


async def test_small_pages_lose_no_event():
    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 3)
        found, _ = await walk(http, "/api/events", "events", channels="train,val", limit=2)
        cursor = (await http.get("/api/events", params={"channels": "train,val", "cursor": "train:999,val:0"})).json()
        assert cursor["cursors"]["train"] == 999  # a channel's own place is never taken back
        await trajectories(http, 2, "val")
        everything, _ = await walk(http, "/api/events", "events", channels="train,val", limit=2)
        kinds = [(event["kind"], event.get("trajectory_uid") or event["group_id"]) for event in everything]
        assert everything[: len(found)] == found and len(set(kinds)) == len(kinds) == 15
        assert [event["cursor"] for event in everything] == sorted(event["cursor"] for event in everything)
        val = (await http.get("/api/events", params={"channel": "val"})).json()["events"]
        assert [event for event in everything if event["channel"] == "val"] == val


async def test_counts_are_listed_by_channel_and_in_total():
    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 3)
        await trajectories(http, 2, "val")
        await generate(http, "open-one")
        answer = (await http.get("/api/stats")).json()
        assert (answer["total_steps"], answer["total_trajectories"], answer["complete_trajectories"]) == (6, 6, 5)
        assert answer["channels"]["train"]["ready_prompt_groups"] == 3
        assert answer["channels"]["train"]["pending_prompt_groups"] == 1
        assert (await http.get("/api/stats", params={"channel": "val"})).json()["total_steps"] == 2
        about = (await http.get("/api/config")).json()
        assert (about["mode"], about["model"], about["channels"]) == ("open", "scripted", ["train", "val"])


async def test_curation_reports_late_marks():
    async with open_gateway(endless) as (http, bench, _):
        await trajectories(http, 2)
        lease = await bench.pool.claim(1, version=0, max_staleness=0, lease_s=60)
        assert [group.id for group in lease.groups] == ["train-0"]
        updates = [
            {"key": "train-1:0", "trainable": False, "note": "leaks the answer"},
            {"key": "train-1:0", "quality": 0.75},
            {"trajectory_uid": "train-1", "quality": 0.5},
            {"key": "train-0:0", "quality": 0.0},
        ]
        answer = (await http.post("/api/curation", json={"updates": updates})).json()
        assert answer == {"updated": 3, "late": ["train-0:0"]}
        marks = {mark.step: mark for mark in (await bench.pool.rollout("train-1")).marks}
        assert (marks[0].trainable, marks[0].note, marks[0].quality) == (False, "leaks the answer", 0.75)
        assert marks[None].quality == 0.5
        await http.post("/api/curation", json={"updates": [{"key": "train-1:0", "quality": 0.25}]})
        mark = next(mark for mark in (await bench.pool.rollout("train-1")).marks if mark.step == 0)
        assert (mark.trainable, mark.quality, mark.note) == (False, 0.25, "leaks the answer")
        shown = (await http.get("/api/steps", params={"trajectory_uid": "train-1"})).json()["steps"][0]
        assert (shown["trainable"], shown["quality"]) == (False, 0.25)


@pytest.mark.parametrize(
    ("update", "status"),
    [
        ({"key": "nobody:0", "trainable": False}, 404),
        ({"key": "train-0:9", "trainable": False}, 404),
        ({"key": "train-0"}, 422),
        ({"key": ":0"}, 422),
        ({}, 422),
        ({"key": "train-0:0", "quality": -1}, 422),
        ({"key": "train-0:0", "quality": "good"}, 422),
        ({"key": "train-0:0", "mood": 1}, 422),
    ],
)
async def test_curation_of_what_is_not_there_is_refused(update, status):
    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 1)
        response = await http.post("/api/curation", json={"updates": [update]})
        assert (response.status_code, bool(response.json()["detail"])) == (status, True)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "offset=-1", "offset=5000", "cursor=12x", "cursor=train:a", "cursor=:1"])
@pytest.mark.parametrize("path", ["/api/steps", "/api/events"])
async def test_query_that_cannot_be_used_is_a_422(path, query):
    async with open_gateway(endless) as (http, _, _):
        await generate(http)
        status = (await http.get(f"{path}?{query}")).status_code
        assert status == 422 or (path == "/api/events" and query.startswith("offset") and status == 200)


async def test_unknown_trajectory_is_a_404():
    async with open_gateway(endless) as (http, _, _):
        assert (await http.get("/api/steps", params={"trajectory_uid": "nobody"})).status_code == 404
        assert (await http.get("/api/steps", params={"channel": "nothing"})).json()["steps"] == []


async def test_reading_needs_the_admin_token_where_tokens_are_asked_for():
    async with gateway() as (bench, session, _):
        for token, status in {session.flow_token: 403, bench.gateway.tokens.control: 403, bench.gateway.tokens.admin: 200}.items():
            assert (await bench.http(token).get("/api/steps")).status_code == status


class WatchedPool(MemoryPool):
    """Remembers how many groups were asked for at once."""

    asked: list[int]

    async def groups(self, channel, *, first_seq=0, limit=100):
        self.asked.append(limit)
        return await super().groups(channel, first_seq=first_seq, limit=limit)


async def test_page_never_reads_the_whole_pool(tmp_path):
    pool = WatchedPool(tmp_path)
    pool.asked = []
    async with workbench(ScriptedEngine(endless, renderer().tokenizer), renderer(), pool=pool, is_open=True) as bench:
        for number in range(60):
            await generate(bench.http(), f"t{number}", USER)
        assert len((await bench.http().get("/api/steps?limit=5")).json()["steps"]) == 5
        assert sum(pool.asked) < 30


@pytest.mark.parametrize("bound", ["MAX_SCANNED_GROUPS", "MAX_IDS"])
async def test_response_size_is_bounded(bound, monkeypatch):
    monkeypatch.setattr(f"penstock_compat.gateway.read_api.{bound}", 3)

    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 7)
        await trajectories(http, 5, "val")
        found, sizes = await walk(http, "/api/steps", "steps", channels="train,val", tokens="true")
        assert [entry["trajectory_uid"] for entry in found] == [f"train-{n}" for n in range(7)] + [f"val-{n}" for n in range(5)]
        assert max(sizes) <= 3


async def test_one_response_is_built_at_a_time(monkeypatch):
    threads, running, most = set(), [], []
    plain = read_api.trajectories

    def watched(group):
        threads.add(threading.get_ident())
        running.append(group)
        most.append(len(running))
        yield from plain(group)
        running.pop()

    monkeypatch.setattr(read_api, "trajectories", watched)

    async with open_gateway(endless) as (http, _, _):
        await trajectories(http, 5)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(http.get("/api/trajectories")) for _ in range(8)]
        assert {len(call.result().json()["trajectories"]) for call in calls} == {5}
        assert threading.get_ident() not in threads
        assert max(most) == 1


async def test_steps_are_filtered_by_prompt_and_channel():
    async with open_gateway(endless) as (http, _, _):
        for uid, prompt in (("a", "p1"), ("b", "p2"), ("c", "p1")):
            await generate(http, uid, prompt_uid=prompt)

        async def uids(path="/api/steps", **params):
            answer = await http.get(path, params=params)
            assert answer.status_code == 200, answer.text
            return [entry["trajectory_uid"] for entry in answer.json()[path.rpartition("/")[2]]]

        assert await uids() == ["a", "b", "c"]
        assert await uids(prompt_uid="p1") == await uids("/api/trajectories", prompt_uid="p1") == ["a", "c"]
        assert await uids(prompt_uid="p1", trajectory_uid="b") == await uids(prompt_uid="p9") == []
        assert await uids(trajectory_uid="b", channel="val") == [] and await uids(trajectory_uid="b", channel="train") == ["b"]


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("/api/steps", "promptuid", "did you mean 'prompt_uid'?"),
        ("/api/trajectories", "tokens", "is not a parameter"),
        ("/api/events", "trajectory_uid", "is not a parameter"),
        ("/api/stats", "limit", "is not a parameter"),
    ],
)
async def test_parameter_that_would_be_ignored_is_refused(path, wrong, words):
    async with open_gateway() as (http, _, _):
        answer = await http.get(path, params={wrong: "1"})
        assert answer.status_code == 422 and words in answer.text
