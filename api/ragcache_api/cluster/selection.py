"""What a front has retrieved, on its way to the replica that answers from it.

A selection travels in a header, sealed with a key that only services over the same ledger have, and
names modules by their ids, which the replica looks up in the caller's own namespace. So neither a
client nor another tenant's selection can make it read anything.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64encode
from dataclasses import dataclass

from cryptography.fernet import Fernet, InvalidToken

from ragcache.db import Catalog, Stamp
from ragcache.errors import InvalidRequest
from ragcache.retrieval import Hit, Selection

SELECTION_HEADER = "x-ragcache-selection"


@dataclass(frozen=True, slots=True)
class SelectionCipher:
    """Seals selections for a namespace. secret: the ledger's (`ApiKeys.service_secret`)."""

    secret: bytes

    def seal(self, selection: Selection, collection: str, namespace: str) -> str:
        """The value of the header."""
        hits = [[h.module.id, h.score, h.bm25, h.cosine, h.rerank] for h in selection.hits]
        words = selection.words and dict(selection.words)
        evidence = [selection.rerank_seconds, words, selection.best_bm25]
        content = [collection, list(selection.stamp), hits, evidence]
        return (
            self._key(namespace).encrypt(json.dumps(content, ensure_ascii=False).encode()).decode()
        )

    def open(self, sealed: str, question: str, collection: str, catalog: Catalog) -> Selection:
        """The selection for a question, without modules that were deleted meanwhile. Raises
        `InvalidRequest` for one that was not sealed for this namespace and collection, and
        `UnknownCollection`."""
        try:
            content = self._key(catalog.namespace).decrypt(sealed.encode())
        except InvalidToken:
            raise InvalidRequest(
                f"the header {SELECTION_HEADER} is not of a front of this service; leave it out"
            ) from None
        chosen, stamp, hits, (seconds, words, best) = json.loads(content)
        if chosen != collection:
            raise InvalidRequest(f"the selection is of {chosen!r}, not of {collection!r}")
        rows = catalog.modules_by_id(collection, [each[0] for each in hits])
        found = tuple(Hit(rows[each[0]], *each[1:]) for each in hits if each[0] in rows)
        return Selection(question, found, Stamp(*stamp), seconds, words, tuple(best))

    def _key(self, namespace: str) -> Fernet:
        key = hmac.digest(self.secret, b"selection\0" + namespace.encode(), "sha256")
        return Fernet(urlsafe_b64encode(key))
