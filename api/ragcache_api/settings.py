"""Settings of the service and the command line; docs/guides/operate.md lists them.

Each is an option, a variable `RAGCACHE_NAME`, or a line of `ragcache.toml` in the working folder;
the first of these counts.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragcache.errors import ConfigurationError

Size = int | str
ModelDType = Literal["auto", "float32", "bfloat16", "float16"]
Positive = Annotated[int, Field(ge=1)]
_SCALE = re.compile(r"[1-9]\d{0,3}-[1-9]\d{0,3}")
_REDIS = ("redis://", "rediss://", "redis+unix://")
FILE, PREFIX = "ragcache.toml", "RAGCACHE_"


def _split(value: Any) -> Any:
    """Splits lists such as `a, b`, the form of options and variables."""
    parts = value.split(",") if isinstance(value, str) else None
    return value if parts is None else [part.strip() for part in parts if part.strip()]


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class ServiceSettings(BaseSettings):
    """All settings. Sizes are bytes, or texts such as `8GiB`; times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, toml_file=FILE, extra="forbid", frozen=True, protected_namespaces=()
    )

    state: Path = Field(Path("ragcache-state"), description="The state folder.")
    model: str | None = Field(None, description="A model folder or hub name; else the reader.")
    embedding: str = Field(
        "auto", description="Retrieval by meaning: `auto`, `minilm`, `none` or a model."
    )
    reranker: str | None = Field(
        None, description="A cross-encoder that orders what was found: a folder or hub name."
    )
    instruction: str | None = Field(
        None, description="What the model is to do with the documents; else a brief answer."
    )
    module_tokens: Positive = Field(384, description="The most tokens of a module.")
    max_tokens: Positive = Field(
        64, description="Tokens of an answer unless a request says; chats may fill the window."
    )
    force_modes: bool = Field(
        False, description="Whether modes that are far from `exact` on the model serve too."
    )
    queue: Positive = Field(1024, description="Requests that wait; one more gets 429.")
    ingestion_bytes: Size = Field(
        "256MiB", description="Documents that wait to be stored; more get 429."
    )
    host_bytes: Size = Field("2GiB", description="Budget of the host tier.")
    device: str = Field("cpu", description="Where the model runs: `cpu`, `cuda`, `cuda:1`.")
    dtype: ModelDType = Field(
        "auto", description="What the model computes in; `auto`: what is fast on this machine."
    )
    states_dtype: ModelDType = Field(
        "auto", description="What states are kept in; `auto`: the checkpoint's dtype."
    )
    long_context: bool = Field(
        False, description="A model with LongRoPE uses its long factors, for its whole context."
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="Weights in 8 or 4 bits (extra `quantized`); else as they are stored."
    )
    private_bytes: Size | None = Field(
        None, description="Room for questions' own states: 512 MiB; a share of a GPU."
    )
    device_bytes: Size | None = Field(
        None, description="Budget of the tier on the GPU; else what the engine leaves free there."
    )
    device_kv_dtype: Literal["model", "int8"] | None = Field(
        None, description="How that tier keeps states."
    )
    disk_bytes: Size | None = Field(None, description="Budget of the disk; else no limit.")
    remote: str | None = Field(None, description="An fsspec URL of a remote tier.")
    remote_bytes: Size | None = Field(None, description="Budget of the remote tier.")
    kv_dtype: Literal["model", "int8"] = Field("model", description="How tiers keep states.")
    ledger: str | None = Field(None, description="A database URL in place of the ledger's file.")
    stale_seconds: float = Field(
        60.0, ge=1, description="Seconds that questions do without a ledger that is away."
    )
    claim_patience: float = Field(
        1.0, ge=0, description="Seconds that a question waits for what another process encodes."
    )

    replicas: Positive | None = Field(
        None, description="Replicas behind one gateway, on Ray (extra `ray`)."
    )
    autoscale: str | None = Field(
        None, description="Fewest and most replicas, as `1-8`: as many as requests need."
    )
    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="The port; 0 takes a free one.")
    connections: Positive = Field(1000, description="The most connections; one more gets 503.")
    deadline: float = Field(
        300.0, gt=0, description="The most seconds of an answer, then 504, and of a body's coming."
    )
    lame_duck: float = Field(
        5.0, ge=0, description="Seconds after SIGTERM in which a service still accepts."
    )
    grace: float = Field(20.0, ge=0, description="Seconds that running requests get at the end.")
    body_bytes: Positive = Field(4 * 2**20, description="The most bytes of a request's body.")
    upload_bytes: Positive = Field(64 * 2**20, description="The most bytes of an upload.")
    rate: str | None = Field(None, description="Requests of a key or address, as `100/minute`.")
    rate_storage: str | None = Field(
        None, description="A Redis by which services count rates together, as `redis://HOST`."
    )
    allowed_hosts: Names = Field(
        default=["localhost", "127.0.0.1", "::1"],
        description="Names by which a service without keys may be called.",
    )
    trusted_proxies: Names = Field(
        default=[], description="Addresses or networks whose `X-Forwarded-For` counts."
    )
    page: bool = Field(True, description="Whether /admin/ and /docs show pages.")
    telemetry: bool = Field(False, description="OpenTelemetry traces (extra `otel`).")
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", description="Of the server's log."
    )

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

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            ipaddress.ip_network(proxy)  # raises ValueError
        return proxies

    @classmethod
    def read(cls, **given: Any) -> ServiceSettings:
        """The settings from options (None is not one), the environment and the file. Raises
        `ConfigurationError`."""
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ConfigurationError(
                f"setting {name!r} ({_place(name, given)}): {first['msg']}; docs/guides/operate.md "
                "lists the settings"
            ) from None
        except TOMLDecodeError as error:
            raise ConfigurationError(f"{Path(FILE).resolve()} is no TOML: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{Path(FILE).resolve()} cannot be read: {error}") from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, *_: Any, **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """Options come before the environment, and that before the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def autoscale_bounds(self) -> tuple[int, int] | None:
        """The fewest and the most replicas; None for a fixed number."""
        if self.autoscale is None:
            return None
        first, last = sorted(map(int, self.autoscale.split("-")))
        return max(first, 1), last

    def cluster_ledger(self) -> str:
        """The ledger of several replicas, which share it and a remote tier. Raises
        `ConfigurationError` where they would not."""
        if self.ledger is None or not self.ledger.startswith("postgresql"):
            raise ConfigurationError(
                "several replicas share one ledger: set `ledger` to postgresql://USER@HOST/NAME "
                f"({'it is not set' if self.ledger is None else 'SQLite is for one process'})"
            )
        if self.remote is None:
            raise ConfigurationError(
                "several replicas share states over a remote tier: set `remote` to a URL such as "
                "s3://BUCKET/PREFIX, or file:///PATH on a disk that all of them mount"
            )
        return self.ledger

    def opening(self) -> dict[str, Any]:
        """The arguments of `RagCache.open` besides state and model."""
        names = {
            "embedding", "module_tokens", "host_bytes", "max_tokens", "private_bytes", "queue",
            "device_bytes", "device_kv_dtype", "disk_bytes",
            "remote", "remote_bytes", "kv_dtype", "ledger", "ingestion_bytes", "device",
            "dtype", "states_dtype", "claim_patience", "stale_seconds", "long_context",
            "instruction", "reranker", "force_modes", "quantization",
        }  # fmt: skip
        return self.model_dump(include=names, exclude_none=True)


def _place(name: str, options: Collection[str]) -> str:
    """The source of a value: the first that has one."""
    variable = PREFIX + name.upper()
    if name in options:
        return "an option"
    return f"the variable {variable}" if variable in map(str.upper, os.environ) else FILE
