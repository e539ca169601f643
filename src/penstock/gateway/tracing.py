"""One OpenTelemetry span for each model call, after the GenAI semantic conventions; what is said in a call is not told."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.gateway.auth import Headers
from penstock.gateway.call import Account

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

PROVIDER = "penstock"
PATIENCE_MS = 5_000
"""How long a stopping gateway waits for spans to be taken."""


class Spans:
    """Tells a tracer of calls once they are over. A caller's `traceparent` header is the span's parent."""

    def __init__(self, provider: "TracerProvider", *, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("penstock.gateway")
        self._model = model
        self._parents = TraceContextTextMapPropagator()

    def tell(self, dialect: str, account: Account, headers: Headers, *, seconds: float) -> None:
        """End a span that began `seconds` ago."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        operation = "text_completion" if dialect == "completions" else "chat"
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name.startswith(b"trace")}
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parents.extract(carrier),
            kind=SpanKind.CLIENT,
            attributes={"gen_ai.operation.name": operation, **attributes(account, self._model, dialect)},
            start_time=end_ns - round(seconds * 1e9),
        )
        if account.error is not None:
            span.set_attribute("error.type", account.error.code)
            span.set_status(Status(StatusCode.ERROR, account.error.code))
        span.end(end_ns)

    def close(self) -> None:
        """Give out what waits. Blocks: call it in a thread."""
        for name, arguments in (("force_flush", (PATIENCE_MS,)), ("shutdown", ())):
            if finish := getattr(self._provider, name, None):
                finish(*arguments)


def attributes(account: Account, model: str, dialect: str) -> dict[str, Any]:
    """What the conventions have a word for, and under our own name what they have none for."""
    told: dict[str, Any] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "penstock.dialect": dialect,
    }
    if account.caller is not None:
        told["gen_ai.conversation.id"] = f"{account.caller.rollout_id}/{account.caller.transcript}"
        told["penstock.rollout_id"] = account.caller.rollout_id
    if account.call is not None:
        told |= _request(account)
    if account.steps:
        steps = account.steps
        told |= {
            "gen_ai.response.id": steps[0].answer,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [step.finish for step in steps],
            "gen_ai.usage.input_tokens": account.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(step.sampled for step in steps),
            "penstock.policy_version": max((version for step in steps for version in step.versions), default=0),
        }
    return told


def _request(account: Account) -> dict[str, Any]:
    call = account.call
    assert call is not None
    sampling = call.sampling
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.choice.count": call.choices if call.choices != 1 else None,
        "gen_ai.request.stream": True if call.stream else None,
        "gen_ai.response.time_to_first_chunk": account.first_token_s if call.stream else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


@asynccontextmanager
async def open_spans(wanted: bool, *, model: str) -> AsyncGenerator[Spans | None]:
    """Spans over OTLP, as its usual environment variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`, …); None where none are wanted."""
    if not wanted:
        yield None
        return
    spans = _over_otlp(model)
    try:
        yield spans
    finally:
        await asyncio.to_thread(spans.close)


def _over_otlp(model: str) -> Spans:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as cause:
        raise ConfigError(f"spans need OpenTelemetry ({cause}); run: pip install 'penstock[otel]'") from cause
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "penstock-gateway"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider, model=model)
