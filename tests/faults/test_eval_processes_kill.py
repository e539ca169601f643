"""An evaluation in several processes whose parent is killed: they end too, and the same command repeats nothing that had ended."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from test_eval_kill import AGENT, CONFIG, ends, evaluate, place, started
from test_writer_process_kill import writer_process_of

from penstock.records import End

ROWS, SAMPLES, PROCESSES = 60, 4, 3
BLOCKED = """
        if name == "eval-20.0.1":
            import time
            time.sleep(1000)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT.replace("{os.environ['LIFE']}", "{os.environ['LIFE']} {os.getpid()}"))
    (tmp_path / "eval.toml").write_text(f"{CONFIG}\neval.processes = {PROCESSES}\n")
    rows = [{"prompt": f"{n} times 3?", "metadata": {"n": n}} for n in range(ROWS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def completed(project: Path) -> set[str]:
    """By place in a group: the same for every attempt at it."""
    return {place(name) for name, end in asyncio.run(ends(project)).items() if end is End.COMPLETED}


def ledger(project: Path) -> list[list[str]]:
    """Life, process and name of each rollout that was begun."""
    return [line.split(" ") for line in (project / "ledger").read_text().splitlines()]


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has looked after yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_deaths(pids: set[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while alive := {pid for pid in pids if lives(pid)}:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)  # a poll with a deadline: they are no children of this process


@pytest.mark.slow
def test_processes_end_with_their_parent_and_nothing_that_had_ended_is_run_again(project: Path) -> None:
    evaluate(project, 1, kill=True)
    pids = {int(pid) for _, pid, _ in ledger(project)}
    assert len(pids) == PROCESSES
    await_deaths(pids, within_s=60.0)
    ended, total = completed(project), ROWS * SAMPLES
    assert 0 < len(ended) < total
    found = json.loads(evaluate(project, 2, kill=False))
    assert (found["status"], found["resumed"], found["outcome"]["ends"]) == ("finished", len(ended), {"completed": total})
    names = [name for _, _, name in ledger(project)]
    assert len(names) == len(set(names)) and {place(name) for name in names} == completed(project)
    assert {place(name) for life, _, name in ledger(project) if life == "2"} & ended == set()


@pytest.mark.slow
def test_the_same_command_right_after_a_kill_waits_for_processes_that_do_not_let_go_and_goes_on(project: Path) -> None:
    agent = project / "agent.py"  # never lets go of its event loop
    agent.write_text(agent.read_text().replace("        await ctx.openai()", f"{BLOCKED}        await ctx.openai()"))
    evaluate(project, 1, kill=True)
    found = json.loads(evaluate(project, 2, kill=False))
    assert not any(lives(int(pid)) for life, pid, _ in ledger(project) if life == "1")
    assert (found["status"], found["outcome"]["ends"]) == ("finished", {"completed": ROWS * SAMPLES})
    again = [name for life, _, name in ledger(project) if life == "2"]
    assert len(again) == len(set(again)) == ROWS * SAMPLES - found["resumed"]


@pytest.mark.slow
def test_where_the_process_that_writes_for_all_is_killed_the_command_says_so_and_the_same_one_goes_on(project: Path) -> None:
    with started(project, 1, held_row=ROWS - 1) as process:
        said, writer = list[str](), None
        for line in process.stderr:
            said.append(line)
            if writer is None and "/" in line.partition(" ")[0] and int(line.partition("/")[0]) >= 60:
                writer = writer_process_of(process.pid)
                writer.kill()
        assert process.wait(60) == 1 and "Traceback" not in "".join(said)
        assert "the process that writes to the pool has ended" in json.loads(said[-1])["error"]["message"]
    ended = completed(project)
    assert 60 <= len(ended) < ROWS * SAMPLES
    found = json.loads(evaluate(project, 2, kill=False))
    assert (found["status"], found["outcome"]["ends"]) == ("finished", {"completed": ROWS * SAMPLES})
    assert {place(name) for life, _, name in ledger(project) if life == "2"} & ended == set()
