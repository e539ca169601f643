"""What answers are called: each its own name, however many are on their way for the same request."""

import asyncio

from gateway_cases import USER, chat, renderer

from penstock.gateway.auth import GatewayTokens
from penstock.gateway.dialects.chat import ChatDialect
from penstock.gateway.request import GatewayLimits
from penstock.gateway.response import PendingResponse
from penstock.gateway.session import Session
from penstock.records import Sampling, make_rollout
from penstock.testing import ScriptedEngine, ScriptedReply, workbench


class Asked(str):
    """A request's digest that counts the names that are made of it."""

    names = 0

    def __format__(self, form):
        self.names += 1
        return super().__format__(form)


async def unsent(message):
    raise AssertionError(f"nothing is sent here, but {message} was")


def named(steps):
    """What `steps` returns, given two functions: one begins an answer to a request, the other ends it."""

    async def main():
        session = Session(
            make_rollout("g", "t", 0),
            Sampling(),
            tokens=GatewayTokens(b"a secret for tests only"),
            base_url="",
            limits=GatewayLimits(),
        )
        task = asyncio.current_task()

        def begin(request):
            response = PendingResponse(ChatDialect(renderer().tokenizer), unsent)
            response.request = request
            session.start_call(response, task)
            return response

        return steps(begin, lambda response: session.end_call(response, response.name, task))

    return asyncio.run(main())


def test_identical_requests_get_distinct_answer_names():
    asked = Asked("q")
    names = named(lambda begin, end: [begin(asked).name for _ in range(100)])
    assert names == [f"q-{number}" for number in range(100)]
    assert asked.names == 100


def test_answer_number_follows_all_pending_ones():
    def steps(begin, end):
        responses = [begin("q") for _ in range(3)]
        end(responses[1])
        names = [begin(request).name for request in ("q", "other")]
        end(responses[0])
        return [*names, begin("q").name]

    assert named(steps) == ["q-3", "other-0", "q-4"]


def test_answers_that_overtake_an_earlier_one_have_names():
    async def main():
        engine = ScriptedEngine([ScriptedReply("first", stall_after=1), "second", "third"], renderer().tokenizer)
        async with workbench(engine, renderer()) as bench, asyncio.timeout(30):
            session = await bench.rollout()
            http = bench.http(session.token)
            async with asyncio.TaskGroup() as calls:
                first = calls.create_task(chat(http, USER))
                await engine.until_stalling(1)
                later = [(await chat(http, USER)).json() for _ in range(2)]
                engine.release()
            answers = [first.result().json(), *later]
            assert [answer["id"].rpartition("-")[2] for answer in answers] == ["0", "1", "2"]
            assert len({step.answer for step in (await bench.attempt(session)).steps}) == 3

    asyncio.run(main())
