"""What the tests of flow routes share: a gateway in either mode, and the calls of a flow."""

from contextlib import asynccontextmanager

from gateway_cases import USER, renderer

from penstock.testing import ScriptedEngine, workbench


@asynccontextmanager
async def opened(script=(), *, is_open=False, serves=False, **options):
    """A gateway in front of a scripted engine, which is `bench.engine`."""
    engine = ScriptedEngine(script, renderer().tokenizer, **options.pop("engine", {}))
    async with workbench(engine, renderer(), is_open=is_open, serves=serves, **options) as bench:
        yield bench, engine


@asynccontextmanager
async def gateway(script=(), **options):
    """A gateway with a rollout that a runner has open: the bench, the session and the engine."""
    async with opened(script, **options) as (bench, engine):
        yield bench, await bench.rollout(), engine


@asynccontextmanager
async def open_gateway(script=(), **options):
    """A gateway that asks for no tokens: a client, the bench and the engine."""
    async with opened(script, is_open=True, **options) as (bench, engine):
        yield bench.http(), bench, engine


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
