"""The registry of storage tiers: names, budget options, and facts of each kind.

It is below the database and the routing, which name tiers, and knows no tier's class. The store
reads `TierTraits` instead of asking for a class; behavior is a method of `store.tiers.Tier` with a
default.

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
    """Facts about a tier that the store relies on."""

    persistent: bool = False
    """Entries outlive the process, with rows in the ledger and blobs that `verify` reads."""
    shared: bool = False
    """Other machines read and write the same entries. Opening the store does not list them."""
    on_gpu: bool = False
    """Attention reads entries in place and those of no other tier. Memory is free again only after
    the step that reads it."""
    mapped: bool = False
    """`get` maps pages of a file, which take no memory; `load` reads them into given memory."""
    slabs: bool = False
    """Memory is cut into slabs: a put may fail although enough bytes are free in pieces."""
    grouped: bool = False
    """`put_all` copies several entries side by side. The tier's memory is reserved once."""
    buffers: bool = False
    """`allocate` and `begin_copy` give main memory for states that are not entries yet."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier as the rest of the project names it."""

    name: str
    budget_option: str
    """Option of `RagCache.open` with the tier's budget in bytes."""
    traits: TierTraits
    """Traits of the kind. An opened tier may differ, as a device tier on a CPU does."""


TIERS: dict[str, TierSpec] = {
    spec.name: spec
    for spec in (
        TierSpec("device", "device_bytes", TierTraits(on_gpu=True, slabs=True, grouped=True)),
        TierSpec("host", "host_bytes", TierTraits(slabs=True, buffers=True)),
        TierSpec("disk", "disk_bytes", TierTraits(persistent=True, mapped=True)),
        TierSpec("remote", "remote_bytes", TierTraits(persistent=True, shared=True)),
    )
}
"""All tiers by name, fastest first. A tier is searched, and takes what leaves for pressure, in this
order among the tiers in memory and among those that outlive the process."""


def memory_tiers() -> tuple[str, ...]:
    """Return the names of tiers whose entries end with the process, fastest first."""
    return tuple(name for name, spec in TIERS.items() if not spec.traits.persistent)


def persistent_tiers() -> tuple[str, ...]:
    """Return the names of tiers whose entries outlive the process, nearest first."""
    return tuple(name for name, spec in TIERS.items() if spec.traits.persistent)


def shared_tiers() -> tuple[str, ...]:
    """Return the names of tiers that several machines share."""
    return tuple(name for name, spec in TIERS.items() if spec.traits.shared)
