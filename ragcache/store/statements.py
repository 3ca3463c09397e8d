"""Statements that the two databases spell differently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ragcache.store.tables import Base, ModuleTable, NamespaceTable

CHUNK = 500  # values in one statement, below SQLite's limit on variables

Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def insert_new(session: Session, table: type[Base], rows: Rows) -> None:
    """Inserts rows; those whose key or unique name is there already are left as they are."""
    if rows:
        session.execute(_insert(session, table).on_conflict_do_nothing(), rows)


def insert_returning(session: Session, table: type[Base], row: Mapping[str, Any]) -> int | None:
    """Inserts a row; its id, or None where its key or unique name is there already."""
    statement = _insert(session, table).on_conflict_do_nothing()
    number: int | None = session.scalar(statement.values(row).returning(table.__table__.c.id))
    return number


def namespace_id(session: Session, name: str) -> int:
    """The id of a namespace, made if need be."""
    insert_new(session, NamespaceTable, {"name": name})
    return session.scalars(select(NamespaceTable.id).where(NamespaceTable.name == name)).one()


def upsert(session: Session, table: type[Base], rows: Rows, changed: Sequence[str]) -> None:
    """Inserts rows; of those whose primary key is there already, the `changed` columns."""
    if not rows:
        return
    statement = _insert(session, table)
    new = {name: statement.excluded[name] for name in changed}
    primary = list(table.__table__.primary_key)
    session.execute(statement.on_conflict_do_update(index_elements=primary, set_=new), rows)


def insert_for_module(session: Session, table: type[Base], module_id: int, **values: Any) -> None:
    """Puts a row of a module, unless another process deleted the module meanwhile."""
    columns = [table.__table__.c[name] for name in values]
    typed = [literal(v, c.type) for v, c in zip(values.values(), columns, strict=True)]
    rows: Select[Any] = select(ModuleTable.id, *typed).where(ModuleTable.id == module_id)
    statement = _insert(session, table).from_select(["module_id", *values], rows)
    primary = list(table.__table__.primary_key)
    session.execute(statement.on_conflict_do_update(index_elements=primary, set_=values))


def chunks(values: Iterable[object]) -> Iterator[list[str]]:
    """Values as text, as many at once as a statement takes."""
    texts = [str(value) for value in values]
    return (texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK))


def _insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
