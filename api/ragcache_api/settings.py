"""Settings of the service and the command line; docs/guides/operate.md explains the usual ones.

Each is an option, a variable `RAGCACHE_NAME`, or a line of `ragcache.toml` in the working folder;
the first of these counts.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragcache.errors import ConfigurationError
from ragcache.params import OpenConfig, Surface, explain

Positive = Annotated[int, Field(ge=1)]
_SCALE = re.compile(r"[1-9]\d{0,3}-[1-9]\d{0,3}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_REDIS = ("redis://", "rediss://", "redis+unix://")
FILE, PREFIX = "ragcache.toml", "RAGCACHE_"


def _split(value: Any) -> Any:
    """Splits lists such as `a, b`, the form of options and variables."""
    parts = value.split(",") if isinstance(value, str) else None
    return value if parts is None else [part.strip() for part in parts if part.strip()]


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class ServiceOptions(OpenConfig):
    """Options of the service and the command line, in addition to the fields of `OpenConfig`.

    Times are seconds. `ServiceSettings` also reads them from the environment.
    """

    model: str | None = None
    """A model folder, hub name or GGUF file. The embedded reader by default."""
    served_name: Annotated[str | None, Field(pattern=r"^[^@\s]{1,200}$")] = None
    """The model's id for OpenAI's clients, without `@`. The last part of `model` by default."""
    embedding: str = "auto"
    """Retrieval by meaning: `auto`, `minilm`, `none`, or a folder or hub name."""
    reranker: str | None = None
    """A cross-encoder that orders the retrieved modules: a folder or hub name."""
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

    def settings(self) -> ServiceSettings:
        """Return all settings, read with these options; see `ServiceSettings.read`."""
        return ServiceSettings.read(**self.given())

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


class ServiceSettings(BaseSettings, Surface, ServiceOptions):
    """All settings: options, then variables `RAGCACHE_NAME`, then `ragcache.toml`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, toml_file=FILE, extra="forbid")
    withheld: ClassVar[Mapping[str, str]] = {
        "warm_up": "a service does so at its start",
        "chat_template_kwargs": "give it to a request",
    }

    @classmethod
    def read(cls, **given: Any) -> ServiceSettings:
        """Read the settings from options, the environment and the file.

        Args:
            **given: Options by name. An option that is None counts as not given.

        Raises:
            ConfigurationError: A setting is unknown or has a value that cannot be used.
        """
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            place = error.errors()[0]["loc"]
            name = str(place[0]) if place else ""
            raise ConfigurationError(
                f"setting {name!r} ({_place(name, given)}): {explain(error, cls)}; "
                "docs/guides/operate.md explains the settings"
            ) from None
        except TOMLDecodeError as error:
            raise ConfigurationError(f"{Path(FILE).resolve()} is no TOML: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{Path(FILE).resolve()} cannot be read: {error}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Options take precedence over the environment, and the environment over the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    def open_options(self) -> dict[str, Any]:
        """Return the given options of `RagCache.open`."""
        return OpenConfig.part_of(self).given()

    @property
    def autoscale_bounds(self) -> tuple[int, int] | None:
        """The fewest and the most replicas, if their number is not fixed."""
        if self.autoscale is None:
            return None
        first, last = sorted(map(int, self.autoscale.split("-")))
        return max(first, 1), last

    def cluster_ledger(self) -> str:
        """Return the URL of the ledger that several replicas share.

        Raises:
            ConfigurationError: The replicas would not share a ledger and a remote tier.
        """
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


def _place(name: str, options: Collection[str]) -> str:
    """The source of a value: the first that has one."""
    variable = PREFIX + name.upper()
    if name in options:
        return "an option"
    return f"the variable {variable}" if variable in map(str.upper, os.environ) else FILE
