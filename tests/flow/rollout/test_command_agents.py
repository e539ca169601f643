"""`agent.command`: any program as an agent, recorded, graded, reported how it ended, and ended with all that it started."""

import asyncio
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cli_cases import called
from command_cases import TALK, TASK, attempted, make, prepared_rollout, write_program
from process_cases import Bell, gone, working_in

from penstock.config import AgentSection, load_config
from penstock.errors import ConfigError
from penstock.records import End

ROOT = Path(__file__).parents[3]
EXECUTORS = pytest.mark.parametrize("executor", ["inline", "process"])


def python(folder, text):
    (folder / "agent.py").write_text(TALK + text)
    return make(folder, sys.executable, "-I", "agent.py")


def shell(folder, text):
    return make(folder, write_program(folder, text))


@EXECUTORS
def test_program_is_recorded_graded_and_its_output_kept(renderer, tmp_path, executor):
    agent = python(tmp_path, "print(ask(json.load(sys.stdin)['prompt'])); print('done', file=sys.stderr)")
    attempt = attempted(renderer, agent, artifacts=tmp_path / "artifacts", executor=executor)
    assert (attempt.end, attempt.message, attempt.reward, len(attempt.steps)) == (End.COMPLETED, "", 0.5, 1)
    kept = tmp_path / "artifacts" / attempt.ref.id
    assert {file.name: file.read_text() for file in kept.iterdir()} == {
        "command-stdout.log": "6\n",
        "command-stderr.log": "done\n",
    }


@EXECUTORS
def test_program_gets_its_task_but_no_label_or_secrets(renderer, tmp_path, executor, monkeypatch):
    for name in ("PENSTOCK_ROLLOUT_TOKEN", "PGPASSWORD", "OPENAI_ORG_ID", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "a-secret-of-ours")
    monkeypatch.setenv("SEARCH_KEY", "a-key-for-its-tools")
    text = """
told = sys.stdin.read()
json.dump({"stdin": told, "env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}, open("told.json", "w"))
ask(json.loads(told)["prompt"])
"""
    attempt = attempted(renderer, python(tmp_path, text), artifacts=tmp_path / "artifacts", executor=executor)
    written = (tmp_path / "told.json").read_text()
    reported = json.loads(written)
    assert reported["stdin"] == reported["env"]["PENSTOCK_TASK"] and reported["cwd"] == str(tmp_path)
    expected = {"rollout_id": attempt.ref.id, "prompt": list(TASK.prompt), "metadata": {"kind": "easy"}, "config": {}}
    assert json.loads(reported["stdin"]) == expected
    assert reported["env"]["PENSTOCK_ROLLOUT_ID"] == attempt.ref.id
    assert not Path(reported["env"]["PENSTOCK_ARTIFACTS"]).is_relative_to(tmp_path)
    assert reported["env"]["SEARCH_KEY"] == "a-key-for-its-tools"
    assert "the-label-itself" not in written and "a-secret-of-ours" not in written and "fk-" not in written


def test_arguments_may_hold_question_and_workflow_table_is_reported(renderer, tmp_path):
    (tmp_path / "agent.py").write_text(
        f"{TALK}ask([{{'role': 'user', 'content': sys.argv[1]}}]); sys.stdin.seek(0)\n"
        "open('config', 'w').write(json.dumps(json.load(sys.stdin)['config']))"
    )
    agent = make(tmp_path, sys.executable, "agent.py", "Say: {prompt}", workflow={"turns": 2, "concurrency": {"max_concurrent": 1}})
    attempt = attempted(renderer, agent)
    assert attempt.nodes[0].messages[-1]["content"] == "Say: 2 times 3?"
    assert json.loads((tmp_path / "config").read_text()) == {"turns": 2}
    assert agent.workflow_config.concurrency.max_concurrent == 1


def test_task_too_large_for_a_variable_comes_on_stdin_alone(renderer, tmp_path):
    agent = python(
        tmp_path,
        "assert 'PENSTOCK_TASK' not in os.environ; ask([{'role': 'user', 'content': json.load(sys.stdin)['metadata']['x'][-1:]}])",
    )
    attempt = attempted(renderer, agent, task=replace(TASK, metadata={"x": "y" * 200_000}))
    assert (attempt.end, attempt.message) == (End.COMPLETED, "")


GARBAGE = "printf 'a\\377\\000\\nz\\377\\033[1m' >&2; head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2; echo no >&2; exit 1"
ENDS = {
    "exit 3": "agent ended with exit code 3",
    "echo one >&2; echo 'what went  wrong' >&2; echo >&2; exit 3": "agent ended with exit code 3: what went wrong",
    "echo 'TypeError: x is no y' >&2; echo '  at z' >&2; echo Runtime 1.2 >&2; exit 1": "exit code 1: TypeError: x is no y",
    "kill -SEGV $$": "agent was killed by SIGSEGV",
    GARBAGE: "agent ended with exit code 1: ",
    "exec 0<&- 1>&- 2>&-; exit 9": "agent ended with exit code 9",
    "exit 0": "made no model call",
}


@EXECUTORS
@pytest.mark.parametrize("text", ENDS)
def test_program_that_fails_ends_rollout_with_reason_in_one_line(renderer, tmp_path, text, executor):
    attempt = attempted(renderer, shell(tmp_path, text), executor=executor, artifacts=tmp_path / "artifacts")
    assert attempt.end is End.AGENT_ERROR
    assert ENDS[text] in attempt.message and "\n" not in attempt.message and len(attempt.message) < 600


STUBBORN = """
trap '' TERM
sleep 600 & kept=$!
trap 'exit 0' TERM
echo $$ $kept > bell
wait
"""
"""Ends when it is asked to, and leaves a child that does not."""


@EXECUTORS
def test_program_past_deadline_is_killed_with_that_it_started(renderer, tmp_path, executor):
    agent = shell(tmp_path, STUBBORN.replace("> bell", "> pids"))
    attempt = attempted(renderer, agent, executor=executor, agent_timeout_s=3)
    assert attempt.end is End.TIMEOUT
    assert len((tmp_path / "pids").read_text().split()) == 2 and gone(working_in(tmp_path))


@EXECUTORS
def test_cancelled_rollout_takes_its_program_with_it(renderer, tmp_path, executor):
    async def main():
        bell = Bell(tmp_path)
        async with prepared_rollout(renderer, shell(tmp_path, STUBBORN), executor=executor) as (attempt, pool):
            running = asyncio.create_task(attempt())
            await bell.line()
            processes = working_in(tmp_path)
            assert len(processes) >= 2
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await asyncio.to_thread(gone, processes)
            assert (await pool.rollout("train-0.0.1")).end is End.CANCELLED
        bell.close()

    asyncio.run(main())


def test_program_that_will_not_end_is_killed_within_the_grace(renderer, tmp_path):
    agent = shell(tmp_path, "trap '' TERM; echo $$ > pids; while :; do sleep 1; done")
    attempt = attempted(renderer, agent, agent_timeout_s=2)
    assert attempt.end is End.TIMEOUT and (tmp_path / "pids").exists() and gone(working_in(tmp_path))


def test_what_a_program_leaves_in_the_background_ends_with_it(renderer, tmp_path):
    agent = python(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('pids', 'w')); ask([])")
    attempted(renderer, agent)
    assert (tmp_path / "pids").exists() and gone(working_in(tmp_path))


def test_program_that_vanishes_fails_its_rollout_alone(renderer, tmp_path):
    agent = shell(tmp_path, "exit 0")
    (tmp_path / "agent").unlink()
    attempt = attempted(renderer, agent)
    assert attempt.end is End.AGENT_ERROR and "./agent cannot be started: No such file" in attempt.message


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), "names no program"),
        (("",), "names no program"),
        (("no-such-program-here",), "no program 'no-such-program-here' in $PATH; install it"),
        (("agent",), "no program 'agent' in $PATH; write './agent'"),
        (("./nowhere",), "no file"),
        (("./grader.py",), "may not be executed; chmod +x it"),
    ],
)
def test_missing_program_is_reported_before_anything_runs(tmp_path, command, words):
    write_program(tmp_path, "exit 0")
    with pytest.raises(ConfigError) as reported:
        make(tmp_path, *command)
    assert words in str(reported.value)


def test_settings_of_the_command_belong_under_agent(tmp_path):
    with pytest.raises(ConfigError, match=r"\[workflow\]"):
        make(tmp_path, "sh", workflow={"folder": "x"})


def test_no_process_of_ours_is_left(tmp_path, renderer):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    attempted(renderer, shell(tmp_path, "exit 5"))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


RUN = """
run.name = "short"
model.name = "tiny"
agent = {command = ["COMMAND", "agent.py"], entry = "graders/parity.py"}
dataset.train = "tasks.jsonl"
rollout = {group_size = 2, groups_per_step = 2, executor = "EXECUTOR"}
sampling.max_tokens = 4
train.steps = 2
"""
PARITY = """
from penstock import Grader

class Parity(Grader):
    async def grade(self, ctx):
        return float(len(ctx.sample.messages[-1]["content"] or "") % 2)
"""


@pytest.mark.slow
@EXECUTORS
def test_training_run_goes_over_program_from_folder_of_its_toml(tmp_path, executor):
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "parity.py").write_text(PARITY)
    (tmp_path / "agent.py").write_text(f"{TALK}ask(json.load(sys.stdin)['prompt']); print('made')")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n}*3"}) + "\n" for n in range(2, 6)))
    (tmp_path / "train.toml").write_text(RUN.replace("COMMAND", sys.executable).replace("EXECUTOR", executor))
    result = called(tmp_path, "train", "train.toml", "--json")
    reported = json.loads(result.stdout)
    assert (reported["status"], reported["steps"], reported["exact_token_rate"]) == ("finished", 2, 1.0), result.stderr
    kept = list((tmp_path / "runs" / "short" / "artifacts").rglob("command-stdout.log"))
    assert [file.read_text() for file in kept] == ["made\n"] * 8


@pytest.mark.slow
def test_training_run_without_its_program_is_refused_in_one_line(tmp_path):
    result = called(tmp_path, "train", ROOT / "examples/node/train.toml", "--set", 'agent.command=["no-such-program"]')
    assert (result.returncode, result.stderr.count("\n"), list(tmp_path.iterdir())) == (2, 1, [])
    assert "no program 'no-such-program' in $PATH; install it" in result.stderr


def test_page_shows_a_table_that_names_the_node_example():
    page = (ROOT / "docs/agents.md").read_text().partition("## A program in any language")[2]
    shown = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])["agent"]
    config = load_config(ROOT / "examples/node/train.toml")
    assert config.agent == AgentSection(
        entry=ROOT / "examples/node" / shown["entry"], command=tuple(shown["command"]), folder=ROOT / "examples/node"
    )
