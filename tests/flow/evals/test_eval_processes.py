"""`penstock eval run --processes`: several processes share the work, and whatever happens to one, every attempt ends once."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from eval_cases import attempts

from penstock.cli.app import run
from penstock.config import load_config
from penstock.evals import processes
from penstock.evals.run import Evaluation, evaluate, evaluation_config
from penstock.run.inputs import read_inputs

ROWS = 8
ENGINE = """
import os, sys
from pathlib import Path
from penstock.errors import ConfigError
from penstock.chat.tokenizer import Tokenizer
from penstock.testing import ScriptedEngine

def open_engine(folder, *, name, **_):
    tokenizer = Tokenizer.load(folder)
    return ScriptedEngine(lambda prompt: "so it is", tokenizer, model=name)

def refuse(folder, **_):
    raise ConfigError("there is no such server; start it")

def die(folder, **_):
    os.write(2, b"out of luck\\n")
    os._exit(3)

def die_before_answering(folder, *, name, **_):
    main = sys.modules["__main__"]  # no seam lies between the end on disk and its telling; this is the process that runs rollouts
    flush = main.LineWriter.flush

    def dies(teller):
        if any(b"rollout.end" in line and b"eval-2.0.1" in line for line in teller._lines):
            os._exit(9)
        flush(teller)

    main.LineWriter.flush = dies
    return open_engine(folder, name=name)
"""
AGENT = """
import asyncio, os, signal, sys
from pathlib import Path
from penstock import AgentWorkflow, Grader, get_rollout_context

class Asker(AgentWorkflow):
    async def run(self, ctx):
        print(f"{get_rollout_context().rollout_id} reads {sys.stdin.read()!r}")
        with open("ledger", "a") as ledger:
            ledger.write(f"{os.getpid()} {get_rollout_context().rollout_id}\\n")
        if ctx.metadata["n"] == 3 and Path("murder").exists():
            Path("murder").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (ctx.metadata["n"] == 5 and Path("poison").exists()) or Path("plague").exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)
        while ctx.metadata["n"] and Path("hold").exists():
            await asyncio.sleep(0.01)

class Even(Grader):
    async def grade(self, ctx):
        return float(ctx.metadata["n"] % 2 == 0)
"""
COUNTED = """
import asyncio, os
from penstock import AgentWorkflow, Grader

class Counter(AgentWorkflow):
    running = 0

    async def run(self, ctx):
        Counter.running += 1
        with open("ledger", "a") as ledger:
            ledger.write(f"{os.getpid()} {Counter.running}\\n")
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)
        await asyncio.sleep(0.02)
        Counter.running -= 1

class Any(Grader):
    async def grade(self, ctx):
        return 1.0
"""
CONFIG = """
run.name = "shared"
model.name = "tiny"
engine.name = "own_engine:open_engine"
dataset.train = "tasks.jsonl"
rollout.concurrency = 4
eval.processes = 2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"is {n} even?", "metadata": {"n": n}} for n in range(ROWS)]
    files = {"own_engine.py": ENGINE, "agent.py": AGENT, "eval.toml": CONFIG}
    files["tasks.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def evaluated(*overrides: str, stop_at: str = "") -> tuple[Evaluation, list[tuple[str, dict[str, Any]]]]:
    """An evaluation, stopped at the first event of that kind; what it came to, and what was told of it."""
    config = evaluation_config(load_config(Path("eval.toml"), overrides))
    told: list[tuple[str, dict[str, Any]]] = []

    async def work() -> Evaluation:
        stop = asyncio.Event()

        def listen(kind: str, fields: dict[str, Any]) -> None:
            told.append((kind, fields))
            _ = kind == stop_at and stop.set()

        return await evaluate(config, read_inputs(config, listen, all_heldout=True), listener=listen, stop=stop)

    return asyncio.run(work()), told


def ledger() -> list[list[str]]:
    """The process and the rollout of each workflow that was begun."""
    return [line.split() for line in Path("ledger").read_text().splitlines()]


def stored() -> dict[str, str]:
    """The attempts that count, with their ends."""
    return {attempt.rollout.id: str(attempt.end) for attempt in attempts(Path("runs/evals/shared"))}


def ends(told: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """How rollouts ended, as it was told: each begun one once, to who listens and in the file alike."""
    file = [json.loads(line) for line in Path("runs/evals/shared/events.jsonl").read_text().splitlines()]
    for kind in ("rollout.start", "rollout.end"):
        heard = [fields["rollout_id"] for own, fields in told if own == kind]
        assert sorted(heard) == sorted(event["rollout_id"] for event in file if event["kind"] == kind)
    begun = Counter(fields["rollout_id"] for kind, fields in told if kind == "rollout.start")
    over = {fields["rollout_id"]: str(fields["end"]) for kind, fields in told if kind == "rollout.end"}
    assert set(begun.values()) == {1} and begun.keys() == over.keys()
    return over


def test_two_processes_share_the_work_and_tell_it_in_one_file(project: Path) -> None:
    found, told = evaluated()
    assert (found.status, found.outcome.ends, found.outcome.reward.value) == ("finished", {"completed": ROWS}, 0.5)
    assert ends(told) == stored() == {f"eval-{n}.0.1": "completed" for n in range(ROWS)}
    assert len({pid for pid, _ in ledger()}) == 2 and len(ledger()) == ROWS
    assert [fields["text"] for kind, fields in told if kind == "stage"].count("loading tiny") == 1
    assert found.notices == {}
    said = "".join((project / f"runs/evals/shared/process-{n}.log").read_text() for n in range(2))
    assert all(f"eval-{n}.0.1 reads ''" in said for n in range(ROWS))


def test_what_was_not_done_as_asked_is_summed_up_over_all_processes(project: Path) -> None:
    found, _ = evaluated("sampling.max_tokens=2")
    assert found.notices == {"capped:max_tokens": ROWS, "finish:length": ROWS}


@pytest.mark.slow
def test_what_a_killed_process_ran_is_made_again_by_others(project: Path) -> None:
    (project / "murder").touch()
    found, told = evaluated()
    over, counts = ends(told), stored()
    assert (found.outcome.ends, found.outcome.reward.value) == ({"completed": ROWS}, 0.5)
    assert {name for name, end in over.items() if end == "completed"} == counts.keys()
    assert (over["eval-3.0.1"], counts["eval-3.0.2"], len(counts)) == ("lost", "completed", ROWS)
    assert "SIGKILL" in next(fields["text"] for kind, fields in told if kind == "stage" and "process" in fields["text"])
    assert len({pid for pid, _ in ledger()}) == 3


def test_an_end_that_its_process_could_not_tell_counts(project: Path) -> None:
    _, told = evaluated("engine.name=own_engine:die_before_answering")
    assert stored() == {f"eval-{n}.0.{2 if ends(told).get(f'eval-{n}.0.1') == 'lost' else 1}": "completed" for n in range(ROWS)}
    (heard,) = [fields for kind, fields in told if kind == "rollout.end" and fields["rollout_id"] == "eval-2.0.1"]
    assert (heard["end"], heard["reward"]) == ("completed", 1.0)


@pytest.mark.slow
def test_a_rollout_that_kills_each_process_is_lost_and_the_others_go_on(project: Path) -> None:
    (project / "poison").touch()
    found, told = evaluated("rollout.retries=1", "rollout.concurrency=2", "eval.rows=0,1,2,5")
    assert stored()["eval-5.0.2"] == "lost" and found.outcome.ends["lost"] >= 1
    assert sum(found.outcome.ends.values()) == 4 and ends(told)["eval-0.0.1"] == "completed"


@pytest.mark.slow
def test_where_every_process_dies_the_evaluation_ends_with_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "plague").touch()
    assert run(["eval", "run", "eval.toml", "--set", "rollout.retries=99", "--concurrency", "2"]) == 1
    said = capsys.readouterr().err
    assert "6 processes in a row died before a rollout ended, the last one was killed by SIGSEGV" in said
    (project / "plague").unlink()
    assert evaluated()[0].outcome.ends == {"completed": ROWS}


@pytest.mark.slow
def test_a_stop_undoes_what_runs_and_the_next_one_goes_on_with_another_number_of_processes(project: Path) -> None:
    (project / "hold").touch()
    found, told = evaluated(stop_at="rollout.end")
    assert found.status == "stopped"
    assert set(ends(told).values()) <= {"completed", "cancelled"} and stored()["eval-0.0.1"] == "completed"
    (project / "hold").unlink()
    done = [name for name, end in stored().items() if end == "completed"]
    again, _ = evaluated("eval.processes=3")
    assert (again.status, again.resumed, again.outcome.ends) == ("finished", len(done), {"completed": ROWS})
    assert all(sum(name == begun for _, begun in ledger()) == 1 for name in done)


def test_no_more_run_at_once_than_their_share_however_many_wait_there(project: Path) -> None:
    (project / "agent.py").write_text(COUNTED)
    rows = [{"prompt": f"is {n} even?", "metadata": {"n": n}} for n in range(60)]
    (project / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = evaluated("rollout.concurrency=9")
    assert found.outcome.ends == {"completed": 60}
    most = {pid: max(int(count) for own, count in ledger() if own == pid) for pid, _ in ledger()}
    assert sorted(most.values()) == [4, 5]


def test_processes_load_no_more_than_a_rollout_needs() -> None:
    code = "import sys, penstock.evals.worker_process; assert not {'torch', 'transformers', 'openai'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("overrides", "advised"),
    [([], True), (["rollout.concurrency=1"], False), (["workflow.concurrency.max_concurrent=2"], False)],
)
def test_one_process_that_the_engine_waited_for_advises_more(
    overrides: list[str], advised: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LONG_S", 0.0)
    monkeypatch.setattr(processes, "BUSY", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    _, told = evaluated("eval.processes=1", *overrides)
    assert any("--processes 3" in fields["text"] for kind, fields in told if kind == "stage") is advised


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.name=embedded"], "weights in one process"),
        (["gateway.port=8123"], "set it to 0"),
        (["rollout.executor=ray"], "leave eval.processes at 1"),
        (["rollout.executor=server"], "leave eval.processes at 1"),
        (["workflow.concurrency.max_concurrent=2"], "would hold for each of them"),
        (["eval.processes=0"], "eval.processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_is_made(project, capsys, overrides, said):
    sets = [word for override in overrides for word in ("--set", override)]
    assert run(["eval", "run", "eval.toml", *sets]) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


@pytest.mark.parametrize(
    ("opener", "code", "said"),
    [("refuse", 2, "there is no such server; start it"), ("die", 1, "ended with exit code 3 as it started: out of luck")],
)
def test_a_process_that_cannot_start_says_why(project, capsys, opener, code, said):
    assert run(["eval", "run", "eval.toml", "--set", f"engine.name=own_engine:{opener}"]) == code
    assert said in capsys.readouterr().err
