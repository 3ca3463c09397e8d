"""What callers keep in the ledger beside documents."""

from __future__ import annotations

from ragcache.pipeline import Parts
from ragcache.store import Records


class Keeping:
    """The methods of `RagCache` that give access to the records of the namespace."""

    _parts: Parts

    def records(self, space: str) -> Records:
        """What the indexing `space` has written and when."""
        return Records(self._parts.database, space, self._parts.catalogue.namespace)
