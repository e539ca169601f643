"""The report of a run: self-contained, honest about unfinished runs, and safe to open whatever a model wrote."""

import asyncio
import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pool.sqlite import SqlitePool
from penstock.records import Attempt, End, Grade, Group, Node, Sampling, Step, Task, make_rollout
from penstock.reports.html import ChartPoint, reward_curve
from penstock.reports.training import choose_transcripts, render_report
from penstock.view.export import write_report

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\u202e"
TASK = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), label="6")


def metrics(step: int, reward: float | None) -> dict[str, Any]:
    counts = {"rollouts": 8, "groups": 2, "groups_equal": 1, "groups_stale": 0}
    exact = {"exact_token_rate": 1.0, "exact_tokens": 100, "sampled_tokens": 100}
    return {"step": step, "steps": 3, "reward": reward, "ends": {"completed": 8}, **counts, **exact}


def run_folder(folder: Path, *entries: dict[str, Any], **summary: Any) -> Path:
    config = {"run": {"name": "demo"}, "model": {"name": "tiny"}, "pool": {"name": "sqlite"}}
    (folder / "config.json").write_text(json.dumps({"config": config, "datasets": {}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


async def record(folder: Path, seq: int, reply: str, *, reward: float | None, reason: str | None = None) -> None:
    """One group of one rollout: a reply and its reward, or a failure where the reward is None."""
    pool = SqlitePool(folder)
    rollout = make_rollout(f"train-{seq}", "t", 0)
    await pool.open_group(TASK, [rollout], seq=seq)
    message = {"role": "assistant", "content": reply, "tool_calls": [{"function": {"name": EVIL, "arguments": "{}"}}]}
    node = Node(rollout_id=rollout.id, id=0, parent=None, token_ids=(1, 2), chain="a", messages=TASK.prompt, reason=reason)
    columns = {"completion_ids": (3,), "logprobs": (-0.5,), "versions": (0,)}
    step = Step(
        rollout_id=rollout.id,
        index=0,
        node=0,
        transcript="main",
        sampling=Sampling(),
        finish="stop",
        message=message,
        chain="b",
        **columns,
    )
    await pool.append(step, node)
    if reward is not None:
        await pool.grade(Grade(rollout_id=rollout.id, reward=reward, source="test"))
    await pool.end(rollout.id, End.AGENT_ERROR if reward is None else End.COMPLETED, "" if reward is not None else EVIL)
    await pool.close()


class Tags(HTMLParser):
    """What a browser would see: elements, their attributes, the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def written(folder: Path) -> str:
    return asyncio.run(render_report(folder)).encode("utf-8", "replace").decode()


def test_a_finished_run_shows_its_numbers_curve_and_transcripts(tmp_path):
    run_folder(
        tmp_path,
        metrics(1, 0.25),
        metrics(2, 1.0),
        status="finished",
        first_reward=0.25,
        last_reward=1.0,
        eval_before=0.5,
        eval_after=0.875,
    )
    asyncio.run(record(tmp_path, 0, "it is 6", reward=1.0))
    page = Tags(written(tmp_path))
    for said in ("0.250 → 1.000", "0.500 → 0.875", "100 %", "step 1: reward 0.25, 8 rollouts", "it is 6", "2 times 3?", "finished"):
        assert said in page.text
    assert page.names.count("circle") == 2


def test_what_is_not_exact_is_shown_by_reason_over_all_steps(tmp_path):
    flawed = {"exact_tokens": 90, "unhashed_tokens": 1234, "inexact": {"context_differs": 10}, "masked": {"greedy": 3}}
    run_folder(tmp_path, metrics(1, 0.5), metrics(2, 0.5) | flawed, metrics(3, 0.5) | {"masked": {"greedy": 4}})
    asyncio.run(record(tmp_path, 0, "it is 6", reward=1.0, reason="history_edited"))
    text = Tags(written(tmp_path)).text
    assert "96.66 % of 300 sampled tokens are exact, 1,234 of them unhashed." in text
    for row in ("tokens not exactcontext_differs10", "steps maskedgreedy7", "breakshistory_edited1"):
        assert row in text


def test_text_of_a_model_never_becomes_markup(tmp_path):
    run_folder(tmp_path, metrics(1, 0.0))
    asyncio.run(record(tmp_path, 0, EVIL, reward=0.0))
    asyncio.run(record(tmp_path, 1, EVIL, reward=None))
    page = Tags(written(tmp_path))
    assert not {"script", "img", "iframe", "link", "object"} & set(page.names)
    assert not [name for name in page.attributes if name.startswith("on") or name in ("style", "src", "href")]
    assert "alert(1)" in page.text


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path):
    page = written(run_folder(tmp_path, metrics(1, 0.5)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy.group(1).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe-inline" not in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    page = Tags(written(run_folder(tmp_path)))
    assert "No step has been trained yet." in page.text
    assert "not finished" in page.text


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    run_folder(tmp_path, metrics(1, 0.25))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert Tags(written(tmp_path)).names.count("circle") == 1


def test_a_step_without_any_graded_rollout_leaves_a_gap(tmp_path):
    page = Tags(written(run_folder(tmp_path, metrics(1, 0.25), metrics(2, None), metrics(3, 0.5))))
    assert page.names.count("circle") == 2


def test_a_second_report_replaces_the_first(tmp_path):
    run_folder(tmp_path, metrics(1, 0.25))
    first = asyncio.run(write_report(tmp_path)).read_text()
    run_folder(tmp_path, metrics(1, 0.25), metrics(2, 0.5))
    path = asyncio.run(write_report(tmp_path))
    assert path == tmp_path / "report.html" and path.read_text() != first
    assert not (tmp_path / "report.html.new").exists()


def test_the_file_holds_the_static_page_and_scripts_that_its_policy_names(tmp_path):
    run_folder(tmp_path, metrics(1, 0.0))
    asyncio.run(record(tmp_path, 0, EVIL, reward=0.0))
    page = asyncio.run(write_report(tmp_path)).read_text()
    static, _, rest = page.partition('<script type="application/json" id="data"')
    assert "Mean reward per step" in static and "<script" not in static
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r'<script type="(?:module|text/javascript)">(.*?)</script>', rest, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2 and all(f"'sha256-{digest}'" in policy for digest in digests) and "unsafe" not in policy
    assert rest.count("</script>") == 3  # what the model said closes none


def test_reading_a_run_does_not_make_a_pool(tmp_path):
    written(run_folder(tmp_path))
    assert not (tmp_path / "pool.db").exists()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        asyncio.run(render_report(tmp_path))


def attempt(seq: int, reward: float | None) -> Attempt:
    rollout = make_rollout(f"train-{seq}", "t", 0)
    if reward is None:
        return Attempt(rollout=rollout, end=End.TIMEOUT)
    return Attempt(rollout=rollout, end=End.COMPLETED, grades=(Grade(rollout_id=rollout.id, reward=reward, source="g"),))


def test_transcripts_are_first_last_best_worst_and_the_last_failure_each_once():
    rewards = [0.5, 1.0, 0.0, 1.0, None, 0.75]
    groups = [Group(id=f"train-{i}", seq=i, task=TASK, channel="train", attempts=(attempt(i, r),)) for i, r in enumerate(rewards)]
    picked = {pick.why: pick.attempt.rollout.group_id for pick in choose_transcripts(groups)}
    assert picked == {"first": "train-0", "last": "train-5", "best": "train-3", "worst": "train-2", "failed": "train-4"}


def test_a_rollout_that_is_several_of_these_comes_once():
    only = [Group(id="train-0", seq=0, task=TASK, channel="train", attempts=(attempt(0, 1.0),))]
    assert [pick.why for pick in choose_transcripts(only)] == ["first, last, best, worst"]


@pytest.mark.parametrize("rewards", [[0.0], [3.0], [-1.0, 4.2], [5.0, 5.0, 5.0], [1e-9, 2.0], [-1e6, 1e6], [1.5, 1.5000001]])
def test_every_point_of_the_curve_lies_inside_its_frame(rewards):
    drawing = reward_curve([ChartPoint(step=i + 1, reward=r, title="") for i, r in enumerate(rewards)])
    heights = [float(y) for y in re.findall(r'cy="([-\d.]+)"', drawing)]
    assert len(heights) == len(rewards)
    assert all(11.9 <= y <= 230.1 for y in heights)
    assert 2 <= drawing.count('class="grid"') <= 8
