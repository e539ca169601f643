"""`penstock train` as its user runs it: to the end, stopped by Ctrl-C and taken up again, and when every rollout fails."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_cases import called

from penstock.testing import AGENT
from penstock.view.overview import metrics_columns
from penstock.view.run_files import open_viewed_run

CONFIG = """
run.name = "short"
model.name = "tiny"
dataset = {train = "tasks.jsonl", eval = "tasks.jsonl"}
rollout = {group_size = 2, groups_per_step = 2}
train.steps = 2
"""


pytestmark = [pytest.mark.slow, pytest.mark.project(config=CONFIG)]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("penstock")), "train", "train.toml", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = called(folder, "train", "train.toml", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_run_ends_with_summary_and_report_once(project):
    process = started(project, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["status"], summary["steps"], summary["exact_token_rate"]) == ("finished", 2, 1.0)
    assert (project / summary["report"]).is_file()
    assert (project / summary["checkpoint"]).is_dir()
    assert "step 2/2  reward" in err
    code, out, _ = finished(project)
    assert code == 0
    assert "finished earlier" in out
    assert "--fresh" in out


def test_named_parts_of_reward_are_in_metrics_report_and_dashboard(project):
    agent = AGENT.replace("return float(", 'ctx.add_reward("format", 0.25)\n        return float(')
    (project / "agent.py").write_text(agent)
    code, _, err = finished(project)
    assert code == 0, err
    assert "  format 0.250  groups" in err
    entries = [json.loads(line) for line in (project / "runs/short/metrics.jsonl").read_text().splitlines()]
    assert [entry["components/format"] for entry in entries] == [0.25, 0.25]
    assert all(reward in (0.25, 1.25) for entry in entries for reward in entry["rewards"])
    assert "components/format" in (project / "runs/short/report.html").read_text()
    run = open_viewed_run(project / "runs/short")
    run.refresh()
    assert metrics_columns(run)["columns"]["components/format"] == [0.25, 0.25]


def test_ctrl_c_once_stops_after_step_and_same_command_continues(project):
    process = started(project, "--set", "train.steps=10000")
    assert process.stderr is not None
    next(line for line in process.stderr if line.startswith("step "))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Stopping after this step." in err
    assert "stopped safely after step" in out
    steps = json.loads((project / "runs/short/summary.json").read_text())["steps"]
    code, out, err = finished(project, "--set", f"train.steps={steps + 1}")
    assert code == 0, err
    assert f"taken up again after step {steps}" in err
    assert f"finished: {steps + 1} steps" in out


def test_one_sigterm_ends_a_waiting_run(project):
    (project / "agent.py").write_text(AGENT.replace('print("an agent may print")', "await __import__('asyncio').sleep(3600)"))
    (project / "train.toml").write_text(CONFIG.replace(', eval = "tasks.jsonl"', ""))
    process = started(project, "--set", "rollout.agent_timeout_s=3600")
    log, deadline = project / "runs/short/events.jsonl", time.monotonic() + 120
    while not (log.exists() and b'"kind":"rollout.start"' in log.read_bytes()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_run_with_only_failures_ends_with_the_reason(project):
    (project / "agent.py").write_text(AGENT.replace('print("an agent may print")', 'raise ValueError("no such tool")'))
    code, out, err = finished(project)
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("penstock: all 4 rollouts")
    assert "no such tool" in last
    assert "Traceback" not in err


def test_edited_grader_is_rejected_unless_allowed(project):
    assert finished(project)[0] == 0
    agent = project / "agent.py"
    agent.write_text(agent.read_text().replace("% 2)", "% 3)"))
    code, out, err = finished(project, "--set", "train.steps=3")
    assert (code, out) == (2, "")
    assert 'agent.py, line 12: +         return float(len(ctx.sample.messages[-1]["content"] or "") % 3)' in err
    code, out, err = finished(project, "--set", "train.steps=3", "--allow-code-change")
    assert code == 0, err
    assert "the code changed after step 2 (agent.py)" in out
    metrics = [json.loads(line) for line in (project / "runs/short/metrics.jsonl").read_text().splitlines()]
    assert [entry["code_changes"] for entry in metrics] == [0, 0, 1]
    assert "the code changed after step 2 (agent.py)" in (project / "runs/short/report.html").read_text()


def test_run_that_learns_nothing_says_why_and_exit_code_reports(project):
    agent = project / "agent.py"
    agent.write_text(agent.read_text().replace('return float(len(ctx.sample.messages[-1]["content"] or "") % 2)', "return 0.0"))
    code, out, err = finished(project, "--set", "train.steps=5")
    assert code == 3, err
    assert "step 5: no update in the last 5 steps: all rewards equal, every one is 0" in err
    assert "finished and learned nothing" in out
    assert "most common" in " ".join(out.split())
    summary = json.loads((project / "runs/short/summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("finished", 0)
