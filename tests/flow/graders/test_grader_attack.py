"""Attacks on graders: weak ones are found out, those of the examples hold, and a grader that hangs or dies costs a finding only."""

import json
from pathlib import Path

import orjson
import pytest

from penstock.cli.app import run
from penstock.config import load_config
from penstock.errors import ConfigError
from penstock.run.grader_attack import AttackReport, attack_grader, read_tasks, spread

EXAMPLES = Path(__file__).parents[3] / "examples"

HEAD = """
import os, re
from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

class Agent(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> None:
        pass

class Score(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        sample = ctx.sample
        last = sample.transcript[-1].get("content") or ""
"""
WEAK = {
    "substring": ("label", 'ctx.set_reward(float((ctx.label or "?") in last))'),
    "number anywhere": ("enormous", 'ctx.set_reward(float((ctx.label or "?") in re.findall(r"\\d+", last)))'),
    "format is enough": ("bait", r'ctx.set_reward(float("\\boxed{" in last))'),
    "not wrong is right": (
        "bait",
        "value = float(last) if re.fullmatch(r'[-\\d.]+|nan|inf', last) else 1e9\n"
        "        ctx.set_reward(0.0 if abs(value - float(ctx.label)) > 0.5 else 1.0)",
    ),
    "reads the tool": (
        "tool",
        'ctx.set_reward(float(any((ctx.label or "?") in str(m.get("content")) for m in sample.transcript)))',
    ),
    "longer is better": ("enormous", "ctx.set_reward(min(1.0, len(last) / 1000))"),
    "silence is no fault": ("empty", "ctx.set_reward(0.0 if last.strip() and last.strip() != ctx.label else 1.0)"),
    "believes a verdict": ("bait", 'ctx.set_reward(float(last.strip() == ctx.label or "correct" in last.lower()))'),
    "echo": ("echo", "ctx.set_reward(float(all(word in last for word in sample.transcript[0]['content'].split())))"),
    "invisible": ("unicode", "ctx.set_reward(float(not last.isascii() or last.strip() == ctx.label))"),
}


def project(folder: Path, body: str) -> Path:
    (folder / "agent.py").write_text(f"{HEAD}        {body}\n")
    rows = [{"prompt": f"What is {n} times 7?", "label": str(n * 7)} for n in range(11, 60)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "train.toml"
    file.write_text('[run]\nname = "weak"\n[agent]\nentry = "agent.py"\n[dataset]\ntrain = "tasks.jsonl"\n')
    return file


def attacked(file: Path, **options: float) -> AttackReport:
    config = load_config(file)
    return attack_grader(config, read_tasks(config), count=3, **options)


@pytest.mark.parametrize("name", WEAK)
def test_a_weak_grader_is_found_out(tmp_path: Path, name: str) -> None:
    kind, body = WEAK[name]
    report = attacked(project(tmp_path, body))
    assert kind in {found.kind for found in report.holes}, report
    assert report.tried == report.planned and report.tasks == 3


def test_a_strict_grader_has_no_hole(tmp_path: Path) -> None:
    report = attacked(project(tmp_path, "ctx.set_reward(float(last.strip() == ctx.label))"))
    assert not report.holes and not report.partial and not report.failing
    assert report.honest == 1.0
    assert report.ignorant == pytest.approx(1 / 49)  # always the same answer, of 49


def test_credit_for_form_alone_is_reported_but_is_no_hole(tmp_path: Path) -> None:
    body = "ctx.set_reward(0.1 * last.startswith('#') + float(last.removeprefix('####').strip() == ctx.label))"
    report = attacked(project(tmp_path, body))
    assert not report.holes
    assert "bare formats" in {found.name for found in report.partial}


def test_grader_that_raises_hangs_or_dies_is_reported_with_reply(tmp_path: Path) -> None:
    body = (
        "if len(last) > 500_000: os._exit(7)\n"
        "        if last == 'nan': \n            import time; time.sleep(60)\n"
        "        int(last) if last.isdigit() else 0\n"
        "        ctx.set_reward(float(last.strip() == ctx.label))"
    )
    config = load_config(project(tmp_path, body))
    report = attack_grader(config, read_tasks(config), count=1, limit_s=60)
    failing = {found.name: found.error for found in report.failing}
    assert report.tried == report.planned
    assert not report.holes
    assert "ended its process" in failing["one letter"]
    assert "longer than" in failing["nan"]
    assert "Exceeds the limit" in failing["one number of many digits"]  # int() of 100,000 digits


@pytest.mark.parametrize("example", ["multiply", "search", "command", "node", "team", "gsm8k"])
def test_the_graders_of_the_examples_hold(example: str) -> None:
    config = load_config(EXAMPLES / example / "train.toml")
    if config.agent.command:  # its program need not be installed: only the grader is wanted
        config = config.model_copy(update={"agent": config.agent.model_copy(update={"command": ("true",)})})
    report = attack_grader(config, read_tasks(config), count=4)
    assert report.holes == ()
    assert report.failing == ()
    assert report.honest == 1.0


def test_an_agent_that_grades_itself_is_refused() -> None:
    config = load_config(EXAMPLES / "flow" / "train.toml")
    with pytest.raises(ConfigError, match="rollouts"):
        attack_grader(config, read_tasks(config), count=1)


def test_file_that_cannot_be_loaded_is_rejected_as_by_run(tmp_path: Path) -> None:
    file = project(tmp_path, "pass")
    (tmp_path / "agent.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="nothing_of_that_name"):
        attacked(file)


def test_the_time_is_kept(tmp_path: Path) -> None:
    report = attacked(project(tmp_path, "import asyncio; await asyncio.sleep(0.5); ctx.set_reward(1.0)"), limit_s=2.0)
    assert 0 < report.tried < report.planned


def test_the_command_exits_with_1_and_names_the_hole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = project(tmp_path, WEAK["format is enough"][1])
    assert run(["grader", "attack", str(file), "--tasks", "2"]) == 1
    assert "HOLE" in capfd.readouterr().out
    assert run(["grader", "attack", str(file), "--tasks", "2", "--json"]) == 1
    found = orjson.loads(capfd.readouterr().out)
    assert {"kind": "bait", "name": "bare formats"}.items() <= found["holes"][0].items()


def test_tasks_are_spread_over_labels(tmp_path: Path) -> None:
    tasks = read_tasks(load_config(project(tmp_path, "pass")))
    doubled = [*tasks[:1] * 20, *tasks]
    assert len({task.label for task in spread(doubled, 8)}) == 8
    assert spread(tasks[:1], 8) == tasks[:1]
