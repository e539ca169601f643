"""Observability: the gateway's metrics in Prometheus' text format 0.0.4, and one OpenTelemetry span for each model call."""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.gateway.auth import Headers
from penstock.gateway.request import CallSummary
from penstock.records import NO_LIMIT
from penstock.system.packages import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


# Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
Samples = dict[str, dict[str, float]]
"""Family, to its values by name and labels as they are printed: `penstock_refused_total{code="stopping"}` → 3."""


class MetricFamily(NamedTuple):
    kind: str
    text: str
    labels: tuple[str, ...] = ()


FAMILIES = {
    "penstock_gateway_info": MetricFamily("gauge", "Always 1; its labels say what is served.", ("model",)),
    "penstock_policy_version": MetricFamily("gauge", "The policy version that the next token is sampled under."),
    "penstock_open_rollouts": MetricFamily("gauge", "Rollouts that the gateway holds open."),
    "penstock_calls_in_flight": MetricFamily("gauge", "Model calls that are being answered."),
    "penstock_calls_total": MetricFamily(
        "counter", "Model calls by HTTP status; left: the caller hung up first.", ("dialect", "status")
    ),
    "penstock_refused_total": MetricFamily("counter", "Requests that got an error, by its code.", ("code",)),
    "penstock_repeated_calls_total": MetricFamily(
        "counter", "Retries that joined a call in response or got its answer again.", ("how",)
    ),
    "penstock_ignored_total": MetricFamily("counter", "What calls asked for and is not done, by name.", ("name",)),
    "penstock_notices_total": MetricFamily("counter", "What else was not done as asked, by name.", ("name",)),
    "penstock_steps_total": MetricFamily("counter", "Steps recorded, by how they finished.", ("finish",)),
    "penstock_prompt_tokens_total": MetricFamily("counter", "Prompt tokens that the engine got."),
    "penstock_sampled_tokens_total": MetricFamily("counter", "Tokens that the engine sampled."),
    "penstock_exact_tokens_total": MetricFamily("counter", "Sampled tokens that are recorded with the digest of their context."),
    "penstock_breaks_total": MetricFamily("counter", "Prompts that could not continue earlier tokens, by reason.", ("reason",)),
    "penstock_policy_steps_total": MetricFamily("counter", "Steps recorded, by policy.", ("policy",)),
    "penstock_policy_tokens_total": MetricFamily("counter", "Tokens sampled, by policy.", ("policy",)),
    "penstock_call_seconds": MetricFamily("histogram", "Duration of model calls.", ("dialect",)),
    "penstock_first_token_seconds": MetricFamily("histogram", "Time until the engine's first token."),
}
BY_POLICY = frozenset({"penstock_policy_steps_total", "penstock_policy_tokens_total"})
"""Families that a gateway without `[policies.*]` does not have."""


class Histogram:
    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum += seconds


class GatewayMetrics:
    """The counts of one process. A call costs some increments; the rest is done when metrics are read."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.refused: Counter[str] = Counter()
        self.breaks: Counter[str] = Counter()
        self.notices: Counter[str] = Counter()
        """What was not done as callers asked, by name; a prefix says the kind: `ignored:seed`."""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._steps: Counter[str] = Counter()
        self._policy_steps: Counter[str] = Counter()
        self._policy_tokens: Counter[str] = Counter()
        self._prompt_tokens = self._sampled_tokens = self._exact_tokens = 0
        self._seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._first_token = Histogram()

    def begin(self) -> None:
        """A model call starts; `end` counts it."""
        self.in_flight += 1

    def end(self, dialect: str, status: str, summary: CallSummary, *, seconds: float) -> None:
        self.in_flight -= 1
        self._calls[dialect, status] += 1
        self._seconds[dialect].add(seconds)
        self._prompt_tokens += summary.prompt_tokens
        self._sampled_tokens += summary.sampled_tokens
        if summary.first_token_s is not None:
            self._first_token.add(summary.first_token_s)
        if summary.error is not None:
            self.refused[summary.error.code] += 1
        for step in summary.steps:
            self._steps[step.finish] += 1
            self._exact_tokens += len(step.completion_ids) if step.context_digest else 0
            if step.policy:
                self._policy_steps[step.policy] += 1
                self._policy_tokens[step.policy] += step.sampled

    def samples(self, *, model: str, version: int, rollouts: int) -> Samples:
        kinds = {kind: Counter[str]() for kind in ("ignored", "repeated", "noticed")}
        for notice, count in self.notices.items():
            kind, name = _kind(notice)
            kinds[kind][name] += count
        samples: Samples = {
            "penstock_gateway_info": _lines("penstock_gateway_info", [((model,), 1)]),
            "penstock_call_seconds": _all_buckets("penstock_call_seconds", {(k,): v for k, v in self._seconds.items()}),
            "penstock_first_token_seconds": _all_buckets("penstock_first_token_seconds", {(): self._first_token}),
            "penstock_calls_total": _lines("penstock_calls_total", self._calls.items()),
        }
        unlabelled = {
            "policy_version": version,
            "open_rollouts": rollouts,
            "calls_in_flight": self.in_flight,
            "prompt_tokens_total": self._prompt_tokens,
            "sampled_tokens_total": self._sampled_tokens,
            "exact_tokens_total": self._exact_tokens,
        }
        labelled = {
            "refused": self.refused,
            "repeated_calls": kinds["repeated"],
            "ignored": kinds["ignored"],
            "notices": kinds["noticed"],
            "steps": self._steps,
            "policy_steps": self._policy_steps,
            "policy_tokens": self._policy_tokens,
            "breaks": self.breaks,
        }
        samples |= {f"penstock_{name}": _lines(f"penstock_{name}", [((), value)]) for name, value in unlabelled.items()}
        for name, counts in labelled.items():
            full = f"penstock_{name}_total"
            samples[full] = _lines(full, [((label,), count) for label, count in counts.items()])
        return samples


def as_text(samples: Samples) -> str:
    parts: list[str] = []
    for name, family in FAMILIES.items():
        if name in BY_POLICY and not samples.get(name):
            continue
        parts += [f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}"]
        parts += [f"{line} {_number(value)}" for line, value in samples.get(name, {}).items()]
    return "\n".join([*parts, ""])


def _kind(notice: str) -> tuple[str, str]:
    """`ignored:seed` → ignored, seed; `joined_call` → repeated, joined; all else → noticed."""
    kind, _, name = notice.partition(":")
    if kind == "ignored":
        return kind, name
    return ("repeated", kind.removesuffix("_call")) if kind in ("joined_call", "replayed_call") else ("noticed", notice)


def _lines(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> dict[str, float]:
    labels = FAMILIES[name].labels
    return {_line(name, zip(labels, label_values, strict=True)): value for label_values, value in values}


def _all_buckets(name: str, histograms: Mapping[tuple[str, ...], Histogram]) -> dict[str, float]:
    lines: dict[str, float] = {}
    for label_values, histogram in histograms.items():
        labels = [*zip(FAMILIES[name].labels, label_values, strict=True)]
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
            lines[_line(f"{name}_bucket", [*labels, ("le", bound)])] = count
        lines[_line(f"{name}_sum", labels)] = round(histogram.sum, 6)
        lines[_line(f"{name}_count", labels)] = sum(histogram.counts)
    return lines


def _line(name: str, labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{label}="{_escape(value)}"' for label, value in labels)
    return f"{name}{{{inside}}}" if inside else name


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else repr(value)


# Tracing

PROVIDER = "penstock"
FLUSH_TIMEOUT_MS = 5_000
"""How long a stopping gateway waits for the exporter."""


class CallTracer:
    """Makes a span of each call once it has ended. A caller's `traceparent` header is the span's parent."""

    def __init__(self, provider: "TracerProvider", *, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("penstock.gateway")
        self._model = model
        self._parents = TraceContextTextMapPropagator()

    def record_call(self, dialect: str, summary: CallSummary, headers: Headers, *, seconds: float) -> None:
        """Record a span that began `seconds` ago and ends now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        operation = "text_completion" if dialect == "completions" else "chat"
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name.startswith(b"trace")}
        span = self._tracer.start_span(
            f"{operation} {(summary.call and summary.call.policy) or self._model}",
            context=self._parents.extract(carrier),
            kind=SpanKind.CLIENT,
            attributes={"gen_ai.operation.name": operation, **span_attributes(summary, self._model, dialect)},
            start_time=end_ns - round(seconds * 1e9),
        )
        if summary.error is not None:
            span.set_attribute("error.type", summary.error.code)
            span.set_status(Status(StatusCode.ERROR, summary.error.code))
        span.end(end_ns)

    def close(self) -> None:
        """Export what is buffered. Blocks: call it in a thread."""
        for name, arguments in (("force_flush", (FLUSH_TIMEOUT_MS,)), ("shutdown", ())):
            if finish := getattr(self._provider, name, None):
                finish(*arguments)


def span_attributes(summary: CallSummary, model: str, dialect: str) -> dict[str, Any]:
    """Attributes of the GenAI conventions, and our own for what they lack. No message content."""
    model = (summary.call and summary.call.policy) or model
    fields: dict[str, Any] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "penstock.dialect": dialect,
    }
    if summary.caller is not None:
        fields["gen_ai.conversation.id"] = f"{summary.caller.rollout_id}/{summary.caller.transcript}"
        fields["penstock.rollout_id"] = summary.caller.rollout_id
    if summary.call is not None:
        fields |= _request_attributes(summary)
    if summary.steps:
        steps = summary.steps
        fields |= {
            "gen_ai.response.id": steps[0].answer,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [step.finish for step in steps],
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(step.sampled for step in steps),
            "penstock.policy_version": max((version for step in steps for version in step.versions), default=0),
        }
    return fields


def _request_attributes(summary: CallSummary) -> dict[str, Any]:
    call = summary.call
    assert call is not None
    sampling = call.sampling
    fields: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens if sampling.max_tokens != NO_LIMIT else None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.choice.count": call.choices if call.choices != 1 else None,
        "gen_ai.request.stream": True if call.stream else None,
        "gen_ai.response.time_to_first_chunk": summary.first_token_s if call.stream else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


@asynccontextmanager
async def open_tracer(enabled: bool, *, model: str) -> AsyncGenerator[CallTracer | None]:
    """Spans over OTLP, as its usual environment variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`, …); None where none are wanted."""
    if not enabled:
        yield None
        return
    tracer = _otlp_tracer(model)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def _otlp_tracer(model: str) -> CallTracer:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as cause:
        raise ConfigError(f"spans need OpenTelemetry ({cause}); run: {install_command('otel')}") from cause
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"pipeline.name": "penstock-gateway"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return CallTracer(provider, model=model)
