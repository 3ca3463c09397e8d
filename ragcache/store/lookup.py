"""Finding rows by the names that users give them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from ragcache.errors import UnknownCollection
from ragcache.store.tables import DEFAULT_NAMESPACE, CollectionTable, NamespaceTable


def collection_id(session: Session, name: str, namespace: str = DEFAULT_NAMESPACE) -> int:
    """Raises `UnknownCollection` and names those that exist."""
    rows = select(CollectionTable.name, CollectionTable.id).join(NamespaceTable)
    found: dict[str, int] = {}
    for collection, number in session.execute(rows.where(NamespaceTable.name == namespace)):
        found[collection] = number
    if name not in found:
        known = ", ".join(map(repr, sorted(found))) or "none yet"
        raise UnknownCollection(
            f"there is no collection {name!r}; known: {known}. "
            f"Make it with `ragcache ingest {name} PATH`"
        )
    return found[name]
