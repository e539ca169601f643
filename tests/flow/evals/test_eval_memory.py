"""Evaluations are read group by group: whatever is notified of them, no more than a few groups with their tokens are in memory."""

import gc

import pytest
from test_cli_eval import AGENT, CONFIG, result

from penstock.pool.sqlite import SqlitePool
from penstock.records import Group

ROWS, FEW = 24, 10
held: list[int] = []


class WatchedPool(SqlitePool):
    """A pool that counts, whenever all of it was read, how many groups are still in memory."""

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        page = await super().groups(channel, first_seq=first_seq, limit=limit)
        if first_seq and not page:
            held.append(sum(type(each) is Group for each in gc.get_objects()))
        return page


WATCHED = f"{CONFIG}\npool.name = '{__name__}:WatchedPool'\nrollout.concurrency = 2\n"
pytestmark = pytest.mark.project(agent=AGENT, config=WATCHED, name="eval.toml", tasks=ROWS)


def test_an_evaluation_is_never_in_memory_as_a_whole(project, capsys):
    passes = {
        ("run", "eval.toml"): 2,  # its numbers, its report
        ("run", "eval.toml", "--retry-failed"): 3,  # and what is to be made again
        ("compare", "runs/evals/asked", "runs/evals/asked"): 2,
        ("regrade", "runs/evals/asked"): 3,  # what there is to grade, its numbers, its report
    }
    gc.collect()
    for arguments, times in passes.items():
        held.clear()
        result(capsys, *arguments)
        assert len(held) == times and max(held) < FEW, (arguments, held)
