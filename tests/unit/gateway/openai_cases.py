"""Requests and replies for tests of the Responses and completions dialects, without a gateway."""

from functools import cache

import orjson
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from penstock.chat.parsers.base import Reasoning, Text
from penstock.chat.tokenizer import BYTE_OF, Tokenizer
from penstock.engines.base import TokenPath
from penstock.gateway.dialects.base import ModelAnswer, UnsentTokens
from penstock.gateway.reply import CallDelta
from penstock.gateway.request import LastRequest, Prompt
from penstock.records import Sampling, Step

FUNCTION = {"type": "function", "name": "multiply", "description": "Multiply.", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edit files."}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [FUNCTION | {"name": "close"}]}


class EarlierCalls:
    """A `Past` with some answers in it."""

    def __init__(self, answers=None):
        self.last_request = LastRequest()
        self._answers = answers or {}

    def messages(self, answer):
        return self._answers.get(answer)


@cache
def tokenizer():
    """Every byte is a token."""
    core = Core(models.BPE({char: place for place, char in enumerate(sorted(BYTE_OF))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core)


def parse(dialect, past=None, **body):
    return dialect(tokenizer()).parse({"model": "any", **body}, Sampling(max_tokens=64), past or EarlierCalls())


def message(said="", thought="", calls=()):
    """An assistant message; `calls` are (name, arguments)."""
    message = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        named = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [{"id": f"call_{n}", "type": "function", "function": each} for n, each in enumerate(named)]
        message["content"] = said or None
    return message


def answer_to(call, reply, finish="stop", seconds=1.5):
    """An answer whose only step is `reply`."""
    ids = tuple(tokenizer().encode("".join(part.text for part in deltas_in(reply) if not isinstance(part, CallDelta))))
    step = Step(
        rollout_id="train-0.0.1",
        index=0,
        node=0,
        transcript="main",
        completion_ids=ids,
        logprobs=(-0.5,) * len(ids),
        versions=(0,) * len(ids),
        sampling=call.sampling,
        finish=finish,
        message=reply,
        messages_digest="",
        seconds=seconds,
        answer="0123-0",
        created=1000.25,
    )
    prompt = Prompt(ids=TokenPath((1, 2, 3)), parent=None, added=(1, 2, 3), messages=call.messages, tools=call.tools, chain="")
    return ModelAnswer("0123-0", 1000.25, "tiny", call, prompt, [step])


def deltas_in(reply, size=10_000):
    """The deltas that a reply comes in, none longer than `size`."""
    yield from (Reasoning(part) for part in cut(reply.get("reasoning_content") or "", size))
    yield from (Text(part) for part in cut(reply["content"] or "", size))
    for place, call in enumerate(reply.get("tool_calls") or ()):
        named = call["function"]
        first, *rest = ["", *cut(named["arguments"], size)]
        yield CallDelta(place, call["id"], named["name"], first)
        yield from (CallDelta(place, call["id"], named["name"], part, begins=False) for part in rest)


def cut(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def streamed(dialect, answer, batches):
    """All bytes of a stream that grows by `batches` of deltas."""
    (step,) = answer.steps
    writer = dialect(tokenizer()).events(answer)
    parts = [writer.start()]
    reported = 0
    for batch in batches:
        size = sum(len(tokenizer().encode(delta.text)) for delta in batch if not isinstance(delta, CallDelta))
        unsent = UnsentTokens(step.completion_ids[reported : reported + size], step.logprobs[reported : reported + size])
        parts.append(writer.delta(0, batch, unsent))
        reported += size
    rest = UnsentTokens(step.completion_ids[reported:], step.logprobs[reported:])
    return b"".join([*parts, writer.finish_choice(0, step, rest), writer.finish([step])])


def events_in(stream):
    """The events of a stream; each says its type twice, or is `[DONE]`."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] == "[DONE]":
            events.append("[DONE]")
            continue
        events.append(orjson.loads(lines["data"]))
        assert lines.get("event") == events[-1].get("type")
    return events
