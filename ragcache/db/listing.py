"""Lists of collections, documents, modules and evictions, page by page, for operators.

The size and the uses of a module are the largest of any of its states, and it is sorted by these;
modules without states come last in either direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sqlalchemy import ColumnElement, Select, exists, func, or_, select
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.documents import DocumentRow
from ragcache.db.sql import (
    Page,
    check_cursor,
    check_limit,
    chunks,
    collection_id,
    count_rows,
    from_modules,
    page_of,
)
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    EncodingTable,
    EvictionTable,
    ModuleTable,
    NamespaceTable,
    SchemaStateTable,
    SchemaTable,
    StateTable,
)
from ragcache.errors import InvalidRequest, UnknownModule
from ragcache.states import KVKey

Sort = Literal["id", "name", "nbytes", "hits", "used_at"]
SORTS: tuple[str, ...] = get_args(Sort)

Condition = ColumnElement[bool]


@dataclass(frozen=True, slots=True)
class ModuleFilter:
    """Which modules; None for any. search: a part of their name or of their document's, in either
    case."""

    collection: str | None = None
    document: str | None = None
    tier: str | None = None
    pinned: bool | None = None
    search: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleListing:
    """A module as it is listed. nbytes, tokens, hits: the most of any of its states. used_at: when
    a prompt last read them; expires_at: both in Unix seconds, None for never."""

    id: int
    public_id: str
    name: str
    document: str
    collection: str
    tokens: int
    nbytes: int
    tiers: tuple[str, ...]
    hits: int
    used_at: float | None
    pinned: bool
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class HeldState:
    """States of a module in one tier. mode: how they were encoded."""

    key: str
    tier: str
    mode: str
    kv_dtype: str
    tokens: int
    nbytes: int
    hits: int
    used_at: float | None
    pinned: bool
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class ModuleDetail:
    """A module in full. attributes: its document's metadata."""

    listing: ModuleListing
    text: str
    uri: str
    attributes: Mapping[str, Any]
    states: tuple[HeldState, ...]


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """A collection, with the numbers of its documents and their modules."""

    name: str
    documents: int
    modules: int


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """States that left a tier. module: the name of one that they belong
    to, None where none is left or they are a schema's. at: Unix seconds."""

    id: int
    public_id: str
    key: str
    module: str | None
    tier: str
    reason: str
    nbytes: int
    at: float


def collection_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[CollectionRow]:
    """Return the collections of a namespace, by name. Raises `InvalidRequest`."""
    check_limit(limit)
    inside = DocumentTable.collection_id == CollectionTable.id
    every = select(
        CollectionTable.name,
        _count(DocumentTable).where(inside).scalar_subquery(),
        _count(ModuleTable).join(DocumentTable).where(inside).scalar_subquery(),
    ).join(NamespaceTable).where(NamespaceTable.name == namespace)  # fmt: skip
    rows = every if cursor is None else every.where(CollectionTable.name > cursor)
    with database.reading() as session:
        ordered = rows.order_by(CollectionTable.name).limit(limit + 1)
        found = [CollectionRow(*row) for row in session.execute(ordered)]
        return page_of(found, limit, lambda row: row.name, count_rows(session, every))


def document_page(
    database: Database, namespace: str, collection: str, cursor: str | None = None,
    limit: int = 100,
) -> Page[DocumentRow]:  # fmt: skip
    """Return the documents of a collection, by id.

    Raises `InvalidRequest`, or `UnknownCollection`.
    """
    check_limit(limit)
    modules = _count(ModuleTable).where(ModuleTable.document_id == DocumentTable.id)
    with database.reading() as session:
        owner = collection_id(session, collection, namespace)
        chosen = DocumentTable.collection_id == owner
        rows = select(DocumentTable, modules.scalar_subquery()).where(chosen)
        if cursor is not None:
            rows = rows.where(DocumentTable.source_id > cursor)
        ordered = session.execute(rows.order_by(DocumentTable.source_id).limit(limit + 1))
        found = [DocumentRow.of(row, count) for row, count in ordered]
        total = session.scalar(_count(DocumentTable).where(chosen))
    return page_of(found, limit, lambda row: row.source_id, total)


def eviction_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[EvictionRow]:
    """Evictions of states that belong to the namespace, the newest first. The default namespace
    also lists states that nothing owns any more, of which only a digest is left. They are not
    counted. Raises `InvalidRequest`."""
    check_limit(limit)
    row, module, schema = EvictionTable, *_owners(namespace)
    visible = module.is_not(None) | schema
    if namespace == DEFAULT_NAMESPACE:
        owned = [exists().where(t.key == row.key) for t in (EncodingTable, SchemaStateTable)]
        visible |= ~or_(*owned)
    columns = (row.id, row.public_id, row.key, module, row.tier, row.reason, row.nbytes, row.at)
    rows = select(*columns).where(visible)
    with database.reading() as session:
        if cursor is not None:
            last = session.scalar(select(row.id).where(row.public_id == cursor))
            check_cursor(last, cursor)
            rows = rows.where(row.id < last)
        ordered = session.execute(rows.order_by(row.id.desc()).limit(limit + 1))
        found = [EvictionRow(*each) for each in ordered]
    return page_of(found, limit, lambda row: row.public_id)


def _owners(namespace: str) -> tuple[ColumnElement[Any], Condition]:
    """Return the name of the first module of a namespace that evicted states belong to, and whether
    a schema of it has them.

    The owners of each key are read, and compared then: of the sum, unlike of the column, SQLite has
    no index by which it would rather begin with all that the namespace holds.
    """
    number = select(NamespaceTable.id).where(NamespaceTable.name == namespace).scalar_subquery()
    names = from_modules(ModuleTable.name).join(EncodingTable)
    mine = (EncodingTable.key == EvictionTable.key, CollectionTable.namespace_id + 0 == number)
    module = names.where(*mine).order_by(ModuleTable.id).limit(1).scalar_subquery()
    schemas = select(SchemaTable.namespace_id + 0).join(SchemaStateTable)
    return module, number.in_(schemas.where(SchemaStateTable.key == EvictionTable.key))


def _count(table: Any) -> Any:
    return select(func.count()).select_from(table)


def list_modules(
    database: Database, collection: str | None = None, namespace: str = DEFAULT_NAMESPACE
) -> list[ModuleListing]:
    """Return every module of a namespace, or of one collection, with the size, tiers and hits of
    its states.

    Raises `UnknownCollection`.
    """
    statement = _in_namespace(namespace, ModuleTable.id)
    statement = statement.order_by(CollectionTable.name, ModuleTable.id)
    with database.reading() as session:
        if collection is not None:
            owner = collection_id(session, collection, namespace)
            statement = statement.where(CollectionTable.id == owner)
        return listings(session, list(session.scalars(statement)))


def module_detail(database: Database, module: int | str, namespace: str) -> ModuleDetail:
    """Return a module with its text and states, by its id or public id.

    Raises `UnknownModule`, also for a module of another namespace.
    """
    id_column = ModuleTable.id if isinstance(module, int) else ModuleTable.public_id
    columns = (
        ModuleTable.id, ModuleTable.text, DocumentTable.uri, DocumentTable.attributes,
        ModuleTable.details,
    )  # fmt: skip
    statement = _in_namespace(namespace, *columns).where(id_column == module)
    with database.reading() as session:
        found = session.execute(statement).one_or_none()
        if found is None:
            raise UnknownModule(f"there is no module {module}")
        number, text, uri, attributes, details = found
        [listing] = listings(session, [number])
        states = _states(session, [number])[number]
    held = sorted(states, key=lambda s: (s.key, s.tier))
    return ModuleDetail(listing, text, uri, {**attributes, **details}, tuple(map(_held, held)))


def held_keys(database: Database, modules: Sequence[int], namespace: str) -> list[KVKey]:
    """Return the keys of the states that tiers hold of modules.

    Raises `UnknownModule`, also for a module of another namespace.
    """
    keys: dict[KVKey, None] = {}
    with database.reading() as session:
        for ids in chunks(modules):
            mine = _in_namespace(namespace, ModuleTable.id)
            known = set(session.scalars(mine.where(ModuleTable.id.in_(ids))))
            for module in ids:
                if module not in known:
                    raise UnknownModule(f"there is no module {module}")
            states = _states(session, ids)
            keys |= {row.key: None for module in ids for row in states[module]}
    return list(keys)


def listings(session: Session, modules: Sequence[int]) -> list[ModuleListing]:
    """Return the modules of these ids, in their order, without deleted ones."""
    found: dict[int, ModuleListing] = {}
    names = from_modules(
        ModuleTable.id, ModuleTable.public_id, ModuleTable.name,
        DocumentTable.source_id.label("document"), CollectionTable.name.label("collection"),
    )  # fmt: skip
    for ids in chunks(modules):
        states = _states(session, ids)
        for row in session.execute(names.where(ModuleTable.id.in_(ids))):
            found[row.id] = _listing(row, states[row.id])
    return [found[number] for number in modules if number in found]


def _in_namespace(namespace: str, *columns: Any) -> Select[Any]:
    """Columns of the modules of a namespace."""
    return from_modules(*columns).join(NamespaceTable).where(NamespaceTable.name == namespace)


def _states(session: Session, modules: Sequence[int]) -> defaultdict[int, list[Any]]:
    """Return the rows of states by module."""
    columns = select(EncodingTable.module_id, *StateTable.__table__.c)
    rows = columns.join(StateTable, StateTable.key == EncodingTable.key)
    states: defaultdict[int, list[Any]] = defaultdict(list)
    for row in session.execute(rows.where(EncodingTable.module_id.in_(modules))):
        states[row.module_id].append(row)
    return states


def _listing(module: Any, states: Sequence[Any]) -> ModuleListing:
    return ModuleListing(
        module.id, module.public_id, module.name, module.document, module.collection,
        tokens=max((s.tokens for s in states), default=0),
        nbytes=max((s.nbytes for s in states), default=0),
        tiers=tuple(sorted({s.tier for s in states})),
        hits=max((s.hits for s in states), default=0),
        used_at=max((s.used_at for s in states), default=0.0) or None,
        pinned=any(s.pinned for s in states),
        expires_at=min((s.expires_at for s in states if s.expires_at is not None), default=None),
    )  # fmt: skip


def _held(row: Any) -> HeldState:
    return HeldState(
        row.key, row.tier, row.mode, row.kv_dtype, row.tokens, row.nbytes, row.hits,
        row.used_at or None, row.pinned, row.expires_at,
    )  # fmt: skip


def module_page(
    database: Database, namespace: str, wanted: ModuleFilter, sort: str = "id", *,
    descending: bool = False, cursor: str | None = None, limit: int = 100,
) -> Page[ModuleListing]:  # fmt: skip
    """Return a page of a namespace's modules. Raises `InvalidRequest`, or `UnknownCollection`."""
    if sort not in SORTS:
        raise InvalidRequest(f"unknown order {sort!r}; orders: {', '.join(SORTS)}")
    check_limit(limit)
    before = _offset(cursor)
    with database.reading() as session:
        chosen = _in_namespace(namespace, ModuleTable.id).where(*_conditions(session, wanted))
        if wanted.collection is not None:
            owner = collection_id(session, wanted.collection, namespace)
            chosen = chosen.where(CollectionTable.id == owner)
        total = count_rows(session, chosen)
        ordered = _ordered(chosen, sort, descending).offset(before).limit(limit)
        items = listings(session, list(session.scalars(ordered)))
    behind = before + limit
    return Page(tuple(items), str(behind) if behind < total else None, total)


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
        raise InvalidRequest(f"{cursor!r:.80} is no cursor of modules; begin without a cursor")
    return int(cursor)


def _ordered(modules: Select[Any], sort: str, descending: bool) -> Select[Any]:
    """Modules in order. Modules without states come last."""
    if sort in ("id", "name"):
        column = getattr(ModuleTable, sort)
    else:
        column = func.max(getattr(StateTable, sort))
        held = modules.outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
        modules = held.outerjoin(StateTable, StateTable.key == EncodingTable.key)
        modules = modules.group_by(ModuleTable.id)
    direction = column.desc() if descending else column.asc()
    return modules.order_by(direction.nulls_last(), ModuleTable.id)


def _conditions(session: Session, wanted: ModuleFilter) -> Iterator[Condition]:
    """Yield the conditions on a module, besides its collection."""
    if wanted.document is not None:
        yield DocumentTable.source_id == wanted.document
    if wanted.tier is not None:
        yield ModuleTable.id.in_(_holding(StateTable.tier == wanted.tier))
    if wanted.pinned is not None:
        pinned = ModuleTable.id.in_(_holding(StateTable.pinned.is_(True)))
        yield pinned if wanted.pinned else ~pinned
    if wanted.search is not None:
        columns = (ModuleTable.name, DocumentTable.source_id)
        yield or_(*(_contains(session, column, wanted.search) for column in columns))


def _holding(chosen: Condition) -> Select[Any]:
    """Return the modules of some states, which are read once and not for each module."""
    rows = select(EncodingTable.module_id).join(StateTable, StateTable.key == EncodingTable.key)
    return rows.where(chosen)


def _contains(session: Session, column: Any, search: str) -> Condition:
    """SQLite's LIKE ignores the case of ASCII letters as it is."""
    for sign in "\\%_":
        search = search.replace(sign, f"\\{sign}")
    like = column.ilike if session.get_bind().dialect.name == "postgresql" else column.like
    return cast("Condition", like(f"%{search}%", escape="\\"))
