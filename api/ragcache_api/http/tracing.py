"""OpenTelemetry, by FastAPI's own support.

Spans go where the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT` and its kin), over OTLP by HTTP,
and to the tracer provider that the process has, if it has one. Health checks and
metrics are left out.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from fastapi.telemetry import TelemetryConfig

from ragcache.errors import MissingExtra


def telemetry(on: bool) -> TelemetryConfig:
    """Raises `MissingExtra` where traces are asked for and nothing exports them."""
    if not on:
        return {"tracing": False, "metrics": False, "logs": False}
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "traces need OpenTelemetry's exporters: pip install 'ragcache[otel]'"
        ) from None
    return {
        "tracing": True, "metrics": False, "logs": False, "auto_configure": True,
        "exclude": _unwatched,
    }  # fmt: skip


def _unwatched(scope: MutableMapping[str, Any]) -> bool:
    path: str = scope.get("path", "")
    return path.startswith("/health/") or path == "/metrics"
