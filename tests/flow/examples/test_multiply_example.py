"""The multiply example, from its files to graded rollouts, over HTTP, with an engine that says what a policy might say."""

import asyncio
import json
import runpy

import example_cases
import pytest
from example_cases import EXAMPLES, QUESTION, example_runner, multiplier

from penstock.chat.renderer import Renderer
from penstock.records import Sampling
from penstock.rollout.scheduler import Scheduler, task_at
from penstock.sdk.dataset import load_tasks
from penstock.testing import write_tokenizer

EXAMPLE = EXAMPLES / "multiply"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model"), corpus=[(EXAMPLE / "agent.py").read_text()]))


def attempts(renderer, script, tasks, **settings):
    return example_cases.attempts(renderer, script, tasks, "multiply/agent.py", **settings)


@pytest.mark.parametrize(("rows", "prefix"), [("rows", ""), ("tiny_rows", "tiny_")])
def test_tasks_are_those_that_the_generator_makes(rows, prefix):
    made = runpy.run_path(str(EXAMPLE / "make_tasks.py"))[rows]()
    assert "".join(made) == (EXAMPLE / f"{prefix}tasks.jsonl").read_text() + (EXAMPLE / f"{prefix}heldout.jsonl").read_text()


def test_held_out_pairs_are_neither_trained_nor_shown():
    def pairs(name):
        return {tuple(sorted(map(int, QUESTION.search(line).groups()))) for line in (EXAMPLE / name).read_text().splitlines()}

    shown = runpy.run_path(str(EXAMPLE / "make_tasks.py"))["SHOWN"]
    train, heldout = pairs("tasks.jsonl"), pairs("heldout.jsonl")
    assert (len(train), len(heldout)) == (256, 64)
    assert not train & heldout
    assert not (train | heldout) & shown
    worked = "".join(str(message) for message in runpy.run_path(str(EXAMPLE / "agent.py"))["EXAMPLES"])
    assert {tuple(map(int, pair)) for pair in QUESTION.findall(worked)} == shown


def test_labels_are_right():
    for name in ("tasks.jsonl", "heldout.jsonl"):
        for row in map(json.loads, (EXAMPLE / name).read_text().splitlines()):
            a, b = map(int, QUESTION.search(row["user_prompt"]).groups())
            assert (row["ground_truth"], 2 <= a <= 99, 2 <= b <= 99) == (str(a * b), True, True)


def test_agent_leaves_sampling_to_run_but_for_its_token_limit(renderer):
    _, engine = asyncio.run(
        attempts(renderer, multiplier(renderer), load_tasks(EXAMPLE / "tasks.jsonl", limit=1), workflow={"max_tokens": 40})
    )
    assert {(sampling.temperature, sampling.max_tokens) for sampling in engine.samplings} == {(1.0, 40)}


def test_scheduled_groups_are_graded_and_ready_to_be_trained(renderer):
    tasks = load_tasks(EXAMPLE / "tasks.jsonl")

    async def main():
        async with example_runner(renderer, multiplier(renderer), "multiply/agent.py", group_size=3, groups_per_step=2) as (
            runner,
            pool,
            limits,
            _,
        ):
            events, sampling = runner.events, Sampling(max_tokens=200)
            made = Scheduler(tasks, runner, pool=pool, events=events, limits=limits, sampling=sampling, seed=5, steps=2)
            ended = asyncio.Queue()
            events.listen(lambda kind, fields: ended.put_nowait(fields) if kind == "rollout.end" else None)
            async with asyncio.TaskGroup() as group:
                group.create_task(made.run())
                for step in (1, 2):
                    rewards = [(await ended.get())["reward"] for _ in range(6)]
                    lease = await pool.claim(2, version=0, max_staleness=0, lease_s=60)
                    assert [g.rewards for g in lease.groups] == [[1.0] * 3] * 2
                    assert rewards == [1.0] * 6
                    made.advance(step)
            assert [g.task for g in await pool.groups("train")] == [task_at(tasks, seq, seed=5) for seq in range(4)]

    asyncio.run(main())
