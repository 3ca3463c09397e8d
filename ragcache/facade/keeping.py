"""What callers keep in the ledger beside documents."""

from __future__ import annotations

from ragcache.pipeline import Parts
from ragcache.store import Records, Values


class Keeping:
    """The methods of `RagCache` that give access to records and values of the namespace."""

    _parts: Parts

    def records(self, space: str) -> Records:
        """What the indexing `space` has written and when."""
        return Records(self._parts.database, space, self._parts.catalogue.namespace)

    def values(self, space: str) -> Values:
        """Bytes under keys, kept under the name `space`. They count in no tier's budget."""
        return Values(self._parts.database, space, self._parts.catalogue.namespace)
