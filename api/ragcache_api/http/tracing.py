"""OpenTelemetry, by FastAPI's own support.

Spans go over OTLP by HTTP to where the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT` and others),
and to the process's tracer provider, if it has one. Health checks and metrics have none. Below the
span of its call each answer has a span `ragcache.answer`, and below that its stages:
`ragcache.retrieve`, `assemble`, `queue`, `prefill` (to the first token) and `decode`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.trace import Tracer

from ragcache import Answer, Timings
from ragcache.errors import MissingExtra
from ragcache_api.http.requests import ActiveRequest

_SECOND = 1_000_000_000  # in the nanoseconds of OpenTelemetry


def telemetry(on: bool) -> TelemetryConfig:
    """FastAPI's configuration of traces. Raises `MissingExtra` if they are on without exporters."""
    if not on:
        return {"tracing": False, "metrics": False, "logs": False}
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        text = "traces need OpenTelemetry's exporters: pip install 'ragcache[otel]'"
        raise MissingExtra(text) from None
    return {
        "tracing": True, "metrics": False, "logs": False, "auto_configure": True,
        "exclude": _untraced,
    }  # fmt: skip


def trace_answers(active: ActiveRequest) -> None:
    """Adds spans of a request that has ended to the trace of its call."""
    began = time.time_ns() - int((time.monotonic() - active.started) * _SECOND)
    for answer in active.answers:
        active.context.run(_trace, trace.get_tracer("ragcache"), answer, began)


def _trace(tracer: Tracer, answer: Answer, began: int) -> None:
    end = began + int(answer.timings.total * _SECOND)
    span = tracer.start_span("ragcache.answer", start_time=began, attributes=_attributes(answer))
    with trace.use_span(span, end_on_exit=False):
        for name, at, until in _stages(answer.timings):
            part = tracer.start_span(f"ragcache.{name}", start_time=began + int(at * _SECOND))
            part.end(began + int(until * _SECOND))
    span.end(end)


def _stages(timings: Timings) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of an answer's stages, in seconds since its call."""
    assembled = timings.retrieve + timings.assemble
    admitted = min(assembled + timings.queued, timings.first_token)
    marks = (0.0, timings.retrieve, assembled, admitted, timings.first_token, timings.total)
    names = ("retrieve", "assemble", "queue", "prefill", "decode")
    for name, at, until in zip(names, marks, marks[1:], strict=False):
        yield name, at, max(at, until)


def _attributes(answer: Answer) -> dict[str, str | int]:
    counts = ("prompt_tokens", "cached_tokens", "shared_tokens", "computed_tokens")
    return {
        "ragcache.mode": answer.mode, "ragcache.finish_reason": answer.finish_reason,
        "ragcache.modules": len(answer.sources),
        **{f"ragcache.{name}": getattr(answer.reuse, name) for name in counts},
    }  # fmt: skip


def _untraced(scope: MutableMapping[str, Any]) -> bool:
    path: str = scope.get("path", "")
    return path.startswith("/health/") or path == "/metrics"
