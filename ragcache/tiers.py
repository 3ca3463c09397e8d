"""The registry of storage tiers: names, options, traits, and where their classes are.

The registry is below the database and the routing, which refer to tiers by name. It imports no tier
class: the store does, by `TierSpec.implementation`. The store reads `TierTraits` instead of
checking classes. Behavior belongs to `store.tiers.Tier`, whose methods have defaults.

Example:
    >>> persistent_tiers()
    ('disk', 'remote')
    >>> TIERS["host"].budget_option
    'host_bytes'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from ragcache.config import parse_bytes

KVDType = Literal["model", "int8"]


def _checked_size(size: int | str) -> int | str:
    if parse_bytes(size) < 1:
        raise ValueError(f"{size!r} is no size; it must be at least 1 byte")
    return size


Size = Annotated[int | str, AfterValidator(_checked_size)]
"""A number of bytes, or a text such as `8GiB`. It is kept as given; `parse_bytes` converts it."""


class TierOptions(BaseModel):
    """Options of all tiers. `OpenConfig` inherits them, and the settings inherit `OpenConfig`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host_bytes: Size = "2GiB"
    """Budget of the host tier."""
    device_bytes: Size | None = None
    """Budget of the device tier, on the GPU. Defaults to the memory that the engine leaves free."""
    device_kv_dtype: KVDType = "model"
    """Format of states in the device tier: the model's data type, or 8 bits."""
    disk_bytes: Size | None = None
    """Budget of the disk tier. Unlimited by default."""
    remote: str | None = None
    """URL of a remote tier for fsspec: `s3://BUCKET/PATH`, `file:///MOUNT`. Off by default."""
    remote_bytes: Size | None = None
    """Budget of the remote tier. Unlimited by default."""
    kv_dtype: KVDType = "model"
    """Format of states in the host, disk and remote tiers: the model's data type, or 8 bits."""


@dataclass(frozen=True, slots=True)
class TierTraits:
    """Properties of a tier that the store relies on."""

    persistent: bool = False
    """Entries outlive the process. They have rows in the ledger and blobs that `verify` reads."""
    shared: bool = False
    """Other machines read and write the same entries. Opening the store does not list them."""
    on_gpu: bool = False
    """Attention reads entries in place and cannot read other tiers. Memory is free again only after
    the step that reads it.
    """
    mapped: bool = False
    """`get` maps a file and takes no memory. `load` reads it into given memory."""
    slabs: bool = False
    """Memory is divided into slabs. A put can fail although enough bytes are free in total."""
    grouped: bool = False
    """`put_all` copies several entries side by side. The tier's memory is reserved once."""
    buffers: bool = False
    """`allocate` and `begin_copy` provide main memory for states that are not entries yet."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier in the registry."""

    name: str
    budget_option: str
    """Option of `RagCache.open` with the tier's budget in bytes."""
    traits: TierTraits
    """Default traits. An opened tier may differ, for example a device tier on a CPU."""
    implementation: str
    """Module and class of the tier, as `module:class`. Its `from_options` opens the tier."""


TIERS: dict[str, TierSpec] = {
    spec.name: spec
    for spec in (
        TierSpec(
            "device",
            "device_bytes",
            TierTraits(on_gpu=True, slabs=True, grouped=True),
            "ragcache.store.tiers.device:DeviceTier",
        ),
        TierSpec(
            "host",
            "host_bytes",
            TierTraits(slabs=True, buffers=True),
            "ragcache.store.tiers.host:HostTier",
        ),
        TierSpec(
            "disk",
            "disk_bytes",
            TierTraits(persistent=True, mapped=True),
            "ragcache.store.tiers.disk:DiskTier",
        ),
        TierSpec(
            "remote",
            "remote_bytes",
            TierTraits(persistent=True, shared=True),
            "ragcache.store.tiers.remote:RemoteTier",
        ),
    )
}
"""All tiers by name, fastest first. Lookup and demotion follow this order, separately among memory
tiers and persistent tiers.
"""


def memory_tiers() -> tuple[str, ...]:
    """Return the names of tiers whose entries end with the process, fastest first."""
    return tuple(name for name, spec in TIERS.items() if not spec.traits.persistent)


def persistent_tiers() -> tuple[str, ...]:
    """Return the names of tiers whose entries outlive the process, fastest first."""
    return tuple(name for name, spec in TIERS.items() if spec.traits.persistent)


def shared_tiers() -> tuple[str, ...]:
    """Return the names of tiers that several machines share."""
    return tuple(name for name, spec in TIERS.items() if spec.traits.shared)
