"""Pages of collections and of their documents, by name. None reads more than it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from ragcache.store.database import Database
from ragcache.store.documents import DocumentRow
from ragcache.store.lookup import collection_id
from ragcache.store.paging import Page, after, check_limit, cursor_of, cut
from ragcache.store.tables import CollectionTable, DocumentTable, ModuleTable, NamespaceTable


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """A collection, with the numbers of its documents and their modules."""

    name: str
    documents: int
    modules: int


def collection_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[CollectionRow]:
    """The collections of a namespace, by name; `total` is told with the first page. Raises
    `InvalidRequest`."""
    limit, last = check_limit(limit), after(cursor, str)
    modules = _count(ModuleTable).join(DocumentTable)
    own = NamespaceTable.name == namespace
    rows = select(
        CollectionTable.name,
        _count(DocumentTable).where(_in_collection()).scalar_subquery(),
        modules.where(_in_collection()).scalar_subquery(),
    ).join(NamespaceTable)
    if last is not None:
        rows = rows.where(CollectionTable.name > last[0])
    statement = rows.where(own).order_by(CollectionTable.name).limit(limit + 1)
    with database.reading() as session:
        found, more = cut([CollectionRow(*row) for row in session.execute(statement)], limit)
        every = _count(CollectionTable).join(NamespaceTable).where(own)
        total = session.scalar(every) if last is None else None
    return Page(found, cursor_of(found[-1].name) if more else None, total)


def document_page(
    database: Database, namespace: str, collection: str, cursor: str | None = None,
    limit: int = 100,
) -> Page[DocumentRow]:  # fmt: skip
    """The documents of a collection, by id; `total` is told with the first page. Raises
    `InvalidRequest` or `UnknownCollection`."""
    limit, last = check_limit(limit), after(cursor, str)
    modules = _count(ModuleTable).where(ModuleTable.document_id == DocumentTable.id)
    with database.reading() as session:
        owner = collection_id(session, collection, namespace)
        chosen = DocumentTable.collection_id == owner
        rows = select(DocumentTable, modules.scalar_subquery()).where(chosen)
        if last is not None:
            rows = rows.where(DocumentTable.source_id > last[0])
        items, more = cut(_documents(session, rows, limit), limit)
        total = session.scalar(_count(DocumentTable).where(chosen)) if last is None else None
    return Page(items, cursor_of(items[-1].source_id) if more else None, total)


def _documents(session: Session, rows: Any, limit: int) -> list[DocumentRow]:
    statement = rows.order_by(DocumentTable.source_id).limit(limit + 1)
    return [
        DocumentRow(d.id, d.source_id, d.uri, d.digest, d.attributes, modules)
        for d, modules in session.execute(statement)
    ]


def _in_collection() -> ColumnElement[bool]:
    """Of documents: in the collection of the row around."""
    return DocumentTable.collection_id == CollectionTable.id


def _count(table: Any) -> Any:
    return select(func.count()).select_from(table)
