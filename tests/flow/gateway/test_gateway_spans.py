"""OpenTelemetry spans of model calls: the names of the GenAI conventions, and not a word of what was said."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
from gateway_cases import USER, chat, renderer

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.gateway.app import Gateway
from penstock.gateway.observability import CallTracer
from penstock.records import Sampling, Task, make_rollout
from penstock.testing import GatewayFixture, ScriptedEngine, ScriptedReply, memory_pool

SAID = {"role": "user", "content": "the secret word is xylophone"}


def run(steps, script=lambda prompt: "marimba"):
    """Run `steps` on a gateway with spans; all of them."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main():
        engine, pool = ScriptedEngine(script, renderer().tokenizer), memory_pool()
        tracer = CallTracer(provider, model="scripted")
        gateway = Gateway(engine, renderer(), pool, secret=b"a secret for tests only", tracer=tracer)
        task = Task(id="t", prompt=())
        rollout = make_rollout("train-0", "t", 0)
        await pool.open_group(task, [rollout], seq=0)
        session = gateway.open(rollout, Sampling(max_tokens=64))
        async with AsyncExitStack() as clients:
            await steps(GatewayFixture(gateway, pool, False, clients), session)

    asyncio.run(main())
    return exporter.get_finished_spans()


def test_a_call_is_one_span_with_the_conventions_names():
    async def steps(bench, session):
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["#"], "max_tokens": 9, "stream": True}
        await chat(bench.http(session.token), SAID, headers={"x-sample-id": "planner"}, **fields)
        [step] = (await bench.attempt(session)).steps
        expected["gen_ai.response.id"], expected["gen_ai.usage.output_tokens"] = step.answer, len(step.completion_ids)

    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.conversation.id": "train-0.0.1/planner",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("#",),
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ("stop",),
        "penstock.dialect": "chat",
        "penstock.rollout_id": "train-0.0.1",
        "penstock.policy_version": 0,
    }
    [span] = run(steps)
    reported = dict(span.attributes)
    assert reported.pop("gen_ai.usage.input_tokens") > 5
    assert reported.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert (reported, span.name, span.kind) == (expected, "chat scripted", SpanKind.CLIENT)
    assert span.end_time > span.start_time


def test_nothing_that_was_said_is_reported():
    async def steps(bench, session):
        tool = {"type": "function", "function": {"name": "ringer", "parameters": {}}}
        await chat(bench.http(session.token), SAID, tools=[tool], user="somebody")
        await chat(bench.http(session.token), SAID, temperature="xylophone")

    reported = "".join(span.to_json() for span in run(steps))
    assert [word for word in ("xylophone", "marimba", "ringer", "somebody") if word in reported] == []


def test_an_error_is_the_spans_status_with_its_code():
    async def steps(bench, session):
        assert (await chat(bench.http(session.token), USER)).status_code == 502

    [span] = run(steps, lambda prompt: ScriptedReply("Hello", fail_after=2))
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "engine_error")
    assert (span.attributes["error.type"], span.attributes["gen_ai.response.finish_reasons"]) == ("engine_error", ("error",))


def test_a_refused_body_is_a_span_without_a_response():
    async def steps(bench, session):
        assert (await bench.http(session.token).post("/v1/completions", content=b"{")).status_code == 400

    [span] = run(steps)
    assert (span.name, span.attributes["error.type"]) == ("text_completion scripted", "invalid_json")
    assert not [name for name in span.attributes if name.startswith(("gen_ai.response", "gen_ai.usage"))]


def test_callers_trace_continues():
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

    async def steps(bench, session):
        await chat(bench.http(session.token), USER, headers={"traceparent": f"00-{trace}-{parent}-01"})
        await chat(bench.http(session.token), USER, headers={"traceparent": "not a trace"})

    first, second = run(steps)
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (trace, parent)
    assert second.parent is None


def test_several_choices_are_one_span():
    async def steps(bench, session):
        await chat(bench.http(session.token), USER, n=3)

    [span] = run(steps)
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",) * 3


def test_unused_parts_are_not_imported():
    code = "import sys, penstock.gateway.standalone; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
