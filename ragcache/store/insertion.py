"""Storing documents with all that belongs to them."""

from __future__ import annotations

import numpy as np
from sqlalchemy.orm import Session

from ragcache.store.documents import NewDocument
from ragcache.store.tables import (
    DocumentTable,
    DocumentTextTable,
    EncodingTable,
    ModuleTable,
    TokenTable,
    VectorTable,
)


def insert_document(
    session: Session, owner: int, document: NewDocument, tokenizer: str, embedder: str | None
) -> None:
    """Stores a document in the collection `owner`, which holds none of its name. tokenizer and
    embedder: whose token ids and vectors its modules have."""
    row = DocumentTable(
        collection_id=owner,
        source_id=document.source_id,
        uri=document.uri,
        digest=document.digest,
        attributes=dict(document.attributes),
    )
    session.add(row)
    session.flush()
    session.add(DocumentTextTable(document_id=row.id, text=document.text))
    modules = [
        ModuleTable(document_id=row.id, ordinal=i, name=m.name, text=m.text)
        for i, m in enumerate(document.modules)
    ]
    session.add_all(modules)
    session.flush()
    for stored, module in zip(modules, document.modules, strict=True):
        tokens = np.asarray(module.token_ids, dtype="<i4").tobytes()
        session.add(TokenTable(module_id=stored.id, tokenizer=tokenizer, token_ids=tokens))
        session.add(EncodingTable(module_id=stored.id, key=str(module.key)))
        if module.vector is not None and embedder is not None:
            vector = module.vector.astype("<f4").tobytes()
            session.add(VectorTable(module_id=stored.id, embedder=embedder, vector=vector))
