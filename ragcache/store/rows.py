"""What the ledger knows of states, as plain values."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from ragcache.states import FORMAT_VERSION, KVKey
from ragcache.store.entries import KVEntry
from ragcache.store.tables import StateTable


class StateMetadata(NamedTuple):
    """What states are, whichever tier holds them.

    tokens: their length. cost: seconds that encoding took. mode: `rooted`, `isolated`, `root` (a
    preamble), `schema`; root: the key of what stood before them; model: its fingerprint; format:
    the version of the code that encoded them.
    """

    tokens: int
    cost: float = 0.0
    mode: str = ""
    root: KVKey | None = None
    model: str = ""
    format: int = FORMAT_VERSION


class StateRow(NamedTuple):
    """States in one tier. nbytes: as allocated there."""

    key: KVKey
    tier: str
    nbytes: int
    hits: int
    last_use: int
    pinned: bool
    expires_at: float
    kv_dtype: str
    metadata: StateMetadata

    def entry(self) -> KVEntry:
        """As the policy sees them."""
        return KVEntry(
            self.key, self.nbytes, self.last_use, pinned=self.pinned, hits=self.hits,
            cost=self.metadata.cost, expires_at=self.expires_at, root=self.metadata.root,
        )  # fmt: skip

    def values(self, place: str) -> dict[str, Any]:
        """As a row of `StateTable`."""
        metadata = self.metadata
        return {
            "key": str(self.key), "tier": self.tier, "place": place, "nbytes": self.nbytes,
            "hits": self.hits, "last_use": self.last_use, "pinned": self.pinned,
            "expires_at": None if math.isinf(self.expires_at) else self.expires_at,
            "kv_dtype": self.kv_dtype, "tokens": metadata.tokens, "encode_seconds": metadata.cost,
            "mode": metadata.mode, "root": str(metadata.root or ""), "model": metadata.model,
            "format": metadata.format,
        }  # fmt: skip


COLUMNS = (
    StateTable.key, StateTable.tier, StateTable.nbytes, StateTable.hits, StateTable.last_use,
    StateTable.pinned, StateTable.expires_at, StateTable.kv_dtype, StateTable.tokens,
    StateTable.encode_seconds, StateTable.mode, StateTable.root, StateTable.model,
    StateTable.format,
)  # fmt: skip


_key = lru_cache(1024)(KVKey)  # roots, of which there are few


def state_row(row: Any) -> StateRow:
    """Of a row of `COLUMNS`."""
    key, tier, nbytes, hits, last_use, pinned, expires_at, kv_dtype, tokens, cost, *rest = row
    mode, root, model, version = rest
    metadata = StateMetadata(tokens, cost, mode, _key(root) if root else None, model, version)
    until = math.inf if expires_at is None else expires_at
    return StateRow(KVKey(key), tier, nbytes, hits, last_use, pinned, until, kv_dtype, metadata)
