"""The read API: pages of what the pool holds, one cursor for each channel, and a curator's marks."""

import asyncio
import threading

import pytest
from gateway_cases import USER, renderer
from gateway_flow_cases import generate, run, run_open, step_of, submit

from penstock.gateway import read_api
from penstock.pool.memory import MemoryPool
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench


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
        told = ",".join(f"{channel}:{place}" for channel, place in cursor.items())
        answer = (await http.get(path, params={**params, "cursor": told} if told else params)).json()
        found += answer[name]
        sizes.append(len(answer[name]))
        cursor = answer["cursors"]
        if not answer["more"]:
            return found, sizes


@pytest.mark.parametrize(("path", "name"), [("/api/steps", "steps"), ("/api/trajectories", "trajectories")])
def test_pages_follow_each_other_over_channels_without_gap_or_repetition(path, name):
    async def steps(http, bench, engine):
        await trajectories(http, 7)
        await trajectories(http, 4, "val")
        found, sizes = await walk(http, path, name, channels="train,val", limit=3)
        expected = [f"train-{number}" for number in range(7)] + [f"val-{number}" for number in range(4)]
        assert [entry["trajectory_uid"] for entry in found] == expected
        assert max(sizes) == 3
        only = (await http.get(path, params={"channel": "val", "offset": 1, "limit": 2})).json()[name]
        assert [entry["trajectory_uid"] for entry in only] == ["val-1", "val-2"]

    run_open(steps, endless)


def test_a_step_is_shown_with_its_reward_and_with_its_ids_only_where_asked():
    async def steps(http, bench, engine):
        told = await generate(http, "t1")
        await submit(http, step_of(told, reward=0.5, is_last=True))
        shown = (await http.get("/api/steps", params={"trajectory_uid": "t1"})).json()["steps"][0]
        assert (shown["key"], shown["reward"], shown["is_last"], shown["text"]) == ("t1:0", 0.5, True, "Hi.")
        assert (shown["prompt_length"], shown["response_length"]) == (len(told["prompt_ids"]), len(told["response_ids"]))
        assert (shown["prompt_uid"], shown["channel"], "prompt_ids" in shown) == ("p1", "train", False)
        whole = (await http.get("/api/steps", params={"tokens": "true"})).json()["steps"][0]
        assert (whole["prompt_ids"], whole["response_ids"]) == (told["prompt_ids"], told["response_ids"])
        assert whole["rollout_log_probs"] == told["log_probs"]

    run_open(steps, endless)


def test_a_trajectory_is_shown_while_it_runs_and_when_it_is_complete():
    async def steps(http, bench, engine):
        told = await generate(http, "t1")
        await submit(http, step_of(told, reward=0.5))
        shown = (await http.get("/api/trajectories")).json()["trajectories"][0]
        assert (shown["status"], shown["complete"], shown["reward"], shown["steps"]) == ("running", False, 0.5, 1)
        await http.post("/complete_trajectory/t1", json={"reward": 2.0})
        shown = (await http.get("/api/trajectories")).json()["trajectories"][0]
        assert (shown["status"], shown["complete"], shown["reward"]) == (End.COMPLETED, True, 2.0)

    run_open(steps, endless)


def test_no_event_is_lost_between_channels_that_are_read_in_small_pages():
    async def steps(http, bench, engine):
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

    run_open(steps, endless)


def test_counts_are_told_by_channel_and_together():
    async def steps(http, bench, engine):
        await trajectories(http, 3)
        await trajectories(http, 2, "val")
        await generate(http, "open-one")
        told = (await http.get("/api/stats")).json()
        assert (told["total_steps"], told["total_trajectories"], told["complete_trajectories"]) == (6, 6, 5)
        assert told["channels"]["train"]["ready_prompt_groups"] == 3
        assert told["channels"]["train"]["pending_prompt_groups"] == 1
        assert (await http.get("/api/stats", params={"channel": "val"})).json()["total_steps"] == 2
        about = (await http.get("/api/config")).json()
        assert (about["mode"], about["model"], about["channels"]) == ("open", "scripted", ["train", "val"])

    run_open(steps, endless)


def test_curation_marks_what_a_trainer_has_not_taken_and_says_what_came_late():
    async def steps(http, bench, engine):
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
        marks = {mark.step: mark for mark in (await bench.pool.attempt("train-1")).marks}
        assert (marks[0].trainable, marks[0].note, marks[0].quality) == (False, "leaks the answer", 0.75)
        assert marks[None].quality == 0.5
        await http.post("/api/curation", json={"updates": [{"key": "train-1:0", "quality": 0.25}]})
        mark = next(mark for mark in (await bench.pool.attempt("train-1")).marks if mark.step == 0)
        assert (mark.trainable, mark.quality, mark.note) == (False, 0.25, "leaks the answer")
        shown = (await http.get("/api/steps", params={"trajectory_uid": "train-1"})).json()["steps"][0]
        assert (shown["trainable"], shown["quality"]) == (False, 0.25)

    run_open(steps, endless)


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
def test_curation_of_what_is_not_there_is_refused(update, status):
    async def steps(http, bench, engine):
        await trajectories(http, 1)
        response = await http.post("/api/curation", json={"updates": [update]})
        assert (response.status_code, bool(response.json()["detail"])) == (status, True)

    run_open(steps, endless)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "offset=-1", "offset=5000", "cursor=12x", "cursor=train:a", "cursor=:1"])
@pytest.mark.parametrize("path", ["/api/steps", "/api/events"])
def test_a_query_that_cannot_be_used_is_a_422(path, query):
    async def steps(http, bench, engine):
        await generate(http)
        status = (await http.get(f"{path}?{query}")).status_code
        assert status == 422 or (path == "/api/events" and query.startswith("offset") and status == 200)

    run_open(steps, endless)


def test_an_unknown_trajectory_or_channel_is_told_apart_from_an_empty_one():
    async def steps(http, bench, engine):
        assert (await http.get("/api/steps", params={"trajectory_uid": "nobody"})).status_code == 404
        assert (await http.get("/api/steps", params={"channel": "nothing"})).json()["steps"] == []

    run_open(steps, endless)


def test_reading_needs_the_admin_token_where_tokens_are_asked_for():
    async def steps(bench, session, engine):
        for token, status in {session.flow_token: 403, bench.gateway.tokens.control: 403, bench.gateway.tokens.admin: 200}.items():
            assert (await bench.http(token).get("/api/steps")).status_code == status

    run(steps)


class WatchedPool(MemoryPool):
    """Remembers how many groups were asked for at once."""

    asked: list[int]

    async def groups(self, channel, *, first_seq=0, limit=100):
        self.asked.append(limit)
        return await super().groups(channel, first_seq=first_seq, limit=limit)


def test_a_page_never_reads_the_whole_pool(tmp_path):
    async def main():
        pool = WatchedPool(tmp_path)
        pool.asked = []
        async with workbench(ScriptedEngine(endless, renderer().tokenizer), renderer(), pool=pool, is_open=True) as bench:
            for number in range(60):
                await generate(bench.http(), f"t{number}", USER)
            assert len((await bench.http().get("/api/steps?limit=5")).json()["steps"]) == 5
            assert sum(pool.asked) < 30

    asyncio.run(main())


@pytest.mark.parametrize("bound", ["MAX_SCANNED_GROUPS", "MAX_IDS"])
def test_a_response_is_bounded_by_the_groups_and_ids_it_reads(bound, monkeypatch):
    monkeypatch.setattr(f"penstock.gateway.read_api.{bound}", 3)

    async def steps(http, bench, engine):
        await trajectories(http, 7)
        await trajectories(http, 5, "val")
        found, sizes = await walk(http, "/api/steps", "steps", channels="train,val", tokens="true")
        assert [entry["trajectory_uid"] for entry in found] == [f"train-{n}" for n in range(7)] + [f"val-{n}" for n in range(5)]
        assert max(sizes) <= 3

    run_open(steps, endless)


def test_entries_are_made_in_a_thread_one_response_at_a_time(monkeypatch):
    threads, running, most = set(), [], []
    plain = read_api.trajectories

    def watched(group):
        threads.add(threading.get_ident())
        running.append(group)
        most.append(len(running))
        yield from plain(group)
        running.pop()

    monkeypatch.setattr(read_api, "trajectories", watched)

    async def steps(http, bench, engine):
        await trajectories(http, 5)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(http.get("/api/trajectories")) for _ in range(8)]
        assert {len(call.result().json()["trajectories"]) for call in calls} == {5}
        assert threading.get_ident() not in threads
        assert max(most) == 1

    run_open(steps, endless)


def test_steps_are_those_of_the_prompt_and_channel_that_were_asked_for():
    async def steps(http, bench, engine):
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

    run_open(steps, endless)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("/api/steps", "promptuid", "did you mean 'prompt_uid'?"),
        ("/api/trajectories", "tokens", "is not a parameter"),
        ("/api/events", "trajectory_uid", "is not a parameter"),
        ("/api/stats", "limit", "is not a parameter"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(path, wrong, words):
    async def steps(http, bench, engine):
        answer = await http.get(path, params={wrong: "1"})
        assert answer.status_code == 422 and words in answer.text

    run_open(steps)
