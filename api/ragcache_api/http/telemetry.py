"""Telemetry of the service: metrics for Prometheus, and traces for OpenTelemetry.

Each application has its own collector registry. FastAPI makes the traces and exports them with OTLP
over HTTP, as the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT` and others), and to the tracer
provider of the process if there is one. Health checks and metrics are not traced. The span of a
call contains a span `ragcache.answer` for each answer, and that contains the stages of the answer:
`ragcache.turn` (the wait for the request's turn), `retrieve`, `assemble`, `queue`, `prefill` (to
the first token) and `decode`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragcache import Answer, RagCache, Timings
from ragcache.errors import MissingExtra
from ragcache_api.http.requests import ActiveRequest, RequestRegistry
from ragcache_api.http.stats_recorder import hit_or_miss, with_tokens

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUEUED = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0)
_SECOND = 1_000_000_000  # nanoseconds, the unit of OpenTelemetry


class Metrics:
    """Metrics of the service.

    Requests are counted as they end. `StateCollector` reads all other figures at each scrape.
    """

    def __init__(self, rag: RagCache, requests: RequestRegistry) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "ragcache_requests",
            "Requests that have ended.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "ragcache_prompt_tokens",
            "Tokens of prompts, by where they came from.",
            ["source"],
            registry=self.registry,
        )
        self._first_token = Histogram(
            "ragcache_first_token_seconds",
            "From the call to the first token.",
            ["cache"],
            buckets=_FIRST_TOKEN,
            registry=self.registry,
        )
        self._queued = Histogram(
            "ragcache_queue_seconds",
            "The wait for a turn and for the engine.",
            buckets=_QUEUED,
            registry=self.registry,
        )
        self.registry.register(StateCollector(rag, requests))

    def count_request(self, active: ActiveRequest) -> None:
        """Count a request that has ended."""
        self._ended.labels(active.kind, active.outcome).inc()
        for answer, counts in with_tokens(active):
            for source, number in counts.items():
                self._tokens.labels(source).inc(number)
            if answer.reuse.prompt_tokens:
                self._queued.observe(answer.timings.queued)
            if kind := hit_or_miss(answer):
                self._first_token.labels(kind).observe(answer.timings.first_token)

    def text(self) -> bytes:
        """Write all metrics in Prometheus's text format. May wait for the store."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """Collector for figures of the store and the engine since they were opened.

    Evictions come from counters, since the ledger's list of evictions is bounded.
    """

    def __init__(self, rag: RagCache, requests: RequestRegistry) -> None:
        self._rag, self._shared, self._requests = rag, rag.internals.shared, requests

    def describe(self) -> list[Metric]:
        """Return an empty list, so that registering the collector reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all figures as they are now."""
        yield from self._tiers()
        counters, engine = self._shared.store.counters, self._shared.engine
        stats, core = engine.stats, engine.core
        evictions = counters.evictions.copy()
        yield _counter("evictions", "States that left a tier.", ["tier", "reason"], evictions)
        rows = stats.prompt_tokens + stats.decoded_tokens + stats.encoded_tokens
        admission = self._requests.admission
        counts = (
            ("refused", "Requests refused because of their expected wait.", admission.refused),
            ("misses", "States that no tier held and that were encoded.", counters.encoded),
            ("steps", "Steps of the engine.", stats.steps),
            ("step_rows", "Rows of all steps; by steps, the mean batch.", rows),
            ("drafted_tokens", "Tokens guessed from prompts.", stats.drafted_tokens),
            ("accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens),
            ("preempted", "Requests that lost their memory and waited again.", stats.preempted),
        )
        levels = (
            ("waiting_requests", "Requests that wait for their turn.", admission.waiting),
            ("engine_running", "Requests that are running in the engine.", core.running),
            ("engine_waiting", "Requests that are waiting in the engine.", core.waiting),
            ("leased_states", "States that requests are reading.", count_leased(self._rag)),
            ("open_requests", "Requests that the service holds.", len(self._requests.active)),
        )
        for name, text, value in counts:
            yield CounterMetricFamily(f"ragcache_{name}", text, value=value)
        for name, text, value in levels:
            yield GaugeMetricFamily(f"ragcache_{name}", text, value=value)

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._rag.tiers()
        for name, text in (
            ("used_bytes", "Bytes that a tier holds."),
            ("pinned_bytes", "Bytes of it that are pinned."),
            ("states", "States that a tier holds."),
        ):
            family = GaugeMetricFamily(f"ragcache_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        hits = {(tier.name,): tier.hits for tier in tiers}
        yield _counter("hits", "States found in a tier.", ["tier"], hits)


def count_leased(rag: RagCache) -> int:
    """Count the states that requests are reading."""
    rag.internals.shared.deferred.release()
    return len(rag.internals.shared.store.memory.leases)


def _counter(name: str, text: str, labels: list[str], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"ragcache_{name}", text, labels=labels)
    for label, number in values.items():
        family.add_metric(label, number)
    return family


def telemetry_config(on: bool) -> TelemetryConfig:
    """Return FastAPI's configuration of traces. Raises `MissingExtra` without an exporter."""
    if not on:
        return {"tracing": False, "metrics": False, "logs": False}
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        text = "traces need OpenTelemetry's exporters: pip install 'ragcache[otel]'"
        raise MissingExtra(text) from None
    return {
        "tracing": True,
        "metrics": False,
        "logs": False,
        "auto_configure": True,
        "exclude": _untraced,
    }


def trace_answers(active: ActiveRequest) -> None:
    """Add spans for the answers of an ended request to the trace of its call."""
    began = time.time_ns() - int((time.monotonic() - active.started) * _SECOND)
    for answer in active.answers:
        active.context.run(_trace, trace.get_tracer("ragcache"), answer, began, active.waited)


def _trace(tracer: Tracer, answer: Answer, began: int, waited: float) -> None:
    end = began + int(answer.timings.total * _SECOND)
    counts = ("prompt_tokens", "cached_tokens", "shared_tokens", "computed_tokens")
    attributes: dict[str, str | int] = {
        "ragcache.mode": answer.mode,
        "ragcache.finish_reason": answer.finish_reason,
        "ragcache.modules": len(answer.sources),
        **{f"ragcache.{name}": getattr(answer.reuse, name) for name in counts},
    }
    span = tracer.start_span("ragcache.answer", start_time=began, attributes=attributes)
    with trace.use_span(span, end_on_exit=False):
        for name, at, until in _stages(answer.timings, waited):
            part = tracer.start_span(f"ragcache.{name}", start_time=began + int(at * _SECOND))
            part.end(began + int(until * _SECOND))
    span.end(end)


def _stages(timings: Timings, waited: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of each stage of an answer, in seconds since the request arrived.

    Args:
        timings: Durations of the answer.
        waited: Part of `timings.queued` before the request's turn.
    """
    retrieved = waited + timings.retrieve
    assembled = retrieved + timings.assemble
    admitted = min(assembled + timings.queued - waited, timings.first_token)
    marks = (0.0, waited, retrieved, assembled, admitted, timings.first_token, timings.total)
    names = ("turn", "retrieve", "assemble", "queue", "prefill", "decode")
    for name, at, until in zip(names, marks, marks[1:], strict=False):
        yield name, at, max(at, until)


def _untraced(scope: MutableMapping[str, Any]) -> bool:
    path: str = scope.get("path", "")
    return path.startswith("/health/") or path == "/metrics"
