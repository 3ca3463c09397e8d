"""Lists of collections, documents, modules and evictions, page by page.

A module may have several encodings. Its size and its uses are the largest of any of them. In lists
that are sorted by figures of states, modules without states come last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sqlalchemy import ColumnElement, Select, bindparam, exists, func, or_, select
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.documents import DocumentRow
from ragcache.db.sql import (
    Page,
    check_limit,
    chunks,
    collection_id,
    from_modules,
    namespace_number,
    read_page,
)
from ragcache.db.summaries import TIER_BITS
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    EncodingTable,
    EvictionTable,
    ModuleSummaryTable,
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
    """Conditions on modules. None allows all values."""

    collection: str | None = None
    document: str | None = None
    tier: str | None = None
    pinned: bool | None = None
    search: str | None = None
    """Part of the module's name or of its document's, in upper or lower case."""


@dataclass(frozen=True, slots=True)
class ModuleListing:
    """A module in a list."""

    id: int
    public_id: str
    name: str
    document: str
    collection: str
    tokens: int
    """Number of tokens of its longest states."""
    nbytes: int
    """Bytes of its largest states."""
    tiers: tuple[str, ...]
    hits: int
    """Uses of its most used states."""
    used_at: float | None
    """Time of the last prompt that read its states, in Unix seconds, if any."""
    pinned: bool
    expires_at: float | None
    """Time at which the first of its states expire, in Unix seconds, if any."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """States of a module in one tier."""

    key: str
    tier: str
    mode: str
    """Encoding mode."""
    kv_dtype: str
    tokens: int
    nbytes: int
    hits: int
    used_at: float | None
    """Time of the last use in Unix seconds, if any."""
    pinned: bool
    expires_at: float | None
    """Unix seconds. Unset without a limit."""


@dataclass(frozen=True, slots=True)
class ModuleDetail:
    """A module with its text, metadata and states."""

    listing: ModuleListing
    text: str
    uri: str
    attributes: Mapping[str, Any]
    """Metadata of its document and of the module."""
    states: tuple[HeldState, ...]


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """A collection, with its description and the numbers of its documents and their modules."""

    name: str
    description: str
    documents: int
    modules: int
    own_priming: bool
    """Whether modules in later places are encoded behind a text of the collection's own."""
    similar_priming: bool
    """Whether they are encoded behind the most similar other module, where there is one."""


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """States that left a tier."""

    id: int
    public_id: str
    key: str
    module: str | None
    """Name of a module that they belong to. Unset without one, and for states of a schema."""
    tier: str
    reason: str
    nbytes: int
    at: float
    """Unix seconds."""


def collection_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[CollectionRow]:
    """Return the collections of a namespace, by name. Raises `InvalidRequest`."""
    inside = DocumentTable.collection_id == CollectionTable.id
    rows = (
        select(
            CollectionTable.name,
            CollectionTable.description,
            _count(DocumentTable).where(inside).scalar_subquery(),
            _count(ModuleTable).join(DocumentTable).where(inside).scalar_subquery(),
            CollectionTable.priming.is_not(None),
            CollectionTable.similar,
        )
        .join(NamespaceTable)
        .where(NamespaceTable.name == namespace)
    )
    with database.reading() as session:
        return read_page(session, rows, CollectionTable.name, CollectionRow, cursor, limit)


def document_page(
    database: Database,
    namespace: str,
    collection: str,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[DocumentRow]:
    """Return the documents of a collection, by id.

    Raises `InvalidRequest`, or `UnknownCollection`.
    """
    modules = _count(ModuleTable).where(ModuleTable.document_id == DocumentTable.id)
    rows = select(DocumentTable, modules.scalar_subquery())
    with database.reading() as session:
        rows = rows.where(
            DocumentTable.collection_id == collection_id(session, collection, namespace)
        )
        return read_page(session, rows, DocumentTable.source_id, DocumentRow.of, cursor, limit)


def eviction_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[EvictionRow]:
    """Return evictions of states that belong to a namespace, the newest first, uncounted.

    The default namespace also lists evicted states that no longer belong to anything. Raises
    `InvalidRequest`.
    """
    row, module, schema = EvictionTable, *_owners(namespace)
    visible = module.is_not(None) | schema
    if namespace == DEFAULT_NAMESPACE:
        owned = [exists().where(t.key == row.key) for t in (EncodingTable, SchemaStateTable)]
        visible |= ~or_(*owned)
    columns = (row.id, row.public_id, row.key, module, row.tier, row.reason, row.nbytes, row.at)
    rows = select(*columns).where(visible)
    with database.reading() as session:
        return read_page(session, rows, row.public_id, EvictionRow, cursor, limit, counted=False)


def _owners(namespace: str) -> tuple[ColumnElement[Any], Condition]:
    """Return two columns: the first module of evicted states, and whether a schema has them.

    Only owners within the namespace count. The query finds the owners of each key first: `+ 0`
    keeps SQLite from an index by which it would read the whole namespace.
    """
    number = namespace_number(namespace)
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
    """Return all modules of a namespace or a collection. Raises `UnknownCollection`."""
    statement = _in_namespace(namespace, ModuleTable.id)
    statement = statement.order_by(CollectionTable.name, ModuleTable.id)
    with database.reading() as session:
        if collection is not None:
            owner = collection_id(session, collection, namespace)
            statement = statement.where(CollectionTable.id == owner)
        return listings(session, list(session.scalars(statement)))


def module_detail(database: Database, module: int | str, namespace: str) -> ModuleDetail:
    """Return a module by its id or public id. Raises `UnknownModule`.

    A module of another namespace is unknown.
    """
    id_column = ModuleTable.id if isinstance(module, int) else ModuleTable.public_id
    columns = (
        ModuleTable.id,
        ModuleTable.text,
        DocumentTable.uri,
        DocumentTable.attributes,
        ModuleTable.details,
    )
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
    """Return the keys of modules' states in any tier. Raises `UnknownModule`.

    A module of another namespace is unknown.
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
        ModuleTable.id,
        ModuleTable.public_id,
        ModuleTable.name,
        DocumentTable.source_id.label("document"),
        CollectionTable.name.label("collection"),
    )
    for ids in chunks(modules):
        states = _states(session, ids)
        for row in session.execute(names.where(ModuleTable.id.in_(ids))):
            found[row.id] = _listing(row, states[row.id])
    return [found[number] for number in modules if number in found]


def _in_namespace(namespace: str, *columns: Any) -> Select[Any]:
    """Select columns of the modules of a namespace."""
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
        module.id,
        module.public_id,
        module.name,
        module.document,
        module.collection,
        tokens=max((s.tokens for s in states), default=0),
        nbytes=max((s.nbytes for s in states), default=0),
        tiers=tuple(sorted({s.tier for s in states})),
        hits=max((s.hits for s in states), default=0),
        used_at=max((s.used_at for s in states), default=0.0) or None,
        pinned=any(s.pinned for s in states),
        expires_at=min((s.expires_at for s in states if s.expires_at is not None), default=None),
    )


def _held(row: Any) -> HeldState:
    return HeldState(
        row.key,
        row.tier,
        row.mode,
        row.kv_dtype,
        row.tokens,
        row.nbytes,
        row.hits,
        row.used_at or None,
        row.pinned,
        row.expires_at,
    )


def module_page(
    database: Database,
    namespace: str,
    wanted: ModuleFilter,
    sort: str = "id",
    *,
    descending: bool = False,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[ModuleListing]:
    """Return a page of a namespace's modules. Raises `InvalidRequest` or `UnknownCollection`.

    Modules of equal figures are sorted by id, in the same direction.
    """
    if sort not in SORTS:
        raise InvalidRequest(f"unknown order {sort!r}; orders: {', '.join(SORTS)}")
    check_limit(limit)
    offset = _offset(cursor)
    number, held = ModuleSummaryTable.module_id, ModuleSummaryTable.held
    columns = [number] if sort == "id" else [getattr(ModuleSummaryTable, sort), number]
    with database.reading() as session:
        chosen = list(_conditions(session, namespace, wanted))
        counts = select(func.count(), func.coalesce(func.sum(held), 0)).where(*chosen)
        total, with_states = map(int, session.execute(counts).one())
        rows = select(number).where(*chosen)
        parts = [(rows, total)]
        if sort not in ("id", "name"):
            parts = [
                (rows.where(held == 1), with_states),
                (rows.where(held == 0), total - with_states),
            ]
        ids: list[int] = []
        begin = offset
        for part, size in parts:
            inside = range(max(0, begin), min(begin + limit, size))
            ids += _slice(session, part, columns, descending, size, inside)
            begin -= size
        items = listings(session, ids)
    behind = offset + limit
    return Page(tuple(items), str(behind) if behind < total else None, total)


def _slice(
    session: Session,
    rows: Select[Any],
    columns: Sequence[Any],
    descending: bool,
    size: int,
    inside: range,
) -> list[int]:
    """Return the rows at some positions of an order. Reads from the end that is nearer."""
    if not inside:
        return []
    from_end = size - inside.stop < inside.start
    skipped = size - inside.stop if from_end else inside.start
    order = [each.desc() if descending != from_end else each.asc() for each in columns]
    found = list(session.scalars(rows.order_by(*order).offset(skipped).limit(len(inside))))
    return found[::-1] if from_end else found


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
        raise InvalidRequest(f"{cursor!r:.80} is no cursor of modules; begin without a cursor")
    return int(cursor)


def _conditions(session: Session, namespace: str, wanted: ModuleFilter) -> Iterator[Condition]:
    """Yield the conditions of a filter on summaries. Raises `UnknownCollection`."""
    summary = ModuleSummaryTable
    if wanted.collection is None:
        own = CollectionTable.namespace_id == namespace_number(namespace)
        ids = list(session.scalars(select(CollectionTable.id).where(own)))
        yield summary.collection_id.in_(bindparam("own", ids, expanding=True, literal_execute=True))
    else:
        yield summary.collection_id == collection_id(session, wanted.collection, namespace)
    if wanted.document is not None:
        yield summary.document_id.in_(_documents(DocumentTable.source_id == wanted.document))
    if wanted.tier is not None:
        yield summary.tiers.bitwise_and(TIER_BITS.get(wanted.tier, 0)) != 0
    if wanted.pinned is not None:
        yield summary.pinned == int(wanted.pinned)
    if wanted.search is not None:
        named = _contains(session, DocumentTable.source_id, wanted.search)
        yield or_(
            _contains(session, summary.name, wanted.search),
            summary.document_id.in_(_documents(named)),
        )


def _documents(chosen: Condition) -> Select[Any]:
    return select(DocumentTable.id).where(chosen)


def _contains(session: Session, column: Any, search: str) -> Condition:
    """Return the condition that a column contains a text, in upper or lower case.

    SQLite's LIKE ignores the case of ASCII letters by default. PostgreSQL compares ASCII letters
    four times faster by the collation "C", which knows no other letters.
    """
    like = column.like
    if session.get_bind().dialect.name == "postgresql":
        like = (column.collate("C") if search.isascii() else column).ilike
    for sign in "\\%_":
        search = search.replace(sign, f"\\{sign}")
    return cast("Condition", like(f"%{search}%", escape="\\"))
