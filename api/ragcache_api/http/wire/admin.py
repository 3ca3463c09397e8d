"""What the operator sees and asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from ragcache.store.admin import Change
from ragcache_api.http.wire.common import CollectionName, Identified, Told, Wire

Tier = Annotated[str, Field(min_length=1, max_length=20)]


class ModuleTold(Identified):
    """last_use: by the store's clock, which counts the uses of all namespaces; None in any but
    `default`, which is the operator's."""

    name: str
    document: str
    collection: str
    tokens: int
    nbytes: int
    tiers: list[str]
    hits: int
    last_use: int | None
    pinned: bool
    expires_at: float | None

    def without_clock(self) -> Self:
        """As a tenant sees it."""
        return self.model_copy(update={"last_use": None})


class ModuleTextTold(ModuleTold):
    """With its text, and its states in every tier."""

    text: str
    uri: str
    metadata: dict[str, Any]
    states: list[dict[str, Any]]

    def without_clock(self) -> Self:
        states = [{**state, "last_use": None} for state in self.states]
        return super().without_clock().model_copy(update={"states": states})


class ChangeTold(Told):
    """One state and what happens to it. tier: where from; to: where it moves."""

    key: str
    action: str
    tier: str
    to: str
    nbytes: int


class ChangesTold(Told):
    """What was done or, with `dry_run`, would be."""

    dry_run: bool
    changes: list[ChangeTold]
    bytes: int

    @classmethod
    def of(cls, changes: Sequence[Change], *, dry_run: bool = False) -> ChangesTold:
        told = [
            ChangeTold(key=str(c.key), action=c.action, tier=c.tier, to=c.to, nbytes=c.nbytes)
            for c in changes
        ]
        return cls(dry_run=dry_run, changes=told, bytes=sum(c.nbytes for c in changes))


class MoveSent(Wire):
    tier: Tier


class ExpireSent(Wire):
    """seconds: from now until the states go; null lifts the limit."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class EvictSent(Wire):
    """What to evict: of a collection, or of all; from a tier, or from all."""

    collection: CollectionName | None = None
    documents: Annotated[list[str], Field(max_length=10_000)] | None = None
    tier: Tier | None = None


class PlanSent(Wire):
    """A corpus to plan for: of a collection, or documents' texts. Sizes as `8GiB`."""

    collection: CollectionName | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    host_bytes: int | str = "2GiB"
    device_bytes: int | str | None = None
    disk_bytes: int | str | None = None
    sample: Annotated[int, Field(ge=1, le=16)] = 4


class TierTold(Told):
    """budget_bytes: None without a limit."""

    name: str
    used_bytes: int
    budget_bytes: int | None
    pinned_bytes: int
    states: int
    hits: int
    persistent: bool


class EvictionTold(Identified):
    """reason: pressure, ttl, manual, superseded or corrupt. at: Unix seconds."""

    key: str
    module: str | None
    tier: str
    reason: str
    nbytes: int
    at: float
    fetched_again: bool


class StatsTold(Told):
    """Of the caller's namespace; engine and evictions, which all share, of the operator's alone."""

    model: str
    uptime: float
    collections: dict[str, int]
    requests: dict[str, int]
    tokens: dict[str, int]
    ttft: dict[str, dict[str, float | int | None]]
    engine: dict[str, float]
    series: list[dict[str, Any]]
    evictions: dict[str, dict[str, int]]
    refetched: int


class VerifyTold(Told):
    states: int
    modules: int
    found: list[dict[str, Any]]
    interrupted: dict[str, int]
    clean: bool


class Flushed(Told):
    """rows: what was written to the ledger by now is all that had happened."""

    flushed: bool
