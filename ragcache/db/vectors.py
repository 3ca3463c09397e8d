"""Vectors of modules, by the embedder that made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sqlalchemy import select

from ragcache.db.database import Database
from ragcache.db.sql import from_modules, in_collection, insert_for_module, rows_of
from ragcache.db.tables import DEFAULT_NAMESPACE, ModuleTable, VectorTable


class Vectors:
    """The vectors of one embedder in one namespace."""

    def __init__(
        self, database: Database, embedder: str, namespace: str = DEFAULT_NAMESPACE
    ) -> None:
        self._database, self._embedder, self._namespace = database, embedder, namespace

    def read_vectors(
        self, collection: str, ids: Sequence[int] | None = None
    ) -> dict[int, np.ndarray]:
        """Read vectors [D] float32 of a collection's modules by module id. Reads all by default.

        D varies only if the embedder changed under its name.
        """
        columns = from_modules(VectorTable.module_id, VectorTable.vector).join(VectorTable)
        own = columns.where(VectorTable.embedder == self._embedder)
        statement = in_collection(own, self._namespace, collection).order_by(VectorTable.module_id)
        with self._database.reading() as session:
            rows = rows_of(session, statement, VectorTable.module_id, ids)
            return {row.module_id: np.frombuffer(row.vector, dtype="<f4") for row in rows}

    def ids_without_vector(self, collection: str) -> set[int]:
        """Return the ids of a collection's modules that have no vector of this embedder."""
        embedded = select(VectorTable.module_id).where(VectorTable.embedder == self._embedder)
        lacking = from_modules(ModuleTable.id).where(ModuleTable.id.not_in(embedded))
        with self._database.reading() as session:
            return set(session.scalars(in_collection(lacking, self._namespace, collection)))

    def add_vectors(self, ids: Sequence[int], vectors: np.ndarray) -> None:
        """Store vectors of modules that were ingested with another embedder, or with none."""
        with self._database.transaction() as session:
            for number, vector in zip(ids, vectors, strict=True):
                values = {"embedder": self._embedder, "vector": vector.astype("<f4").tobytes()}
                insert_for_module(session, VectorTable, number, **values)
