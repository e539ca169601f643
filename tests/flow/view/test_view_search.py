"""Search in conversations, and the advantages of several policies."""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
from test_view_screens import Screens
from view_cases import make_run

from penstock.config import RunConfig
from penstock.pool import POOLS
from penstock.pool.sqlite import open_database
from penstock.records import End, Grade, Task, make_rollout
from penstock.run.folder import open_run_folder
from penstock.testing import make_node, make_step
from penstock.view.search import find_in_record, search_page


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, model="tiny")
    return root


def test_search_finds_tasks_requests_and_replies(root):
    screens = Screens(root)
    replies = screens.get("search", run="run", text="ANSWER 3")
    assert [each["rollout_id"] for each in replies["found"]][:2] == ["train-6.3.1", "train-5.3.1"]  # the newest first
    assert replies["found"][0]["place"] == "reply of call 1"
    assert (replies["found"][0]["before"], replies["found"][0]["text"]) == ("", "answer 3")
    assert (replies["groups"], replies["before"]) == (7, None)
    requests = screens.get("search", run="run", text="start again")
    assert {each["place"] for each in requests["found"]} == {"request 2"} and len(requests["found"]) == 7 * 4
    tasks = screens.get("search", run="run", text="4 <script>")
    assert [(each["rollout_id"], each["group_id"], each["place"]) for each in tasks["found"] if not each["rollout_id"]] == [
        ("", "train-4", "task")
    ]


def test_what_is_no_word_of_a_conversation_is_not_found(root):
    for text in ("rollout_id", "assistant", "no such words", "%", "'; DROP TABLE groups; --"):
        assert Screens(root).get("search", run="run", text=text)["found"] == [], text


def test_a_search_without_words_is_refused(root):
    for text in ("", "   "):
        assert Screens(root).ask("/api/search", run="run", text=text).status_code == 400
    assert Screens(root).ask("/api/search", run="run", text="x" * 1001).status_code == 400


def test_page_ends_at_its_deadline_and_the_next_continues(root):
    with closing(open_database(root / "run" / "pool.db")) as database:
        before, found, pages = 10**9, [], 0
        while before is not None:
            page = search_page(database, "train", "answer 1", before=before, budget_s=0.0)
            assert page.groups == 1
            before, found, pages = page.before, [*found, *page.found], pages + 1
        assert pages == 7 and len({each.rollout_id for each in found}) == len(found) == 7


def test_found_text_is_shown_in_context():
    record = json.dumps({"message": {"role": "assistant", "content": 'a "quoted"\nÜBER word ' + "x" * 500}}, ensure_ascii=False)
    assert find_in_record(record.encode(), '"QUOTED"\nüber')[:2] == ("a ", '"quoted"\nÜBER')
    assert len(find_in_record(record.encode(), "word")[2]) == 80


def make_team(root: Path) -> None:
    """Two rollouts in which a planner and an executor were asked; each has its own grade transcript."""
    (root / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    tree = {
        "run": {"name": "team", "folder": str(root)},
        "model": {"name": "tiny"},
        "dataset": {"train": str(root / "tasks.jsonl")},
        "train": {"method": "lora", "advantage": "dr_grpo"},
        "policies": {"planner": {}, "executor": {}, "judge": {"frozen": True}},
    }
    folder = open_run_folder(RunConfig.model_validate(tree), fresh=False)
    (folder.path / "checkpoints").mkdir()

    async def fill() -> None:
        pool, task = POOLS.load("sqlite")(folder.path), Task(id="t", prompt=({"role": "user", "content": "go"},))
        rollouts = [make_rollout("train-0", "t", place) for place in range(2)]
        await pool.open_group(task, rollouts, seq=0)
        for place, rollout in enumerate(rollouts):
            for index, policy in enumerate(("planner", "executor")):
                node = make_node(rollout.id, index, (1,), messages_digest=policy, messages=task.prompt)
                step = make_step(
                    rollout.id,
                    index,
                    (2,),
                    transcript=policy,
                    logprobs=(-1.0,),
                    message={"role": "assistant", "content": "x"},
                    messages_digest=f"{policy}.",
                    policy=policy,
                )
                await pool.append(step, node)
            # the planner does better in the second one, the executor as well in both
            grades = [Grade(rollout_id=rollout.id, reward=float(place), source="g", transcript="planner")]
            grades += [Grade(rollout_id=rollout.id, reward=0.5, source="g", transcript="executor")]
            await pool.end(rollout.id, End.COMPLETED, "", grades)
        lease = await pool.claim(1, version=0, max_staleness=0, lease_s=60)
        await pool.ack(lease.id, 1)
        await pool.close()

    asyncio.run(fill())


def test_each_trained_policy_has_its_own_advantages_and_masks(tmp_path):
    make_team(tmp_path)
    screens = Screens(tmp_path)
    attempts = screens.get("group", run="team", group="train-0")["attempts"]
    assert [attempt["policies"] for attempt in attempts] == [{"planner": -0.5, "executor": 0.0}, {"planner": 0.5, "executor": 0.0}]
    rollout = screens.get("rollout", run="team", rollout="train-0.1.1")
    assert rollout["credit"]["policies"] == {"planner": 0.5, "executor": 0.0} and rollout["credit"]["advantage"] is None
    assert [(call["policy"], call["trained"], call["mask"]) for call in rollout["calls"]] == [
        ("planner", True, None),
        ("executor", False, "zero_advantage"),
    ]


def test_group_of_run_with_one_policy_has_no_policies(root):
    [first, *_] = Screens(root).get("group", run="run", group="train-1")["attempts"]
    assert first["policies"] == {} and first["advantage"] is not None
