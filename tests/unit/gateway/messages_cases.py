"""What the tests of the Messages dialect share: requests read by it, answers made by hand, and streams put together."""

import json

import orjson
import pytest

from penstock.engines.base import TokenPath
from penstock.errors import RequestError
from penstock.gateway.dialects.base import ModelAnswer, UnsentTokens
from penstock.gateway.dialects.messages import MessagesDialect
from penstock.gateway.request import LastRequest, Prompt
from penstock.records import Sampling, Step

TOOL = {"name": "multiply", "description": "a times b", "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}}}
OURS = {"name": "multiply", "description": "a times b", "parameters": TOOL["input_schema"]}
USER = {"role": "user", "content": "What is 6 times 7?"}
NOTHING = UnsentTokens((), ())


class Letters:
    is_known = True

    """A tokenizer whose ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


class Before:
    """What the rollout said before: one answer at most."""

    def __init__(self, answer="", messages=(), tools=()):
        self.last_request = LastRequest()
        self._known = {answer: (tuple(messages), tuple(tools))} if answer else {}

    def messages(self, answer):
        return self._known.get(answer, (None, None))[0]

    def tools(self, answer):
        return self._known.get(answer, (None, None))[1]


DIALECT = MessagesDialect(Letters())


def parse(*messages, past=None, **body):
    return DIALECT.parse({"model": "any", "max_tokens": 9, "messages": list(messages)} | body, Sampling(), past or Before())


def refused(*messages, **body):
    with pytest.raises(RequestError) as caught:
        parse(*messages, **body)
    assert caught.value.status in (400, 404)
    return caught.value


def block(kind, **content):
    return {"type": kind, **content}


def text(said):
    return block("text", text=said)


def step(message, *, sampled="", finish="stop", stop=(), stop_ids=(0,)):
    ids = tuple(map(ord, sampled))
    return Step(
        rollout_id="r",
        index=0,
        node=0,
        transcript="main",
        completion_ids=ids,
        logprobs=(-1.0,) * len(ids),
        versions=(0,) * len(ids),
        sampling=Sampling(stop=stop, stop_ids=stop_ids),
        finish=finish,
        message={"role": "assistant", "content": ""} | message,
        messages_digest="",
    )


def answer(*steps):
    prompt = Prompt(ids=TokenPath((1, 2, 3)), parent=None, added=(1, 2, 3), messages=(), tools=(), chain="")
    return ModelAnswer("abc-0", 1700000000.5, "tiny", parse(USER), prompt, list(steps))


def whole(made):
    return orjson.loads(DIALECT.json_body(answer(made)))


def streamed(deltas, made):
    """All events of a stream, each checked against its name."""
    writer = DIALECT.events(answer())
    said = b"".join(writer.delta(0, [delta], NOTHING) for delta in deltas)
    sent = writer.start() + said + writer.finish_choice(0, made, NOTHING) + writer.finish([made])
    events = []
    for part in sent.split(b"\n\n")[:-1]:
        name, body = part.split(b"\n")
        events.append(orjson.loads(body.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def accumulated(events):
    """The message that a client puts together, strictly: one block open at a time, in order."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, arguments, open_index = events[0]["message"], {}, None
    for event in events[1:-2]:
        assert open_index == (None if event["type"] == "content_block_start" else event["index"])
        open_index = None if event["type"] == "content_block_stop" else event["index"]
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            kind, (key, value) = event["delta"].pop("type"), next(iter(event["delta"].items()))
            into = arguments if kind == "input_json_delta" else message["content"][-1]
            into[open_index if into is arguments else key] = into.get(open_index if into is arguments else key, "") + value
    assert open_index is None
    for index, written in arguments.items():
        message["content"][index]["input"] = json.loads(written)
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}
