"""The multiply example, from its files to graded rollouts, over HTTP, with an engine that says what a policy might say."""

import asyncio
import json
import runpy

import example_cases
import pytest
from example_cases import EXAMPLES, QUESTION, example_runner, multiplier, written_call

from penstock.chat.renderer import Renderer
from penstock.config import load_config
from penstock.records import End, Sampling
from penstock.rollout.scheduler import Scheduler, task_at
from penstock.rollout.transcripts import transcripts
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedReply, write_tokenizer

EXAMPLE = EXAMPLES / "multiply"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model"), corpus=[(EXAMPLE / "agent.py").read_text()]))


def attempts(renderer, script, tasks, **settings):
    return example_cases.attempts(renderer, script, tasks, "multiply/agent.py", **settings)


def test_files_of_the_example_fit_together():
    config = load_config(EXAMPLE / "train.toml")
    agent = load_agent(config.agent.entry, config.workflow, config.grader)
    assert (agent.workflow.__name__, agent.workflow_config.max_tokens) == ("MultiplyWorkflow", 40)
    assert len(load_tasks(config.dataset.train)) == 256
    assert len(load_tasks(config.dataset.eval)) == 64


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


@pytest.mark.slow
def test_two_hundred_rollouts_at_once_each_get_their_own_answer(renderer):
    tasks = load_tasks(EXAMPLE / "tasks.jsonl", limit=200)
    done, _ = asyncio.run(attempts(renderer, multiplier(renderer), tasks, concurrency=200))
    assert [attempt.reward for attempt in done] == [1.0] * 200
    for task, attempt in zip(tasks, done, strict=True):
        *_, question, call, result, answer = transcripts(attempt)["main"].messages
        assert question == task.prompt[0]
        assert call["tool_calls"][0]["function"]["name"] == "multiply"
        assert (result["content"], answer["content"]) == (task.label, task.label)


def test_second_call_continues_the_exact_tokens_of_the_first(renderer):
    (attempt,), engine = asyncio.run(attempts(renderer, multiplier(renderer), load_tasks(EXAMPLE / "tasks.jsonl", limit=1)))
    first, second = engine.prompts
    assert second[: len(first) + len(attempt.steps[0].completion_ids)] == first + attempt.steps[0].completion_ids
    assert [(node.parent, node.reason) for node in attempt.nodes] == [(None, None), (0, None)]


def test_tasks_share_their_prompt_up_to_the_question(renderer):
    _, engine = asyncio.run(attempts(renderer, multiplier(renderer), load_tasks(EXAMPLE / "tasks.jsonl", limit=8)))
    roots = [p for p in engine.prompts if "tool_response" not in renderer.tokenizer.decode(p).rpartition("What is ")[2]]
    shared = next(place for place, ids in enumerate(zip(*roots, strict=False)) if len(set(ids)) > 1)
    assert len(roots) == 8
    assert shared / max(map(len, roots)) > 0.95


def test_agent_leaves_sampling_to_the_run_but_for_its_token_limit(renderer):
    _, engine = asyncio.run(
        attempts(renderer, multiplier(renderer), load_tasks(EXAMPLE / "tasks.jsonl", limit=1), workflow={"max_tokens": 40})
    )
    assert {(sampling.temperature, sampling.max_tokens) for sampling in engine.samplings} == {(1.0, 40)}


SAYINGS = {
    "right": (written_call, lambda result: result, 1.0, 2),
    "right, in a sentence": (written_call, lambda result: f"The answer is {result}.", 1.0, 2),
    "right, with a comma": (written_call, lambda result: f"{int(result):,}", 1.0, 2),
    "two calls": (lambda a, b: written_call(a, b) + "\n" + written_call(a, b), lambda result: result, 1.0, 2),
    "wrong number": (written_call, lambda result: "1", 0.0, 2),
    "right, then another": (written_call, lambda result: f"{result} or 1", 0.0, 2),
    "no number": (written_call, lambda result: "done", 0.0, 2),
    "nothing": (written_call, lambda result: "", 0.0, 2),
    "calls again": (written_call, lambda result: written_call(1, 1), 0.0, 2),
    "wrong numbers": (lambda a, b: written_call(1, 1), lambda result: result, 0.0, 2),
    "answers without the tool": (lambda a, b: str(int(a) * int(b)), None, 0.0, 1),
    "says nothing": (lambda a, b: "", None, 0.0, 1),
    "another tool": (lambda a, b: written_call(a, b, "divide"), None, 0.0, 1),
    "text for numbers": (lambda a, b: written_call(f'"{a}"', f'"{b}"'), None, 0.0, 1),
    "fractions": (lambda a, b: written_call(f"{a}.5", b), None, 0.0, 1),
    "truth for a number": (lambda a, b: written_call("true", b), None, 0.0, 1),
    "other names": (lambda a, b: written_call(a, b).replace('"a"', '"x"'), None, 0.0, 1),
    "broken call": (lambda a, b: written_call(a, b).replace("}", ""), None, 0.0, 1),
    "one good call, one bad": (lambda a, b: written_call(a, b) + written_call(a, "null"), None, 0.0, 1),
    "too long": (lambda a, b: "so " * 100 + written_call(a, b), None, 0.0, 1),
}


@pytest.mark.parametrize("saying", SAYINGS)
def test_whatever_the_policy_says_the_rollout_completes_and_is_graded(renderer, saying):
    call, answer, reward, steps = SAYINGS[saying]
    (attempt,), _ = asyncio.run(
        attempts(renderer, multiplier(renderer, call, answer), load_tasks(EXAMPLE / "tasks.jsonl", limit=1))
    )
    assert (attempt.end, attempt.message) == (End.COMPLETED, "")
    assert (attempt.reward, len(attempt.steps)) == (reward, steps)


def test_engine_that_fails_every_time_is_blamed_not_the_agent(renderer):
    (attempt,), engine = asyncio.run(
        attempts(renderer, lambda _: ScriptedReply("x", fail_after=0), load_tasks(EXAMPLE / "tasks.jsonl", limit=1))
    )
    assert attempt.end is End.ENGINE_ERROR
    assert "the scripted engine failed after 0 tokens" in attempt.message
    assert len(engine.prompts) == 3  # the client tried again, as such clients do


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
