"""Embeddings of modules. The ledger keeps them; the index over them is built in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sqlalchemy import select

from ragcache.store.database import Database
from ragcache.store.statements import insert_for_module
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    ModuleTable,
    NamespaceTable,
    VectorTable,
)


class Vectors:
    """The vectors of one embedder in one namespace."""

    def __init__(
        self, database: Database, embedder: str, namespace: str = DEFAULT_NAMESPACE
    ) -> None:
        self._database = database
        self._embedder = embedder
        self._namespace = namespace

    def of(self, collection: str) -> dict[int, np.ndarray]:
        """Vectors [D] float32 of a collection's modules under this embedder, by the modules' ids.
        D is one number unless the embedder has changed under its name."""
        statement = (
            select(VectorTable.module_id, VectorTable.vector)
            .join(ModuleTable, ModuleTable.id == VectorTable.module_id)
            .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
            .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
            .join(NamespaceTable, CollectionTable.namespace_id == NamespaceTable.id)
            .where(NamespaceTable.name == self._namespace, CollectionTable.name == collection)
            .where(VectorTable.embedder == self._embedder)
            .order_by(VectorTable.module_id)
        )
        with self._database.reading() as session:
            rows = session.execute(statement)
            return {number: np.frombuffer(blob, dtype="<f4") for number, blob in rows}

    def add(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Stores vectors of modules that were ingested under another embedder, or none."""
        with self._database.transaction() as session:
            for number, vector in zip(ids, vectors, strict=True):
                values = {"embedder": self._embedder, "vector": vector.astype("<f4").tobytes()}
                insert_for_module(session, VectorTable, number, **values)
