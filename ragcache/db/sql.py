"""Statements that the two databases spell differently, common joins, and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar, TypeVarTuple

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Double,
    Row,
    ScalarSelect,
    Select,
    String,
    cast,
    column,
    event,
    extract,
    func,
    literal,
    select,
    values,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ragcache.db.tables import (
    Base,
    CollectionTable,
    DocumentTable,
    ModuleTable,
    NamespaceTable,
)
from ragcache.errors import InvalidRequest, NamespaceDeleted, UnknownCollection

Item = TypeVar("Item")
Ts = TypeVarTuple("Ts")

NAMESPACES = "namespaces"
"""Name of `Database.namespaces` in `Session.info`."""
UNLESS_DELETED: Any = {"read": True, "key_share": True, "skip_locked": True}
"""Options of `with_for_update` that keep rows until the transaction ends. Rows that another one is
deleting count as deleted, and are not waited for."""
CHUNK = 500  # values in one statement, below SQLite's limit on variables
_UNIX_EPOCH = 2_440_587.5  # Julian day
_TYPES: dict[type, Any] = {int: BigInteger(), float: Double(), str: String()}

Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def insert_new(session: Session, table: type[Base], rows: Rows) -> None:
    """Insert rows. Rows whose key or unique name exists already stay as they are."""
    if rows:
        session.execute(_insert(session, table).on_conflict_do_nothing(), rows)


def insert_returning(session: Session, table: type[Base], row: Mapping[str, Any]) -> int | None:
    """Insert a row. Returns its id, unless its key or unique name exists already."""
    statement = _insert(session, table).on_conflict_do_nothing()
    number: int | None = session.scalar(statement.values(row).returning(table.__table__.c.id))
    return number


def namespace_id(session: Session, name: str) -> int:
    """Return the id of a namespace, and create the namespace if it does not exist.

    A deletion of the namespace waits until the transaction ends. A process that has used the
    namespace before creates it again only after it has forgotten it (`Database.namespaces`).

    Raises:
        NamespaceDeleted: Another process has deleted the namespace, and this one goes on using it.
    """
    known: dict[str, int] = session.info[NAMESPACES]
    chosen = select(NamespaceTable.id).where(NamespaceTable.name == name)
    locked = chosen.with_for_update(read=True, key_share=True)
    number = session.scalar(locked)
    if known.get(name, number) != number:
        raise NamespaceDeleted(f"the namespace {name!r} was deleted; nothing is stored in it")
    while number is None:  # a deletion may come between the statements
        insert_new(session, NamespaceTable, {"name": name})
        number = session.scalar(locked)
    if name not in known:
        event.listen(session, "after_commit", partial(_remember, known, name, number), once=True)
    return number


def _remember(known: dict[str, int], name: str, number: int, _session: Session) -> None:
    known.setdefault(name, number)


def namespace_number(name: str) -> ScalarSelect[int]:
    """Return a subquery for the id of a namespace. It is NULL if the namespace does not exist."""
    return select(NamespaceTable.id).where(NamespaceTable.name == name).scalar_subquery()


def upsert(
    session: Session,
    table: type[Base],
    rows: Rows,
    changed: Sequence[str],
    unique: Sequence[str] = (),
) -> None:
    """Insert rows, or change the `changed` columns of rows that exist already.

    Rows are the same if their `unique` columns are. These default to the primary key.
    """
    if not rows:
        return
    statement = _insert(session, table)
    new = {name: statement.excluded[name] for name in changed}
    same: list[Any] = list(unique) or list(table.__table__.primary_key)
    session.execute(statement.on_conflict_do_update(index_elements=same, set_=new), rows)


def clock(session: Session) -> ColumnElement[float]:
    """Return the database's clock in Unix seconds, which all machines that share it agree on.

    A SQLite file has the clock of its machine.
    """
    if session.get_bind().dialect.name == "postgresql":
        return cast(extract("epoch", func.clock_timestamp()), Double())
    return (func.julianday("now", type_=Double()) - _UNIX_EPOCH) * 86_400.0


def lock_rows(session: Session, table: type[Base], *chosen: ColumnElement[bool]) -> None:
    """Lock rows until the end of the transaction, in the order of their primary key.

    The order keeps transactions that change many rows from deadlocks. SQLite has one writer and
    needs no locks.
    """
    if session.get_bind().dialect.name == "postgresql":
        primary = list(table.__table__.primary_key)
        session.execute(select(*primary).where(*chosen).order_by(*primary).with_for_update()).all()


def table_of(rows: Sequence[Mapping[str, int | float | str]]) -> CTE:
    """Return a table of numbers and texts, from which one statement updates other tables."""
    columns = [column(name, _TYPES[type(value)]) for name, value in rows[0].items()]
    return values(*columns, name="given").data([tuple(row.values()) for row in rows]).cte("given")


def insert_for_module(session: Session, table: type[Base], module_id: int, **values: Any) -> None:
    """Insert or replace a row of a module, unless another process deletes the module, or has."""
    columns = [table.__table__.c[name] for name in values]
    typed = [literal(v, c.type) for v, c in zip(values.values(), columns, strict=True)]
    rows: Select[Any] = select(ModuleTable.id, *typed).where(ModuleTable.id == module_id)
    rows = rows.with_for_update(**UNLESS_DELETED)
    statement = _insert(session, table).from_select(["module_id", *values], rows)
    primary = list(table.__table__.primary_key)
    session.execute(statement.on_conflict_do_update(index_elements=primary, set_=values))


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Split items into lists that fit into one statement."""
    every = list(items)
    return (every[i : i + CHUNK] for i in range(0, len(every), CHUNK))


def rows_of(
    session: Session, statement: Select[*Ts], column: Any, values: Iterable[object] | None
) -> Iterator[Row[*Ts]]:
    """Yield the rows of a statement whose column has one of the values. None selects all rows.

    Runs as many statements as the values need.
    """
    if values is None:
        yield from session.execute(statement)
    else:
        for chunk in chunks(values):
            yield from session.execute(statement.where(column.in_(chunk)))


def _insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def from_modules(*columns: Any) -> Select[Any]:
    """Select columns of modules, joined with their documents and collections."""
    return select(*columns).select_from(ModuleTable).join(DocumentTable).join(CollectionTable)


def in_collection(statement: Select[*Ts], namespace: str, collection: str) -> Select[*Ts]:
    """Restrict a statement that has joined the collections to one collection."""
    named = (NamespaceTable.name == namespace) & (CollectionTable.name == collection)
    return statement.join(NamespaceTable).where(named)


def collection_id(session: Session, name: str, namespace: str) -> int:
    """Return the id of a collection. Raises `UnknownCollection`, which names the existing ones."""
    rows = select(CollectionTable.name, CollectionTable.id).join(NamespaceTable)
    named = session.execute(rows.where(NamespaceTable.name == namespace))
    found: dict[str, int] = {row.name: row.id for row in named}
    if name not in found:
        known = ", ".join(map(repr, sorted(found))) or "none yet"
        raise UnknownCollection(
            f"there is no collection {name!r}; known: {known}. "
            f"Make it with `ragcache ingest {name} PATH`"
        )
    return found[name]


MOST = 1000  # maximum items of a page

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """Some items of a list."""

    items: tuple[ItemT, ...]
    next: str | None = None
    """Cursor of the next page: the name or public id of the last item, or the number of items
    before it. None after the last page."""
    total: int | None = None
    """Number of items in the whole list, if counted."""


def check_limit(limit: int) -> None:
    """Raise `InvalidRequest` unless a page may have this many items."""
    if not 1 <= limit <= MOST:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {MOST}")


def page_of(
    rows: Sequence[ItemT], limit: int, key: Callable[[ItemT], str], total: int | None = None
) -> Page[ItemT]:
    """Return the first `limit` rows as a page.

    Args:
        rows: The rows of the page, and one more if the list goes on.
        limit: Maximum number of items.
        key: Function from an item to the cursor of the items after it.
        total: Number of items in the whole list.
    """
    items = tuple(rows[:limit])
    return Page(items, key(items[-1]) if len(rows) > limit else None, total)


def count_rows(session: Session, rows: Select[Any]) -> int:
    """Return the number of rows of a statement."""
    number = rows.with_only_columns(func.count(), maintain_column_froms=True)
    return session.scalars(number).one()


def read_page(
    session: Session,
    rows: Select[Any],
    column: Any,
    make: Callable[..., ItemT],
    cursor: str | None,
    limit: int,
    *known: ColumnElement[bool],
    counted: bool = True,
) -> Page[ItemT]:
    """Read a page of a list, sorted by a unique column.

    Args:
        session: Session to read in.
        rows: The whole list.
        column: Column of the cursors, and attribute of the items. Public ids are random: their rows
            are sorted by id, the newest first.
        make: Function from a row to an item.
        cursor: Value of `column` in the last item before the page.
        limit: Maximum number of items.
        *known: Conditions on a row whose public id is a cursor.
        counted: Whether to count the whole list.

    Raises:
        InvalidRequest: The cursor or the limit cannot be used.
    """
    check_limit(limit)
    number, after = column.class_.id, column > (cursor or "")
    newest_first = column.key == "public_id"
    if newest_first and cursor is not None:
        last = session.scalar(select(number).where(column == cursor, *known))
        if last is None:
            raise InvalidRequest(f"no item of this list is {cursor!r:.80}; begin without a cursor")
        after = number < last
    page = rows.order_by(number.desc() if newest_first else column).limit(limit + 1)
    read = session.execute(page if cursor is None else page.where(after))
    items = [make(*row) for row in read]
    return page_of(
        items, limit, attrgetter(column.key), count_rows(session, rows) if counted else None
    )
