"""Settings of the service and the command line; docs/guides/operate.md explains the usual ones.

Each is an option, a variable `RAGCACHE_NAME`, or a line of `ragcache.toml` in the working folder;
the first of these counts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any, ClassVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragcache.errors import ConfigurationError
from ragcache.params import OpenConfig, Surface, explain
from ragcache_api.service_options import ServiceOptions

FILE, PREFIX = "ragcache.toml", "RAGCACHE_"


class ServiceSettings(BaseSettings, Surface, ServiceOptions):
    """All settings: options, then variables `RAGCACHE_NAME`, then `ragcache.toml`.

    An empty variable counts as not set.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        toml_file=FILE,
        extra="forbid",
        enable_decoding=False,
    )
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
