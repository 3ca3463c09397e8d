"""The caller on whose account states are kept from eviction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keeper:
    """A caller on whose account states are kept."""

    name: str = ""
    """Name of the caller, such as the id of its key."""
    budget_bytes: int | None = None
    """Most bytes of states that the caller keeps. Unlimited by default."""
