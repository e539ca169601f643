"""The GSM8K example, from its files to graded rollouts, over HTTP, with an engine that says what a policy might say."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from example_cases import EXAMPLES

from penstock.config import RolloutSection, load_config
from penstock.events import Events
from penstock.records import End, Sampling, make_rollout
from penstock.rollout.runner import open_runner
from penstock.rollout.transcripts import transcripts
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock.testing import ScriptedEngine, workbench
from penstock_compat.flows.gsm8k import NOTED, RIGHT, UNREADABLE, WRONG, GSM8KAgent

EXAMPLE = EXAMPLES / "gsm8k"
DEADLINE_S = 60


def check(number):
    return f'<tool_call>\n{{"name": "check_answer", "arguments": {{"answer": "{number}"}}}}\n</tool_call>'


def attempted(renderer, replies, channel="train", executor="inline", overrides=()):
    """What came of the first row, whose answer is 72, where the policy says `replies`."""

    async def main():
        config = load_config(EXAMPLE / "train.toml", overrides)
        agent = open_agent(config.agent, config.workflow, config.grader)
        [task] = load_tasks(config.dataset.train, limit=1, columns=True)
        engine = ScriptedEngine(replies, renderer.tokenizer, chunk=16)
        rollout = make_rollout(f"{channel}-0", task.id, 0, channel=channel)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
            bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
            limits = RolloutSection(executor=executor, agent_timeout_s=DEADLINE_S)
            opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=limits)
            runner = await stack.enter_async_context(opened)
            await bench.pool.open_group(task, [rollout], seq=0)
            await runner.run(rollout, task, Sampling(max_tokens=300))
            return await bench.pool.rollout(rollout.id)

    return asyncio.run(main())


def reported(attempt):
    """What the tool said, in order."""
    return [message["content"] for message in transcripts(attempt)["main"].messages if message["role"] == "tool"]


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_training_tool_reports_the_result_and_grades_the_last_answer(renderer, executor):
    attempt = attempted(renderer, [check("71"), check("$72"), "So it is\n#### 72"], executor=executor)
    assert (attempt.end, attempt.message, attempt.reward, len(attempt.steps)) == (End.COMPLETED, "", 1.0, 3)
    assert reported(attempt) == [WRONG, RIGHT]
    assert [node.parent for node in attempt.nodes] == [None, 0, 1]
    assert [(grade.step, grade.transcript) for grade in attempt.grades] == [(None, None)]


@pytest.mark.parametrize("number", ["71", "72"])
def test_in_validation_the_tool_reports_nothing_of_the_answer(renderer, number):
    attempt = attempted(renderer, [check(number), f"#### {number}"], channel="val")
    assert (attempt.end, attempt.reward, reported(attempt)) == (End.COMPLETED, float(number == "72"), [NOTED])


def test_turns_are_limited_and_answer_before_last_call_counts(renderer):
    attempt = attempted(renderer, [f"#### 72\n{check('72')}"] * 4, overrides=["workflow.actor_rollout_ref.rollout.max_turns=2"])
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 1.0, 2)


@pytest.mark.parametrize("text", ["#### 72", "It is 72.", "", "<tool_call>\n{oh\n</tool_call>"])
def test_turn_without_a_call_is_the_last_one(renderer, text):
    attempt = attempted(renderer, [text])
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, float(text == "#### 72"), 1)


def test_agent_that_checks_something_unreadable_is_reported(renderer):
    attempt = attempted(renderer, [check("x").replace("answer", "guess", 2).replace("check_guess", "check_answer"), "#### 1"])
    assert (reported(attempt), attempt.reward) == ([UNREADABLE], 0.0)


def test_agent_works_with_endpoint_that_leaves_calls_in_text():
    seen = []

    async def chat(request):
        seen.append(await request.json())
        text = check("72") if len(seen) == 1 else "#### 72"
        reply = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return web.json_response({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [reply]})

    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await GSM8KAgent(f"http://127.0.0.1:{port}/v1", truth="72").solve("?")
        finally:
            await runner.cleanup()

    assert asyncio.run(main()) == 2
    assert [(message["role"], message["content"]) for message in seen[1]["messages"][1:]] == [
        ("assistant", check("72")),
        ("tool", RIGHT),
    ]
