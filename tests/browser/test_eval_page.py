"""An evaluation's report in a real browser."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.config import EvalSection
from penstock.evals.outcome import StoredEvaluation
from penstock.pool.memory import MemoryPool
from penstock.records import End, Grade, Task, make_rollout
from penstock.testing import make_node, make_step
from penstock.view.eval_page import render_eval_page

CONFIG = {"model": {"name": "tiny"}, "engine": {"price_in": 2.0, "price_out": 10.0}}
NASTY = "<b>bold</b> & <script>alert(1)</script> \u2028 ünïcödé"


async def make_pool(path):
    """Four tasks with two attempts each: rewards 0, 1/3, 2/3 and 1 by task; the last attempt of the first task failed."""
    pool = MemoryPool(path)
    for row in range(4):
        task = Task(id=f"task-{row}", prompt=({"role": "user", "content": NASTY},), label=str(row))
        rollouts = [make_rollout(f"eval-{row}", task.id, place, channel="eval") for place in range(2)]
        await pool.open_group(task, rollouts, seq=row)
        for rollout in rollouts:
            node = make_node(rollout.id, 0, (1, 2), messages=task.prompt)
            step = make_step(
                rollout.id,
                0,
                (3,),
                logprobs=(-1.0,),
                message={"role": "assistant", "content": f"reply {row} {NASTY}"},
                seconds=0.25,
            )
            await pool.append(step, node)
            failed = rollout.id == "eval-0.1.1"
            if not failed:
                await pool.grade(Grade(rollout_id=rollout.id, reward=row / 3, source="test"))
            await pool.end(rollout.id, End.AGENT_ERROR if failed else End.COMPLETED, NASTY if failed else "")
    return pool


def rendered(folder, make, config, summary, seconds):
    """The page of an evaluation over the pool that `make` makes."""

    async def work():
        pool = await make(folder)
        return await render_eval_page(StoredEvaluation(config, summary, pool, seconds), folder / "artifacts")

    with ThreadPoolExecutor() as elsewhere:  # the browser's driver keeps an event loop in this thread
        (folder / "report.html").write_text(elsewhere.submit(lambda: asyncio.run(work())).result())
    return folder / "report.html"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    config = CONFIG | {"run": {"name": NASTY}} | {"eval": EvalSection(samples=2, k=(1, 2)).model_dump(mode="json")}
    seconds = {f"eval-{row}.{place}.1": 0.5 + row for row in range(4) for place in range(2)}
    verdict = folder / "artifacts" / "eval-3.0.1"
    verdict.mkdir(parents=True)
    (verdict / "verdict.json").write_text(json.dumps({"score": 1.0, "explanation": NASTY}))
    return rendered(folder, make_pool, config, {"status": "finished"}, seconds)


def test_numbers_are_seen_and_fit_their_boxes(read, page_file):
    page = read(page_file)
    assert page.locator("h1").inner_text() == NASTY
    shown = page.locator(".tile").all_inner_texts()
    assert [text.split("\n")[-1] for text in shown] == [
        "0.500", "0.250", "0.250", "8", "8", "8", "16", "0.000112", "0.25 / 0.25 s", "2 / 3.5 s",
    ]  # fmt: skip
    for box in page.locator(".tile").all():
        assert box.evaluate("tile => tile.scrollWidth <= tile.clientWidth")


def test_rewards_are_drawn_and_every_task_is_listed(read, page_file):
    page = read(page_file)
    for spread in page.locator("svg").all():
        tall = [bar.bounding_box()["height"] for bar in spread.locator("rect").all()]
        assert sum(height > 0 for height in tall) == 4
    assert "1 tasks with a mean reward from 0.95 to 1" in page.locator("svg title").all_text_contents()
    assert any(
        text.startswith("2 rollouts with a time in seconds from 3.3") for text in page.locator("svg title").all_text_contents()
    )
    page.get_by_text("Every task").click()
    rows = page.locator("details[open] tbody tr").all_inner_texts()
    assert [re.split(r"\s+", row)[1] for row in rows] == [f"task-{n}" for n in range(4)]


def test_transcripts_unfold_with_their_text_as_text(read, page_file):
    page = read(page_file)
    summaries = page.locator("summary").all_inner_texts()
    assert [line.split()[0] for line in summaries[1:-1]] == ["worst"] * 3 + ["best"] * 3 + ["failed"]
    failed = page.locator("details", has_text="agent_error").last
    failed.locator("summary").click()
    assert NASTY.split()[0] in failed.locator(".message").first.inner_text()
    assert page.locator("body b", has_text="bold").count() == 0


def test_what_a_judge_said_is_read_with_the_transcript(read, page_file):
    page = read(page_file)
    judged = page.locator("details", has_text="judge:")
    judged.locator("summary").click()
    assert f"judge: {NASTY}" in judged.inner_text()


async def make_long_pool(path):
    """Many rollouts; in one of a hundred the agent went on and on, with a tool, and these are the worst and the best."""
    pool = MemoryPool(path)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [{"role": "assistant", "content": "x" * 1000, "tool_calls": [call]}, {"role": "tool", "content": "y" * 1000}] * 500
    schema = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for row in range(1200):
        rollout = make_rollout(f"eval-{row}", f"task-{row}", 0, channel="eval")
        messages, reward = ((), 0.5) if row % 100 else (tuple(said), float(row >= 600))
        node = make_node(rollout.id, 0, (1,), messages=messages, tools=(schema,))
        step = make_step(rollout.id, 0, (3,), logprobs=(-1.0,), message={"role": "assistant", "content": "the end"})  # fmt: skip
        await pool.open_group(Task(id=rollout.task_id, prompt=()), [rollout], seq=row)
        await pool.append(step, node)
        await pool.end(rollout.id, End.COMPLETED, "", [Grade(rollout_id=rollout.id, reward=reward, source="test")])
    return pool


def test_page_of_many_long_rollouts_stays_small(read, tmp_path):
    rendered(tmp_path, make_long_pool, CONFIG | {"run": {"name": "many"}}, {}, {})
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    page = read(tmp_path / "report.html")
    page.get_by_text("Every task").click()
    assert page.locator("details[open] tbody tr").count() == 1000 and page.get_by_text("and 200 more").is_visible()
    worst = page.locator("details", has_text="worst").first
    worst.locator("summary").click()
    assert worst.get_by_text("801 messages are left out here").is_visible() and worst.get_by_text("tools: look").is_visible()
    assert (worst.locator(".message").count(), worst.get_by_text("the end").is_visible()) == (200, True)
