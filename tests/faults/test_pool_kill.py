"""A writing process is killed with SIGKILL again and again: whatever it had acknowledged is there."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from penstock.pool.sqlite import open_pool
from penstock.records import Node, Sampling, Step, Task, make_rollout

KILLS, WRITERS = 10, 8
TASK = Task(id="t", prompt=({"role": "user", "content": "go"},))
ROLLOUTS = [make_rollout("train-0", TASK.id, place) for place in range(WRITERS)]


def make_node(rollout_id: str, index: int) -> Node:
    """Different for each step, so that a mix-up shows."""
    return Node(
        rollout_id=rollout_id,
        id=index,
        parent=index - 1 if index else None,
        token_ids=(index,) * 50,
        chain=f"n{index}",
        messages=TASK.prompt,
    )


def make_step(rollout_id: str, index: int) -> Step:
    return Step(
        rollout_id=rollout_id,
        index=index,
        node=index,
        transcript="main",
        completion_ids=tuple(range(index, index + 100)),
        logprobs=(-0.5,) * 100,
        versions=(index,) * 100,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": f"{rollout_id} says {index}"},
        chain=f"s{index}",
    )


async def write_for_ever(folder: Path) -> None:
    """Go on with each rollout where the pool ends, naming a step on stdout once it is acknowledged."""
    pool = open_pool(folder)
    await pool.open_group(TASK, ROLLOUTS, seq=0)

    async def go_on(rollout_id: str) -> None:
        index = len((await pool.attempt(rollout_id)).steps)
        while True:
            await pool.append(make_step(rollout_id, index), make_node(rollout_id, index))
            os.write(1, f"{rollout_id} {index}\n".encode())
            index += 1

    async with asyncio.TaskGroup() as tasks:
        for rollout in ROLLOUTS:
            tasks.create_task(go_on(rollout.id))


def kill_after(folder: Path, acknowledgements: int) -> list[str]:
    """Run a writer, kill it after so many acknowledgements; all that it gave until it was dead."""
    with subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.kill()
        lines += child.stdout.readlines()
    assert "" not in lines, "the writer ended by itself"
    return [line for line in lines if line.endswith("\n")]


async def check_steps(folder: Path, acknowledged: dict[str, int]) -> None:
    pool = open_pool(folder)
    for rollout in ROLLOUTS:
        attempt = await pool.attempt(rollout.id)
        assert len(attempt.steps) > acknowledged[rollout.id]
        assert list(attempt.steps) == [make_step(rollout.id, index) for index in range(len(attempt.steps))]
        assert list(attempt.nodes) == [make_node(rollout.id, index) for index in range(len(attempt.steps))]
    assert (await pool.stats()).steps == sum([len((await pool.attempt(rollout.id)).steps) for rollout in ROLLOUTS])
    await pool.close()


@pytest.mark.slow
def test_no_acknowledged_step_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    acknowledged: dict[str, int] = defaultdict(lambda: -1)
    for _ in range(KILLS):
        for line in kill_after(tmp_path, random.randint(1, 150)):
            rollout_id, index = line.split()
            acknowledged[rollout_id] = max(acknowledged[rollout_id], int(index))
        with closing(sqlite3.connect(tmp_path / "pool.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    asyncio.run(check_steps(tmp_path, acknowledged))


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1])))
