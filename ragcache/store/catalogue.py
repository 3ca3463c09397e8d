"""The catalogue: collections, documents and their modules. The document is the unit of change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import delete, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from ragcache.errors import UnknownCollection
from ragcache.states import KVKey
from ragcache.store.database import CHUNK, Database
from ragcache.store.tables import (
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    TokenTable,
    VectorTable,
    insert_for_module,
)


@dataclass(frozen=True, slots=True)
class NewModule:
    """A nested module to store. key: the states that it was encoded to."""

    name: str
    text: str
    token_ids: Sequence[int]
    key: KVKey
    vector: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to store in place of an earlier one of the same `source_id`."""

    source_id: str
    uri: str
    digest: str
    modules: Sequence[NewModule]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A stored document."""

    id: int
    source_id: str
    uri: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A stored module, with its document's name and what its states were last seen to be."""

    id: int
    name: str
    document: str
    uri: str
    text: str


class Catalogue:
    """Rows of documents and modules. Every method is one transaction."""

    def __init__(self, database: Database, tokenizer: str, embedder: str | None) -> None:
        self._database = database
        self._tokenizer = tokenizer
        self._embedder = embedder

    def collections(self) -> dict[str, int]:
        """Names and numbers of documents."""
        statement = (
            select(CollectionTable.name, func.count(DocumentTable.id).label("documents"))
            .outerjoin(DocumentTable)
            .group_by(CollectionTable.name)
            .order_by(CollectionTable.name)
        )
        with self._database.transaction() as session:
            return {row.name: row.documents for row in session.execute(statement)}

    def documents(self, collection: str) -> dict[str, DocumentRow]:
        """The documents of a collection by source id; empty where it does not exist yet."""
        statement = select(DocumentTable).join(CollectionTable)
        with self._database.transaction() as session:
            rows = session.scalars(statement.where(CollectionTable.name == collection))
            return {r.source_id: DocumentRow(r.id, r.source_id, r.uri, r.digest) for r in rows}

    def replace(self, collection: str, documents: Sequence[NewDocument]) -> list[KVKey]:
        """Stores documents, each in place of an earlier one of its name, in one transaction.

        Returns the keys of states that belonged to what was replaced.
        """
        with self._database.transaction() as session:
            owner = _collection_id(session, collection)
            replaced = _delete_documents(session, owner, [d.source_id for d in documents])
            for document in documents:
                self._insert(session, owner, document)
        return replaced

    def _insert(self, session: Session, owner: int, document: NewDocument) -> None:
        row = DocumentTable(
            collection_id=owner,
            source_id=document.source_id,
            uri=document.uri,
            digest=document.digest,
            attributes=dict(document.attributes),
        )
        session.add(row)
        session.flush()
        modules = [
            ModuleTable(document_id=row.id, ordinal=i, name=m.name, text=m.text)
            for i, m in enumerate(document.modules)
        ]
        session.add_all(modules)
        session.flush()
        for stored, module in zip(modules, document.modules, strict=True):
            tokens = np.asarray(module.token_ids, dtype="<i4").tobytes()
            session.add(
                TokenTable(module_id=stored.id, tokenizer=self._tokenizer, token_ids=tokens)
            )
            session.add(EncodingTable(module_id=stored.id, key=str(module.key)))
            if module.vector is not None and self._embedder is not None:
                vector = module.vector.astype("<f4").tobytes()
                session.add(
                    VectorTable(module_id=stored.id, embedder=self._embedder, vector=vector)
                )

    def modules(self, collection: str) -> list[ModuleRow]:
        """All modules of a collection, in the order of ids. Raises `UnknownCollection`."""
        statement = (
            select(ModuleTable, DocumentTable.source_id, DocumentTable.uri)
            .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
            .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
            .where(CollectionTable.name == collection)
            .order_by(ModuleTable.id)
        )
        with self._database.transaction() as session:
            check_collection(session, collection)
            return [
                ModuleRow(m.id, m.name, document, uri, m.text)
                for m, document, uri in session.execute(statement)
            ]

    def token_ids(self, module_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Token ids under this catalogue's tokenizer, of the modules that have them."""
        statement = select(TokenTable.module_id, TokenTable.token_ids).where(
            TokenTable.tokenizer == self._tokenizer, TokenTable.module_id.in_(module_ids)
        )
        with self._database.transaction() as session:
            return {
                number: tuple(np.frombuffer(blob, dtype="<i4").tolist())
                for number, blob in session.execute(statement)
            }

    def stamp(self, collection: str) -> tuple[int, int]:
        """Changes whenever the collection's modules do: their number and largest id, which is
        never used again. Raises `UnknownCollection`."""
        statement = (
            select(func.count(ModuleTable.id), func.coalesce(func.max(ModuleTable.id), 0))
            .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
            .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
            .where(CollectionTable.name == collection)
        )
        with self._database.transaction() as session:
            check_collection(session, collection)
            count, largest = session.execute(statement).one()
            return int(count), int(largest)

    def add_tokens(self, module_id: int, token_ids: Sequence[int]) -> None:
        """Stores token ids of a module that was ingested under another tokenizer."""
        tokens = np.asarray(token_ids, dtype="<i4").tobytes()
        values = {"tokenizer": self._tokenizer, "token_ids": tokens}
        with self._database.transaction() as session:
            session.execute(insert_for_module(TokenTable, module_id, **values))

    def claim(self, module_id: int, key: KVKey) -> None:
        """Notes that states belong to a module."""
        with self._database.transaction() as session:
            session.execute(insert_for_module(EncodingTable, module_id, key=str(key)))

    def delete(self, collection: str, source_ids: Sequence[str]) -> list[KVKey]:
        """Deletes documents with their modules and vectors; returns the keys of their states."""
        with self._database.transaction() as session:
            check_collection(session, collection)
            return _delete_documents(session, _collection_id(session, collection), source_ids)


def check_collection(session: Session, name: str) -> None:
    """Raises `UnknownCollection` and names those that exist."""
    names = list(session.scalars(select(CollectionTable.name).order_by(CollectionTable.name)))
    if name not in names:
        known = ", ".join(repr(n) for n in names) or "none yet"
        raise UnknownCollection(
            f"there is no collection {name!r}; known: {known}. "
            f"Make it with `ragcache ingest {name} PATH`"
        )


def _collection_id(session: Session, name: str) -> int:
    session.execute(
        insert(CollectionTable).values(name=name).on_conflict_do_nothing(index_elements=["name"])
    )
    return session.scalars(select(CollectionTable.id).where(CollectionTable.name == name)).one()


def _delete_documents(session: Session, owner: int, source_ids: Sequence[str]) -> list[KVKey]:
    found: list[KVKey] = []
    for start in range(0, len(source_ids), CHUNK):
        chosen = DocumentTable.source_id.in_(source_ids[start : start + CHUNK])
        keys = session.scalars(
            select(EncodingTable.key)
            .join(ModuleTable, ModuleTable.id == EncodingTable.module_id)
            .join(DocumentTable, DocumentTable.id == ModuleTable.document_id)
            .where(DocumentTable.collection_id == owner, chosen)
        )
        found += map(KVKey, keys)
        session.execute(delete(DocumentTable).where(DocumentTable.collection_id == owner, chosen))
    return found
