"""Spans of requests in a trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache_api.http.telemetry import telemetry_config
from tests.api.http.conftest import LEAVE, Start, client_of

STAGES = ["turn", "retrieve", "assemble", "queue", "prefill", "decode"]
ASK = {"question": LEAVE, "collection": "notes", "max_tokens": 2}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """A process has one tracer provider, for good."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def traced(rag: RagCache, exporter: InMemorySpanExporter) -> Iterator[TestClient]:
    exporter.clear()
    with client_of(rag, telemetry=True) as client:
        yield client


def named(spans: tuple[ReadableSpan, ...], name: str) -> ReadableSpan:
    [span] = [each for each in spans if each.name == name]
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_stages_in_the_trace_of_its_call(
    traced: TestClient, exporter: InMemorySpanExporter, stream: bool
) -> None:
    caller = f"00-{7:032x}-{9:016x}-01"
    response = traced.post(
        "/v1/answers", json={**ASK, "stream": stream}, headers={"traceparent": caller}
    )
    assert response.status_code == 200
    spans = exporter.get_finished_spans()
    call, answer = named(spans, "POST /v1/answers"), named(spans, "ragcache.answer")
    assert {span.context.trace_id for span in spans} == {7}
    assert call.parent is not None
    assert call.parent.span_id == 9
    stages = [named(spans, f"ragcache.{name}") for name in STAGES]
    assert all(each.parent.span_id == answer.context.span_id for each in stages)
    assert [each.start_time for each in stages[1:]] == [each.end_time for each in stages[:-1]]
    assert stages[0].start_time == answer.start_time >= call.start_time
    assert stages[-1].end_time == answer.end_time
    assert answer.attributes["ragcache.cached_tokens"] > 0
    assert answer.attributes["ragcache.mode"] == "rooted"


def test_health_and_metrics_leave_no_trace(
    traced: TestClient, exporter: InMemorySpanExporter
) -> None:
    traced.get("/health/ready")
    traced.get("/metrics")
    assert exporter.get_finished_spans() == ()
    traced.get("/v1/collections")
    assert named(exporter.get_finished_spans(), "GET /v1/collections")


def test_a_service_without_telemetry_leaves_no_trace(
    rag: RagCache, exporter: InMemorySpanExporter
) -> None:
    exporter.clear()
    assert telemetry_config(False)["tracing"] is False
    with client_of(rag) as client:
        assert client.post("/v1/answers", json=ASK).status_code == 200
    assert exporter.get_finished_spans() == ()


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
def test_spans_go_where_the_environment_says(start: Start, state: Path) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing of it belongs into the output of the tests."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        server = start(
            state, "--set", "telemetry=true",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}",
            OTEL_EXPORTER_OTLP_COMPRESSION="none",
        )  # fmt: skip
        assert httpx.post(f"{server.url}/v1/answers", json=ASK, timeout=60).status_code == 200
        assert server.stop() == 0
        collector.shutdown()
    assert {path for path, _ in received} == {"/v1/traces"}
    assert b"ragcache.prefill" in b"".join(body for _, body in received)
