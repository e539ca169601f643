"""Grades that did not come from the run's grader: refused at the gateway, and void where they were written into the pool."""

import asyncio
import contextlib

import httpx
import pytest
from rollout_cases import TASK, make_agent

from penstock import AgentWorkflowConfig, get_rollout_context
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.gateway.app import Gateway
from penstock.gateway.auth import Access
from penstock.pool.memory import MemoryPool
from penstock.records import End, Grade, Sampling, make_rollout
from penstock.rollout.runner import FORGED_GRADE, open_runner
from penstock.testing import ScriptedEngine, memory_pool

SECRET = b"a secret for tests only"


async def ask(ctx):
    await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)


async def grade_zero(ctx):
    return 0.0


@contextlib.asynccontextmanager
async def stage(renderer, cheat, *, closed=(), grade=grade_zero, trusted=False, pool=None):
    """A rollout whose workflow calls `cheat(gateway, pool, rollout_id)` after its model call: the attempt, and all events."""
    events, reported, pool = Events(), [], pool or memory_pool()
    events.listen(lambda kind, fields: reported.append((kind, fields)))
    engine = ScriptedEngine(["6"], renderer.tokenizer)
    async with asyncio.timeout(30), Gateway(engine, renderer, pool, secret=SECRET, events=events, closed=closed) as gateway:

        async def run(ctx):
            await ask(ctx)
            await cheat(gateway, pool, get_rollout_context().rollout_id)

        agent = make_agent(run, grade, AgentWorkflowConfig(name="w"))
        if trusted:
            object.__setattr__(agent, "trusted", True)
        async with open_runner(agent, gateway=gateway, pool=pool, events=events, limits=RolloutSection()) as runner:
            rollout = make_rollout("train-0", TASK.id, 0)
            await pool.open_group(TASK, [rollout], seq=0)
            await runner.run(rollout, TASK, Sampling(max_tokens=20))
            yield await pool.rollout(rollout.id), reported
    await pool.close()


def run(renderer, cheat, **options):
    async def main():
        async with stage(renderer, cheat, **options) as result:
            return result

    return asyncio.run(main())


async def grade_in_pool(gateway, pool, rollout_id):
    await pool.grade(Grade(rollout_id=rollout_id, reward=1.0, source="mine"))


async def end_in_pool(gateway, pool, rollout_id):
    await pool.end(rollout_id, End.COMPLETED, "", [Grade(rollout_id=rollout_id, reward=1.0, source="mine")])


class PluginPool(MemoryPool):
    """Overrides `end` as it was before it could refuse a rollout that had been graded."""

    async def end(self, rollout_id, end, message="", grades=()):
        return await super().end(rollout_id, end, message, grades)


@pytest.mark.parametrize("kind", [MemoryPool, PluginPool])
def test_a_grade_written_into_the_pool_makes_the_rollout_void(renderer, kind):
    attempt, reported = run(renderer, grade_in_pool, pool=kind(lambda: 0.0))
    assert (attempt.end, attempt.reward) == (End.GRADER_ERROR, None)
    assert attempt.message.startswith(FORGED_GRADE)
    (ended,) = (fields for kind, fields in reported if kind == "rollout.end")
    assert (ended["end"], ended["reward"]) == (End.GRADER_ERROR, None)
    assert [fields["sources"] for kind, fields in reported if kind == "rollout.forged"] == [["mine"]]


def test_end_written_into_pool_with_grade_makes_rollout_void(renderer):
    attempt, reported = run(renderer, end_in_pool)
    assert (attempt.end, attempt.void, attempt.curated_out, attempt.reward) == (End.COMPLETED, True, True, None)
    (ended,) = (fields for kind, fields in reported if kind == "rollout.end")
    assert ended["reward"] is None
    assert [fields["sources"] for kind, fields in reported if kind == "rollout.forged"] == [["mine"]]


def test_a_group_deadline_during_the_grading_is_no_forgery(renderer):
    pools = []

    async def note(gateway, pool, rollout_id):
        pools.append((pool, rollout_id))

    async def grade(ctx):
        pool, rollout_id = pools[0]
        await pool.end(rollout_id, End.TIMEOUT, "its group took too long")
        return 1.0

    attempt, reported = run(renderer, note, grade=grade)
    assert (attempt.end, attempt.void, attempt.grades) == (End.TIMEOUT, False, ())
    assert "rollout.forged" not in dict(reported)


def test_a_flow_still_grades_itself(renderer):
    async def complete(gateway, pool, rollout_id):
        headers = {"authorization": f"Bearer {gateway.tokens.flow(rollout_id)}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = f"{gateway.base_url.removesuffix('/v1')}/complete_trajectory/{rollout_id}"
            assert (await client.post(url, json={"reward": 1.0})).status_code == 200

    attempt, _ = run(renderer, complete, trusted=True, closed={Access.CONTROL})
    assert (attempt.end, attempt.reward) == (End.COMPLETED, 1.0)


def test_graded_run_rejects_outside_grades(renderer):
    answers = []

    async def cheat(gateway, pool, rollout_id):
        root = gateway.base_url.removesuffix("/v1")
        headers = {"authorization": f"Bearer {gateway.tokens.control}"}
        requests = {
            f"/rollouts/{rollout_id}/grade": {"reward": 1.0},
            f"/rollouts/{rollout_id}/end": {},
            "/rollouts": {"channel": "train"},
            f"/complete_trajectory/{rollout_id}": {"reward": 1.0},
            "/submit_steps": {"steps": []},
        }
        async with httpx.AsyncClient(headers=headers) as client:
            answers.extend([await client.post(root + path, json=body) for path, body in requests.items()])

    attempt, reported = run(renderer, cheat, closed={Access.CONTROL, Access.FLOW})
    assert [answer.status_code for answer in answers] == [409] * 5
    assert all("graded" in answer.text for answer in answers)
    assert (attempt.end, attempt.reward) == (End.COMPLETED, 0.0)
    assert len([kind for kind, _ in reported if kind == "grading.refused"]) == 5


def test_nothing_is_read_of_rollout_before_its_grades_are_stored(renderer):
    class CountingPool(MemoryPool):
        reads = 0

        async def rollout(self, rollout_id, **options):
            self.reads += 1
            return await super().rollout(rollout_id, **options)

    async def nothing(gateway, pool, rollout_id): ...

    pool = CountingPool(lambda: 0.0)
    attempt, _ = run(renderer, nothing, pool=pool)
    assert (attempt.end, attempt.reward, pool.reads) == (End.COMPLETED, 0.0, 1)  # that of the test itself
