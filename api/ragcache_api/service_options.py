"""`ServiceOptions`: options of the service and the command line, in addition to `OpenConfig`."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ragcache.params import OpenConfig

Positive = Annotated[int, Field(ge=1)]
_SCALE = re.compile(r"[1-9]\d{0,3}-[1-9]\d{0,3}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_REDIS = ("redis://", "rediss://", "redis+unix://")


def _split(value: Any) -> Any:
    """Splits lists such as `a, b`, the form of options and variables."""
    parts = value.split(",") if isinstance(value, str) else None
    return value if parts is None else [part.strip() for part in parts if part.strip()]


Names = Annotated[list[str], BeforeValidator(_split)]


class ServiceOptions(OpenConfig):
    """Options of the service and the command line, in addition to the fields of `OpenConfig`.

    Times are seconds. `ServiceSettings` also reads them from the environment.
    """

    model: str | None = None
    """A model folder, hub name or GGUF file. The embedded reader by default."""
    served_name: Annotated[str | None, Field(max_length=200, pattern=r"^[^/\s]+(/[^/\s]+)*$")] = (
        None
    )
    """The model's id for clients. The last part of `model` by default."""
    embedding: str = "auto"
    """Retrieval by meaning: `auto`, `minilm`, `none`, or a folder or hub name."""
    reranker: str | None = None
    """A cross-encoder that orders the retrieved modules: a folder or hub name."""
    ocr: Literal["tesseract"] | None = None
    """Recognition of text on pages of PDFs that have none, by the program tesseract."""
    state: Path = Path("ragcache-state")
    """The state folder."""
    replicas: Positive | None = None
    """Replicas behind one gateway, on Ray (extra `ray`)."""
    autoscale: str | None = None
    """Fewest and most replicas, as `1-8`: as many as requests need."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port; 0 takes a free one."""
    connections: Positive = 1000
    """The most connections; one more gets 503."""
    chat_max_tokens: Positive = 1024
    """The most tokens of an answer over OpenAI's chat route, if the request sets no limit."""
    queue_seconds: Annotated[float, Field(gt=0)] = 10.0
    """The most seconds that a request is expected to wait for its turn, then 503."""
    deadline: Annotated[float, Field(gt=0)] = 300.0
    """The most seconds of an answer, then 504, and of a body's coming."""
    lame_duck: Annotated[float, Field(ge=0)] = 5.0
    """Seconds after SIGTERM in which a service still accepts."""
    grace: Annotated[float, Field(ge=0)] = 20.0
    """Seconds that running requests get at the end."""
    body_bytes: Positive = 4 * 2**20
    """The most bytes of a request's body."""
    upload_bytes: Positive = 64 * 2**20
    """The most bytes of an upload."""
    import_bytes: Positive = 64 * 2**30
    """The most bytes of an archive that an operator uploads."""
    mcp_ingest: bool = False
    """Let clients of the Model Context Protocol store documents."""
    rate: str | None = None
    """Requests of a key or address, as `100/minute`."""
    rate_storage: str | None = None
    """A Redis by which services count rates together, as `redis://HOST`."""
    allowed_hosts: Names = Field(default=["localhost", "127.0.0.1", "::1"])
    """Names by which a service without keys may be called."""
    cors_origins: Names = Field(default=[])
    """Origins whose pages may call, as `https://app.example`, or `*`. None by default."""
    trusted_proxies: Names = Field(default=[])
    """Addresses or networks whose `X-Forwarded-For` counts."""
    page: bool = True
    """Whether /admin/ and /docs show pages."""
    telemetry: bool = False
    """OpenTelemetry traces (extra `otel`)."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Level of the server's log."""
    access_log: Literal["off", "text", "json"] = "off"
    """One line for each request on standard output, without texts of users."""

    @field_validator("rate")
    @classmethod
    def _is_a_rate(cls, text: str | None) -> str | None:
        if text is not None:
            from limits import parse_many

            parse_many(text)  # raises ValueError
        return text

    @field_validator("autoscale")
    @classmethod
    def _is_a_range(cls, text: str | None) -> str | None:
        if text is not None and not _SCALE.fullmatch(text):
            raise ValueError("write the fewest and the most replicas as `1-8`")
        return text

    @field_validator("rate_storage")
    @classmethod
    def _is_a_redis(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(_REDIS):
            raise ValueError(f"this is no URL of a Redis; those begin with {', '.join(_REDIS)}")
        return url

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write it as https://app.example:8443")
        return origins

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            ipaddress.ip_network(proxy)  # raises ValueError
        return proxies
