"""What the gateway caches is weighed in bytes: the weights are near the memory that it takes."""

import asyncio
import gc
import random
import tracemalloc

import orjson

from penstock.codec import to_json
from penstock.gateway.dialects.chat import ChatDialect
from penstock.gateway.graph import TokenGraph
from penstock.gateway.request import LastRequest
from penstock.gateway.response import PendingResponse, ResponseCache
from penstock.records import Node, Rollout, Sampling, Step, make_rollout


def taken(make, count):
    """Returns the bytes that each of `count` results of `make` takes, and the results.

    Threads of other tests allocate too, so the smallest of three measurements counts.
    """
    return min((measure(make, count) for _ in range(3)), key=lambda measured: measured[0])


def measure(make, count):
    gc.collect()
    tracemalloc.start()
    try:
        kept = [make(number) for number in range(count)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / len(kept), kept
    finally:
        tracemalloc.stop()


def test_records_as_json_take_no_more_memory_than_their_bytes():
    each, kept = taken(lambda number: to_json(list(range(1000))), 1000)
    assert each < len(kept[0]) + 200


def test_a_cached_response_takes_no_more_memory_than_its_weight():
    async def main():
        cache = ResponseCache()

        async def send(message): ...

        async def respond(number):
            response = PendingResponse(ChatDialect(None), send)
            response.request = f"{number:024}"
            if number % 2:
                await response.send_body(200, orjson.dumps({"ids": list(range(500))}))
            else:
                for part in range(20):
                    await response.send_events(b"data: " + orjson.dumps({"part": part}) + b"\n\n", last=part == 19)
            response.end()
            cache.add(response)
            return response.sent, cache.get(response.request)

        sent, cached = await respond(0)
        assert b"".join(part["body"] for part in sent[1:]) == cached[1]["body"]
        assert cached[0] == sent[0]
        gc.collect()
        tracemalloc.start()
        for number in range(1, 400):
            await respond(number)
        gc.collect()
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert memory < 1.2 * cache._bytes

    asyncio.run(main())


def conversation(number, *, steps=10, tokens=200):
    rollout, ids = make_rollout("train-0", "t", number), random.Random(number)

    def node(index):
        messages = tuple({"role": role, "content": f"{index} {number}" * 40} for role in ("user", "tool", "user"))
        token_ids = tuple(ids.randrange(300, 100_000) for _ in range(tokens))
        parent = index - 1 if index else None
        return Node(
            rollout_id=rollout.id,
            id=index,
            parent=parent,
            token_ids=token_ids,
            messages_digest=f"{number}-{index}",
            messages=messages,
        )

    def step(index):
        return Step(
            rollout_id=rollout.id,
            index=index,
            node=index,
            transcript="main",
            completion_ids=tuple(ids.randrange(300, 100_000) for _ in range(tokens)),
            logprobs=tuple(ids.random() for _ in range(tokens)),
            full_logprobs=tuple(ids.random() for _ in range(tokens)),
            versions=(3,) * tokens,
            sampling=Sampling(),
            finish="stop",
            message={"role": "assistant", "content": f"{index} {number}" * 40},
            messages_digest=f"{number}-{index}-r",
            answer=f"{number}{index}-0",
        )

    return TokenGraph(Rollout(ref=rollout, nodes=tuple(map(node, range(steps))), steps=tuple(map(step, range(steps)))))


def test_the_weight_of_a_token_graph_is_near_its_memory():
    for tokens in (0, 20, 1000):
        each, kept = taken(lambda number, tokens=tokens: conversation(number, tokens=tokens), 10)
        assert 0.6 * each < kept[0].weight < 2 * each, tokens


def test_the_weight_of_a_last_request_is_near_its_memory():
    def request(number):
        messages = [{"role": "user", "content": f"{number} {index} " * 200} for index in range(50)]
        body = orjson.dumps({"messages": messages})
        last = LastRequest()
        last.messages(orjson.loads(body)["messages"], lambda index, raw: dict(raw))
        return last

    each, kept = taken(request, 20)
    assert 0.6 * each < kept[0].weight < 2 * each
