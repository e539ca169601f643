"""`penstock eval` as its user runs it: to the end, stopped or killed and taken up again, compared, and with mistakes."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from cli_cases import environment, penstock
from eval_cases import attempts

from penstock.cli.app import run
from penstock.rollout.scheduler import Scheduler

AGENT = """
import asyncio
from pathlib import Path
from penstock import AgentWorkflow, Grader

class Asker(AgentWorkflow):
    async def run(self, ctx):
        if Path("broken").exists() and ctx.metadata["n"] == 1:
            raise ValueError("a tool is broken")
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class Even(Grader):
    async def grade(self, ctx):
        return float(ctx.metadata["n"] % 2 == 0)
"""
CONFIG = """
run.name = "asked"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
"""


pytestmark = pytest.mark.project(agent=AGENT, config=CONFIG, name="eval.toml")


def write_tasks(folder: Path, count: int) -> None:
    rows = [{"prompt": f"{n} times 3?", "metadata": {"n": n}} for n in range(count)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def result(capsys, *arguments: str, code: int = 0):
    """What the command printed as JSON."""
    capsys.readouterr()
    assert run(["eval", *arguments, "--json"]) == code, capsys.readouterr()
    said = capsys.readouterr()
    return json.loads(said.out or said.err.splitlines()[-1])


def stored_ids(folder: Path) -> dict[str, str]:
    """The ended rollouts of an evaluation, with their ends."""
    return {attempt.ref.id: str(attempt.end) for attempt in attempts(folder) if attempt.end is not None}


def test_the_first_attempt_goes_ahead_of_the_others(project, capsys):
    folder = Path(result(capsys, "run", "eval.toml")["folder"])
    events = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    reported = [kind for kind in events if kind in ("rollout.start", "rollout.end")]
    assert reported[:3] == ["rollout.start", "rollout.end", "rollout.start"]
    assert reported[3] == "rollout.start"  # the others go together


def test_evaluation_reports_its_numbers_and_is_not_made_twice(project, capsys):
    arguments = ("run", "eval.toml", "--samples", "3", "--set", "eval.k=[1,3]")
    found = result(capsys, *arguments)
    assert (found["status"], found["resumed"], found["outcome"]["ends"]) == ("finished", 0, {"completed": 12})
    assert (found["outcome"]["reward"]["value"], found["outcome"]["passes"]["3"]["value"]) == (0.5, 0.5)
    assert (found["outcome"]["steps"], found["model"]) == (12, "tiny")
    page = Path(found["report"]).read_text()
    assert "pass@3" in page and "Mean reward of each task" in page and "<script" not in page
    again = result(capsys, *arguments)
    assert (again["resumed"], again["outcome"]) == (12, found["outcome"])


def test_named_parts_of_the_reward_are_reported_with_an_evaluation(project, capsys):
    part = 'if ctx.metadata["n"] < 2: ctx.add_reward("format", 0.5)\n        return float('
    (project / "agent.py").write_text(AGENT.replace("return float(", part))
    found = result(capsys, "run", "eval.toml")
    assert (found["outcome"]["reward"]["value"], found["outcome"]["components"]["format"]["value"]) == (0.75, 0.25)
    assert "<h2>Parts of the reward</h2>" in Path(found["report"]).read_text()
    run(["eval", "run", "eval.toml"])
    assert "    format    0.250   95 % between" in capsys.readouterr().out
    run(["eval", "run", "eval.toml", "--plain"])
    assert "component.format\t0.25\t" in capsys.readouterr().out


def test_notices_are_in_every_summary_and_report(project, capsys):
    (project / "eval.toml").write_text(CONFIG + "sampling.max_tokens = 2\n")
    found = result(capsys, "run", "eval.toml")
    assert found["notices"] == {"capped:max_tokens": 4, "finish:length": 4}
    assert json.loads((Path(found["folder"]) / "summary.json").read_text())["notices"] == found["notices"]
    page = Path(found["report"]).read_text()
    assert "<h2>What was not done as agents asked</h2>" in page and "finish:length" in page
    run(["eval", "run", "eval.toml"])
    assert "not done    calls: 4 capped:max_tokens, 4 finish:length" in capsys.readouterr().out
    assert lines(capsys, "run", "eval.toml")["not_done.finish:length"][0] == "4"


def test_evaluation_reads_its_dataset_once_and_makes_no_training_scheduler(project, capsys, monkeypatch):
    opened, plain_open = list[Path](), Path.open

    def counted_open(self: Path, *args, **kwargs):
        opened.append(self)
        return plain_open(self, *args, **kwargs)

    def no_scheduler(*args: object, **kwargs: object) -> None:
        raise AssertionError("an evaluation made a Scheduler")

    # patched, as neither reads nor constructions leave a trace that could be asked for
    monkeypatch.setattr(Path, "open", counted_open)
    monkeypatch.setattr(Scheduler, "__init__", no_scheduler)
    assert result(capsys, "run", "eval.toml")["outcome"]["ends"] == {"completed": 4}
    reads = [path for path in opened if path.name == "tasks.jsonl"]
    assert len(reads) == 2  # its rows once, and its bytes once for the checksum in the folder's config.json


def test_text_names_the_folder_and_what_to_do_next(project, capsys):
    assert run(["eval", "run", "eval.toml", "--rows", "0,2-3"]) == 0
    out, err = capsys.readouterr()
    assert "3 tasks x 1 of tiny" in out and "0.667" in out and "penstock eval compare runs/evals/asked" in out
    assert "next        penstock train eval.toml" in out
    assert "3/3 rollouts" in err


def lines(capsys, *arguments: str) -> dict[str, list[str]]:
    """What the command printed with --plain: the columns of each line by its name."""
    capsys.readouterr()
    assert run(["eval", *arguments, "--plain"]) == 0
    found = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) == 4 for line in found)
    return {name: columns for name, *columns in found}


def test_plain_lines_have_a_name_a_value_and_bounds(project, capsys):
    found = lines(capsys, "run", "eval.toml", "--name", "one")
    assert (found["reward"][0], found["status"][0], found["end.completed"][0]) == ("0.5", "finished", "4")
    assert 0.0 <= float(found["pass@1"][1]) <= 0.5 <= float(found["pass@1"][2]) <= 1.0
    assert found["cost"] == ["", "", ""] and int(found["prompt_tokens"][0]) > int(found["completion_tokens"][0]) > 0
    assert float(found["rollout_s.p95"][0]) >= float(found["call_s.p50"][0]) > 0
    again = lines(capsys, "regrade", "runs/evals/one", "--name", "two")
    assert again["reward"] == found["reward"] and again["folder"][0] == "runs/evals/two"
    pair = lines(capsys, "compare", "runs/evals/one", "runs/evals/two")
    assert (pair["difference"], pair["p"][0], pair["a.reward"][0], pair["b.steps"][0]) == (["0", "0", "0"], "1", "0.5", "4")
    assert run(["eval", "compare", "runs/evals/one", "runs/evals/two", "--plain", "--json"]) == 2


def test_without_a_file_an_agent_and_a_dataset_are_enough(project, capsys):
    flags = ("--agent", "agent.py", "--dataset", "tasks.jsonl", "--model", "tiny", "--name", "plain")
    found = result(capsys, "run", *flags, "--set", "engine.name='cli_engine:open_engine'")
    assert (found["folder"], found["outcome"]["rollouts"]) == ("runs/evals/plain", 4)


def test_changed_inputs_are_rejected_with_difference_and_fresh_keeps_old(project, capsys):
    result(capsys, "run", "eval.toml")
    refused = result(capsys, "run", "eval.toml", "--samples", "2", code=2)
    assert "eval.samples = 1, now it is 2" in refused["error"]["message"]
    refused = result(capsys, "run", "eval.toml", "--set", "rollout.agent_timeout_s=1", code=2)
    assert "rollout.agent_timeout_s = 120.0, now it is 1.0" in refused["error"]["message"]
    assert result(capsys, "run", "eval.toml", "--concurrency", "2")["resumed"] == 4
    write_tasks(project, 5)
    assert "when tasks.jsonl was another" in result(capsys, "run", "eval.toml", code=2)["error"]["message"]
    assert result(capsys, "run", "eval.toml", "--fresh")["outcome"]["rollouts"] == 5
    assert len(stored_ids(project / "runs/evals/asked.old1")) == 4


def test_edited_agent_is_not_taken_for_one_that_was_measured(project, capsys):
    result(capsys, "run", "eval.toml")
    (project / "agent.py").write_text(AGENT.replace("% 2 == 0", "% 2 == 1"))
    assert "when agent.py was another" in result(capsys, "run", "eval.toml", code=2)["error"]["message"]


def test_failed_attempts_are_reported_and_made_again_on_request(project, capsys):
    (project / "broken").touch()
    found = result(capsys, "run", "eval.toml")["outcome"]
    assert (found["ends"], found["reward"]["value"]) == ({"completed": 3, "agent_error": 1}, 0.5)
    assert "a tool is broken" in next(iter(found["reasons"]["agent_error"]))
    (project / "broken").unlink()
    assert result(capsys, "run", "eval.toml")["outcome"]["ends"] == found["ends"]
    assert result(capsys, "run", "eval.toml", "--retry-failed")["outcome"]["ends"] == {"completed": 4}
    assert stored_ids(project / "runs/evals/asked")["eval-1.0.2"] == "completed"


def test_evaluation_with_only_failures_is_a_failure(project, capsys):
    (project / "agent.py").write_text(AGENT.replace("if Path", "raise ValueError('a tool is broken')\n        if Path"))
    assert run(["eval", "run", "eval.toml"]) == 1
    out, err = capsys.readouterr()
    assert "first rollout to end agent_error: eval-0.0.1: workflow 'Asker': ValueError: a tool is broken (agent.py, line" in err
    last = err.splitlines()[-1]  # which is what a controller shows as the reason
    assert last.startswith("penstock: no rollout completed: failed 4 (agent_error: workflow 'Asker': ValueError: a tool is broken")
    assert "Evaluation asked failed" in out
    assert "no rollout was graded" in out
    assert "penstock train" not in out
    assert result(capsys, "run", "eval.toml", code=1)["outcome"]["ends"] == {"agent_error": 4}


def test_two_evaluations_are_compared_task_by_task(project, capsys):
    result(capsys, "run", "eval.toml", "--name", "one", "--rows", "0-2")
    (project / "agent.py").write_text(AGENT.replace("% 2 == 0", "< 9"))
    result(capsys, "run", "eval.toml", "--name", "two")
    found = result(capsys, "compare", "runs/evals/one", "runs/evals/two")
    assert (found["tasks"], found["better"], found["worse"], found["left_out"]) == (3, 1, 0, 1)
    assert found["difference"]["value"] == pytest.approx(1 / 3) and found["difference"]["p"] == 1.0
    assert run(["eval", "compare", "runs/evals/one", "runs/evals/two"]) == 0
    assert "may be chance" in capsys.readouterr().out


def test_another_grader_judges_the_same_rollouts_without_a_model_call(project, capsys):
    (project / "broken").touch()
    result(capsys, "run", "eval.toml", "--samples", "2")
    (project / "other.py").write_text(
        AGENT.replace("% 2 == 0", "% 2 == 1").replace("return float", "assert ctx.metadata['n'] < 3\n        return float")
    )
    found = result(capsys, "regrade", "runs/evals/asked", "--agent", "other.py")
    assert found["folder"] == "runs/evals/asked-regraded"
    assert found["outcome"]["ends"] == {"completed": 4, "agent_error": 2, "grader_error": 2}
    assert (found["outcome"]["reward"]["value"], found["outcome"]["steps"]) == (0.0, 6)
    assert result(capsys, "regrade", "runs/evals/asked", "--agent", "other.py") == found
    assert stored_ids(project / "runs/evals/asked").keys() == stored_ids(project / "runs/evals/asked-regraded").keys()
    assert run(["eval", "regrade", "runs/evals/asked", "--fresh"]) == 0
    assert "eval compare runs/evals/asked runs/evals/asked-regraded" in capsys.readouterr().out


def test_a_file_with_a_grader_alone_can_grade_again(project, capsys):
    result(capsys, "run", "eval.toml")
    (project / "grader.py").write_text(
        "from penstock import Grader\n\nclass One(Grader):\n    async def grade(self, ctx):\n        return 1.0\n"
    )
    found = result(capsys, "regrade", "runs/evals/asked", "--agent", "grader.py")
    assert (found["outcome"]["ends"], found["outcome"]["reward"]["value"]) == ({"completed": 4}, 1.0)
    summary = json.loads((project / "runs/evals/asked-regraded/summary.json").read_text())
    assert (summary["status"], summary["outcome"]) == ("finished", found["outcome"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "none.toml"], "no such file"),
        (["run"], "name a config file, or give --agent and --dataset"),
        (["run", "eval.toml", "--agent", "agent.py"], "--agent goes without a file"),
        (["run", "eval.toml", "--rows", "0-4"], "has rows 0 to 3, not 4"),
        (["run", "eval.toml", "--rows", "first"], "write rows and ranges, such as 0-9,17"),
        (["run", "eval.toml", "--set", "eval.k=[2]"], "pass@2"),
        (["run", "eval.toml", "--set", "pool.name='memory'"], "use 'sqlite'"),
        (["run", "eval.toml", "--set", "eval.processes=2"], "rollout.executor"),
        (["run", "eval.toml", "--set", "eval.sample=2"], "did you mean 'samples'"),
        (["run", "eval.toml", "--dataset", "none.jsonl"], "none.jsonl"),
        (["run", "eval.toml", "--samples", "0"], "eval.samples"),
        (["compare", "runs/none", "runs/none"], "not an evaluation"),
        (["regrade", "runs/none"], "not an evaluation"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(project, capsys, arguments, said):
    assert said in result(capsys, *arguments, code=2)["error"]["message"]
    assert not (project / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_stops_and_the_same_command_continues(project, capsys):
    (project / "tasks.jsonl").write_text('{"prompt": "stall", "metadata": {"n": 0}}\n{"prompt": "go", "metadata": {"n": 1}}\n')
    command = penstock("eval", "run", "eval.toml", "--json")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        for line in process.stderr:
            if line.startswith("1/2"):
                process.send_signal(signal.SIGINT)
        found = json.loads(process.stdout.read())
    assert (process.returncode, found["status"], found["outcome"]["rollouts"]) == (130, "stopped", 2)
    assert stored_ids(project / "runs/evals/asked") == {"eval-0.0.1": "cancelled", "eval-1.0.1": "completed"}
