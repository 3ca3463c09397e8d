"""Rows of states as plain values: what the ledger knows about states in one tier."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ragcache.db.tables import StateTable
from ragcache.states import KVKey


class StateMetadata(NamedTuple):
    """Properties of states that are the same in every tier."""

    tokens: int
    """Length in tokens."""
    mode: str = ""
    """An encoding of modules, `root` (tokens before modules) or `schema`."""
    root: KVKey | None = None
    """Key of the preamble that the states depend on."""
    model: str = ""
    """Fingerprint of the model."""


class StateRow(NamedTuple):
    """States in one tier."""

    key: KVKey
    tier: str
    nbytes: int
    """Allocated bytes in the tier."""
    hits: int
    """Number of uses."""
    last_use: int
    """Tick of the logical clock."""
    pinned: bool
    expires_at: float
    """Unix seconds. Infinite without a limit."""
    kv_dtype: str
    metadata: StateMetadata

    def values(self, place: str) -> dict[str, Any]:
        """Return the columns of `StateTable`."""
        values = self._asdict() | self.metadata._asdict()
        del values["metadata"]
        until = None if math.isinf(self.expires_at) else self.expires_at
        return values | {"place": place, "expires_at": until, "root": self.metadata.root or ""}


COLUMNS = [getattr(StateTable, name) for name in (*StateRow._fields[:-1], *StateMetadata._fields)]
"""Columns that `state_row` reads."""


def state_row(row: Any) -> StateRow:
    """Convert a result row of `COLUMNS`."""
    key, tier, nbytes, hits, last_use, pinned, expires_at, kv_dtype, tokens, *rest = row
    mode, root, model = rest
    metadata = StateMetadata(tokens, mode, KVKey(root) if root else None, model)
    until = math.inf if expires_at is None else expires_at
    return StateRow(key, tier, nbytes, hits, last_use, pinned, until, kv_dtype, metadata)
