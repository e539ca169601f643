"""An evaluation of more than a thousand rollouts, killed twice: the same command continues and repeats nothing that had ended."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.evals.outcome import open_evaluation
from penstock.records import End

ROWS, SAMPLES, AT_ONCE = 258, 4, 32
ENGINE = Path(__file__).parents[1] / "helpers" / "cli_engine"
AGENT = """
import asyncio
import os
from penstock import AgentWorkflow, Grader, get_rollout_context

class Asker(AgentWorkflow):
    async def run(self, ctx):
        name = get_rollout_context().rollout_id
        ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(ledger, f"{os.environ['LIFE']} {name}\\n".encode())
        os.close(ledger)
        if ctx.metadata["n"] == int(os.environ["HELD_ROW"]):
            await asyncio.Event().wait()
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class Even(Grader):
    async def grade(self, ctx):
        return float(ctx.metadata["n"] % 2 == 0)
"""
CONFIG = f"""
run.name = "killed"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
eval.samples = {SAMPLES}
rollout.concurrency = {AT_ONCE}
"""


pytestmark = pytest.mark.project(agent=AGENT, config=CONFIG, name="eval.toml", tasks=ROWS)


def started(project: Path, life: int, *, held_row: int = -1) -> subprocess.Popen[str]:
    """The command, just begun. It does not end before the rollouts of the held row, which wait for ever."""
    command = [sys.executable, "-c", "from penstock.cli.app import main; main()", "eval", "run", "eval.toml", "--json"]
    named = os.environ | {"PYTHONPATH": str(ENGINE), "LIFE": str(life), "HELD_ROW": str(held_row)}
    return subprocess.Popen(command, cwd=project, env=named, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def evaluate(project: Path, life: int, *, kill: bool) -> str:
    """Run the command; killed in the middle, or to its end, whose result comes back."""
    last_row = (project / "tasks.jsonl").read_text().count("\n") - 1
    with started(project, life, held_row=last_row if kill else -1) as process:
        try:
            for line in process.stderr:
                done, slash, total = line.partition(" ")[0].partition("/")
                if kill and slash and int(done) >= 0.4 * int(total):
                    process.kill()
            return process.stdout.read()
        finally:
            process.kill()


def places(project: Path) -> set[str]:
    """What has ended, by its place in its group: the same for every attempt at it."""
    return {place(name) for name, end in asyncio.run(ends(project)).items() if end is not None}


async def ends(project: Path) -> dict[str, End | None]:
    """Of the rollouts that count, by their id."""
    async with open_evaluation(project / "runs/evals/killed") as found:
        return {attempt.ref.id: attempt.end async for group in found.groups() for attempt in group.rollouts}


def place(rollout_id: str) -> str:
    return rollout_id.rpartition(".")[0]


@pytest.mark.slow
def test_after_a_kill_nothing_that_had_ended_is_run_again(project):
    total, ended = ROWS * SAMPLES, [set[str]()]
    for life in (1, 2):
        assert evaluate(project, life, kill=True) == ""
        ended.append(places(project))
    assert 0 < len(ended[1]) < len(ended[2]) < total
    found = json.loads(evaluate(project, 3, kill=False))
    assert (found["status"], found["resumed"], found["outcome"]["ends"]) == ("finished", len(ended[2]), {"completed": total})
    assert found["outcome"]["reward"]["value"] == 0.5
    begun = [line.split(" ") for line in (project / "ledger").read_text().splitlines()]
    for life in (1, 2):
        assert {place(name) for own, name in begun if int(own) > life} & ended[life] == set()
    times = Counter(name for _, name in begun)
    assert set(times.values()) == {1} and {place(name) for name in times} == places(project)
    assert total <= len(begun) <= total + 2 * AT_ONCE
    print(f"{len(ended[1])}, then {len(ended[2])} of {total} had ended at the kills; {len(begun) - total} ran twice")
