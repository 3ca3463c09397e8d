"""Statements that the two databases spell differently, joins that many modules need, and pages.

Where a page of a long list ended is in an opaque cursor: what its last item was sorted by.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Double,
    Select,
    String,
    cast,
    column,
    extract,
    func,
    literal,
    select,
    values,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    Base,
    CollectionTable,
    DocumentTable,
    ModuleTable,
    NamespaceTable,
)
from ragcache.errors import InvalidRequest, UnknownCollection

CHUNK = 500  # values in one statement, below SQLite's limit on variables
_UNIX_EPOCH = 2_440_587.5  # in days of the Julian calendar
_TYPES: dict[type, Any] = {int: BigInteger(), float: Double(), str: String()}

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


def clock(session: Session) -> ColumnElement[float]:
    """The database's clock in Unix seconds, which machines that share it agree by. Of a SQLite file
    it is the machine's."""
    if session.get_bind().dialect.name == "postgresql":
        return cast(extract("epoch", func.clock_timestamp()), Double())
    return (func.julianday("now", type_=Double()) - _UNIX_EPOCH) * 86_400.0


def lock_rows(session: Session, table: type[Base], *chosen: ColumnElement[bool]) -> None:
    """Locks rows until the end of the transaction, in the order of their primary key: transactions
    that change many rows then never wait for each other in a circle. SQLite has one writer."""
    if session.get_bind().dialect.name == "postgresql":
        primary = list(table.__table__.primary_key)
        session.execute(select(*primary).where(*chosen).order_by(*primary).with_for_update()).all()


def table_of(rows: Sequence[Mapping[str, int | float | str]]) -> CTE:
    """Rows of numbers and texts as a table, to update others from in one statement."""
    columns = [column(name, _TYPES[type(value)]) for name, value in rows[0].items()]
    return values(*columns, name="given").data([tuple(row.values()) for row in rows]).cte("given")


def insert_for_module(session: Session, table: type[Base], module_id: int, **values: Any) -> None:
    """Puts a row of a module, unless another process deleted the module meanwhile."""
    columns = [table.__table__.c[name] for name in values]
    typed = [literal(v, c.type) for v, c in zip(values.values(), columns, strict=True)]
    rows: Select[Any] = select(ModuleTable.id, *typed).where(ModuleTable.id == module_id)
    statement = _insert(session, table).from_select(["module_id", *values], rows)
    primary = list(table.__table__.primary_key)
    session.execute(statement.on_conflict_do_update(index_elements=primary, set_=values))


def chunks(items: Iterable[object]) -> Iterator[list[str]]:
    """Items as text, as many at once as a statement takes."""
    texts = [str(item) for item in items]
    return (texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK))


def _insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def from_modules(*columns: Any) -> Select[Any]:
    """Columns of modules, joined with their documents and collections."""
    return select(*columns).select_from(ModuleTable).join(DocumentTable).join(CollectionTable)


def collection_id(session: Session, name: str, namespace: str = DEFAULT_NAMESPACE) -> int:
    """The id of a collection. Raises `UnknownCollection`, which names those that exist."""
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


MOST = 1000  # items of a page
NOT_OF_THIS_LIST = "the cursor is not one of this list; begin without a cursor"

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """Some items of a list. next: the cursor of those that follow, None after the last. total: of
    the whole list, None where counting it would take long."""

    items: tuple[ItemT, ...]
    next: str | None = None
    total: int | None = None


def cursor_of(*values: int | float | str | None) -> str:
    """A cursor: what the last item was sorted by, and its id."""
    text = json.dumps(values, ensure_ascii=False)  # of names in other scripts half as long
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def after(cursor: str | None, *kinds: type | tuple[type, ...]) -> list[Any] | None:
    """The values of a cursor, one of each kind. Raises `InvalidRequest` for any other text."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise InvalidRequest(NOT_OF_THIS_LIST) from None
    if isinstance(values, list) and len(values) == len(kinds):
        pairs = zip(values, kinds, strict=True)
        if all(isinstance(value, kind) and _fits(value) for value, kind in pairs):
            return values
    raise InvalidRequest(NOT_OF_THIS_LIST)


def check_limit(limit: int) -> int:
    """Raises `InvalidRequest` for a size that no page may have."""
    if not 1 <= limit <= MOST:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {MOST}")
    return limit


def cut(items: Sequence[ItemT], limit: int) -> tuple[tuple[ItemT, ...], bool]:
    """The items of a page, of one more that were read, and whether there are more."""
    return tuple(items[:limit]), len(items) > limit


def page_of(
    rows: Sequence[ItemT], limit: int, sorted_by: Callable[[ItemT], tuple[Any, ...]],
    total: int | None = None,
) -> Page[ItemT]:  # fmt: skip
    """The page of rows, one more of which were read if there are more. sorted_by: what the cursor
    of a row holds."""
    items, more = cut(rows, limit)
    return Page(items, cursor_of(*sorted_by(items[-1])) if more else None, total)


def _fits(value: object) -> bool:
    """Whether a database takes a number of this size; true and false are no numbers."""
    if isinstance(value, bool):
        return False
    return not isinstance(value, int) or -(2**63) <= value < 2**63
