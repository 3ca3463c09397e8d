"""Deleting documents with all that belongs to them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ragcache.states import KVKey
from ragcache.store.scaffolds import delete_scaffolds
from ragcache.store.statements import chunks
from ragcache.store.tables import DocumentTable, EncodingTable, ModuleTable


def delete_documents(session: Session, owner: int, source_ids: Sequence[str]) -> list[KVKey]:
    """Deletes documents of the collection `owner`; returns the keys that belonged to them."""
    found: list[KVKey] = []
    modules: set[int] = set()
    for chunk in chunks(source_ids):
        chosen = (DocumentTable.collection_id == owner) & DocumentTable.source_id.in_(chunk)
        encodings = session.execute(
            select(ModuleTable.id, EncodingTable.key)
            .join(DocumentTable, DocumentTable.id == ModuleTable.document_id)
            .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
            .where(chosen)
        )
        for module, key in encodings:
            modules.add(module)
            if key is not None:
                found.append(KVKey(key))
        session.execute(delete(DocumentTable).where(chosen))
    return found + delete_scaffolds(session, owner, modules)
