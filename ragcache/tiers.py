"""The registry of storage tiers: names, budget options and traits.

The registry is below the database and the routing, which refer to tiers by name, and knows no tier
classes. The store reads `TierTraits` instead of checking classes. Behavior belongs to
`store.tiers.Tier`, whose methods have defaults.

Example:
    >>> persistent_tiers()
    ('disk', 'remote')
    >>> TIERS["host"].budget_option
    'host_bytes'
"""

from __future__ import annotations

from dataclasses import dataclass


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


TIERS: dict[str, TierSpec] = {
    spec.name: spec
    for spec in (
        TierSpec("device", "device_bytes", TierTraits(on_gpu=True, slabs=True, grouped=True)),
        TierSpec("host", "host_bytes", TierTraits(slabs=True, buffers=True)),
        TierSpec("disk", "disk_bytes", TierTraits(persistent=True, mapped=True)),
        TierSpec("remote", "remote_bytes", TierTraits(persistent=True, shared=True)),
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
