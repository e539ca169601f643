"""Every way in which a rollout can end: reached by a real run of it, with a message, counted, and to be read in the report."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_cases import TASK, Bench, EngineDown, good_grade

from penstock.gateway.app import EndBody
from penstock.pool.base import Pool
from penstock.pool.sqlite import SqlitePool
from penstock.records import BranchPoint, End, RolloutRef, Sampling
from penstock.rollout.scheduler import LOST
from penstock.view.export import write_report

Run = Callable[..., Awaitable[None]]


def calling(error: Exception | None = None, *, hangs: bool = False, called: threading.Event | None = None) -> Run:
    """A workflow that makes one call, and then this."""

    async def run(ctx: object, call: Callable[..., Awaitable[None]]) -> None:
        await call(["What is it?"], "it is six")
        if called is not None:
            called.set()
        if error is not None:
            raise error
        if hangs:
            await asyncio.Event().wait()

    return run


async def no_grade(ctx: object) -> None:
    """Forgets to give a reward."""


async def run_one(pool: Pool, run: Run, grade: Callable[..., Awaitable[None]] = good_grade, **limits: float) -> None:
    bench = Bench(run, grade, pool=pool, **limits)
    async with bench.opened() as (rollout,):
        await bench.runner.run(rollout, TASK, Sampling())


async def stop_one(pool: Pool, before: Callable[[RolloutRef], Awaitable[object]] | None = None) -> None:
    """Cancel its runner, after this was done."""
    called = threading.Event()
    bench = Bench(calling(hangs=True, called=called), pool=pool)
    async with bench.opened() as (rollout,):
        job = asyncio.create_task(bench.runner.run(rollout, TASK, Sampling()))
        await asyncio.to_thread(called.wait)
        if before is not None:
            await before(rollout)
        job.cancel()
        await asyncio.wait({job})


async def diverge(pool: Pool) -> None:
    """As a branch that the gateway finds to differ from its record."""
    bench = Bench(calling(), pool=pool)
    async with bench.opened() as (rollout,):
        await bench.runner.run(replace(rollout, branch=BranchPoint(rollout_id="train-9.0.1", step=0)), TASK, Sampling())


def reported(end: str, message: str) -> Callable[[Pool], Awaitable[None]]:
    """By a runner elsewhere, over the control route."""
    body = EndBody.model_validate_json(json.dumps({"end": end, "message": message}))
    return lambda pool: stop_one(pool, lambda rollout: pool.end(rollout.id, body.end, body.message))


CASES: dict[End, tuple[Callable[[Pool], Awaitable[None]], str]] = {
    End.COMPLETED: (lambda pool: run_one(pool, calling()), ""),
    End.AGENT_ERROR: (lambda pool: run_one(pool, calling(ValueError("no idea"))), "ValueError: no idea"),
    End.TIMEOUT: (lambda pool: run_one(pool, calling(hangs=True), agent_timeout_s=0.05), "raise it or do less"),
    End.CANCELLED: (stop_one, "stopped before it ended"),
    End.LOST: (lambda pool: stop_one(pool, lambda rollout: pool.replace(rollout, LOST)), LOST),
    End.ENGINE_ERROR: (lambda pool: run_one(pool, calling(EngineDown("no engine"))), "EngineDown: no engine"),
    End.GRADER_ERROR: (lambda pool: run_one(pool, calling(), no_grade), "reward"),
    End.REFUSED: (reported("refused", "no room for it"), "no room for it"),
    End.SUPERSEDED: (reported("superseded", "another attempt runs"), "another attempt runs"),
    End.BRANCH_DIVERGED: (diverge, "differs at byte 3"),
}


@pytest.mark.parametrize("end", End)
def test_every_end_is_counted_and_shown(end: End, tmp_path: Path) -> None:
    reach, message = CASES[end]
    config = {"run": {"name": "demo"}, "model": {"name": "tiny"}, "pool": {"name": "sqlite"}}
    (tmp_path / "config.json").write_text(json.dumps({"config": config, "datasets": {}}))

    async def main() -> str:
        pool = SqlitePool(tmp_path)
        await reach(pool)
        attempt, stats = await pool.rollout("train-0.0.1"), await pool.stats("train")
        await pool.close()
        assert (attempt.end, stats.ends) == (end, {end: 1})
        assert message in attempt.message
        assert bool(attempt.message) == (end is not End.COMPLETED)
        return write_report(tmp_path).read_text()

    page = asyncio.run(main())
    assert f'"end":"{end}"' in page
    assert "it is six" in page and message in page


def test_the_guide_lists_every_end() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    table = guide.split("## How a rollout ends")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {str(end) for end in End}
