"""What the tests of flow routes share: a gateway in either mode, and the calls of a flow."""

import asyncio
from contextlib import asynccontextmanager

from gateway_cases import USER, renderer

from penstock.testing import ScriptedEngine, workbench


@asynccontextmanager
async def opened(script=(), *, is_open=False, serves=False, **options):
    """A gateway in front of a scripted engine, which is `bench.engine`."""
    engine = ScriptedEngine(script, renderer().tokenizer, **options.pop("engine", {}))
    async with workbench(engine, renderer(), is_open=is_open, serves=serves, **options) as bench:
        yield bench, engine


def run(steps, script=(), **options):
    """Run `steps(bench, session, engine)` on a rollout that a runner has open."""

    async def main():
        async with opened(script, **options) as (bench, engine):
            await steps(bench, await bench.rollout(), engine)

    asyncio.run(main())


def run_open(steps, script=(), **options):
    """Run `steps(http, bench, engine)` on a gateway that asks for no tokens."""

    async def main():
        async with opened(script, is_open=True, **options) as (bench, engine):
            await steps(bench.http(), bench, engine)

    asyncio.run(main())


async def generate(http, uid="t1", *messages, **fields):
    """One reply; the answer's body."""
    body = {"trajectory_uid": uid, "prompt_uid": "p1", "messages": list(messages) or [USER], **fields}
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def step_of(answer, **fields):
    """The step that a flow makes of an answer, as it submits it."""
    return {
        "prompt_ids": answer["prompt_ids"],
        "response_ids": answer["response_ids"],
        "trajectory_uid": answer["trajectory_uid"],
        "prompt_uid": answer["prompt_uid"],
        **fields,
    }


async def submit(http, *steps, channel="train"):
    """The response to these steps."""
    return await http.post("/submit_steps", params={"channel": channel}, json={"steps": list(steps)})
