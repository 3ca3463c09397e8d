"""OpenTelemetry, by FastAPI's own support.

The exporter is that of the environment (`OTEL_EXPORTER_OTLP_ENDPOINT` and its kin). Health checks
and metrics are left out.
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
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "traces need OpenTelemetry's exporters: pip install 'ragcache[otel]'"
        ) from None
    return {"tracing": True, "auto_configure": True, "exclude": _unwatched}


def _unwatched(scope: MutableMapping[str, Any]) -> bool:
    path: str = scope.get("path", "")
    return path.startswith("/health/") or path == "/metrics"
