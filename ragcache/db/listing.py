"""Lists of collections, documents, modules and evictions, page by page, for operators.

Modules come in any order, and no statement reads all of them to give a hundred. Where the filters
leave many, a page is read along an index in its order; where they leave few, these are sorted. The
size and the uses of a module are the largest of any of its states, and it is sorted by these;
modules without states come last in either direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sqlalchemy import ColumnElement, Select, and_, exists, func, literal, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

from ragcache.db.database import Database
from ragcache.db.documents import DocumentRow
from ragcache.db.sql import (
    CHUNK,
    Page,
    after,
    check_limit,
    collection_id,
    cursor_of,
    cut,
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
FEW = 2000  # modules, up to which they are sorted as they are found

Condition = ColumnElement[bool]
PagePlace = tuple[Any, ...]
"""What a module is sorted by, its id last. Of one without states: (None, "", id)."""

_KINDS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "id": (int,),
    "name": (str, int),
    **dict.fromkeys(("nbytes", "hits"), ((int, type(None)), str, int)),
    "used_at": ((int, float, type(None)), str, int),
}


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
    """The collections of a namespace, by name. `total` comes with the first page. Raises
    `InvalidRequest`."""
    limit, last = check_limit(limit), after(cursor, str)
    own = NamespaceTable.name == namespace
    inside = DocumentTable.collection_id == CollectionTable.id
    rows = select(
        CollectionTable.name,
        _count(DocumentTable).where(inside).scalar_subquery(),
        _count(ModuleTable).join(DocumentTable).where(inside).scalar_subquery(),
    ).join(NamespaceTable)
    if last is not None:
        rows = rows.where(CollectionTable.name > last[0])
    statement = rows.where(own).order_by(CollectionTable.name).limit(limit + 1)
    with database.reading() as session:
        found = [CollectionRow(*row) for row in session.execute(statement)]
        every = _count(CollectionTable).join(NamespaceTable).where(own)
        total = session.scalar(every) if last is None else None
    return page_of(found, limit, lambda row: (row.name,), total)


def document_page(
    database: Database, namespace: str, collection: str, cursor: str | None = None,
    limit: int = 100,
) -> Page[DocumentRow]:  # fmt: skip
    """The documents of a collection, by id. `total` comes with the first page. Raises
    `InvalidRequest`, or `UnknownCollection`."""
    limit, last = check_limit(limit), after(cursor, str)
    modules = _count(ModuleTable).where(ModuleTable.document_id == DocumentTable.id)
    with database.reading() as session:
        chosen = DocumentTable.collection_id == collection_id(session, collection, namespace)
        rows = select(DocumentTable, modules.scalar_subquery()).where(chosen)
        if last is not None:
            rows = rows.where(DocumentTable.source_id > last[0])
        statement = rows.order_by(DocumentTable.source_id).limit(limit + 1)
        found = [DocumentRow.of(row, count) for row, count in session.execute(statement)]
        total = session.scalar(_count(DocumentTable).where(chosen)) if last is None else None
    return page_of(found, limit, lambda row: (row.source_id,), total)


def eviction_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[EvictionRow]:
    """Evictions of states that belong to the namespace, the newest first. The default namespace
    also lists states that nothing owns any more, of which only a digest is left. Raises
    `InvalidRequest`."""
    limit, last = check_limit(limit), after(cursor, int)
    with database.reading() as session:
        rows = select(EvictionTable).where(_visible(namespace))
        if last is not None:
            rows = rows.where(EvictionTable.id < last[0])
        read = list(session.scalars(rows.order_by(EvictionTable.id.desc()).limit(limit + 1)))
        names = module_names(session, [row.key for row in read], namespace)
    found = [
        EvictionRow(
            row.id, row.public_id, row.key, names.get(row.key), row.tier, row.reason, row.nbytes,
            row.at,
        )
        for row in read
    ]  # fmt: skip
    return page_of(found, limit, lambda row: (row.id,))


def module_names(session: Session, keys: list[str], namespace: str) -> dict[str, str]:
    """A module of the namespace for each of the keys that have one."""
    own = session.scalar(select(NamespaceTable.id).where(NamespaceTable.name == namespace))
    found = _owners(EncodingTable.key, ModuleTable.name, CollectionTable.namespace_id)
    statement = found.where(EncodingTable.key.in_(keys)).order_by(EncodingTable.module_id.desc())
    return {key: name for key, name, owner in session.execute(statement) if owner == own}


def _owners(*columns: Any) -> Select[Any]:
    """Columns of the modules that states belong to, beginning at their keys."""
    joined = select(*columns).select_from(EncodingTable).join(ModuleTable)
    return joined.join(DocumentTable).join(CollectionTable)


def _visible(namespace: str) -> Condition:
    """The owners of each key are read, and compared then: of the sum, unlike of the column, SQLite
    has no index by which it would rather begin with all that the namespace holds."""
    number = select(NamespaceTable.id).where(NamespaceTable.name == namespace).scalar_subquery()
    modules = _owners(CollectionTable.namespace_id + 0)
    schemas = select(SchemaTable.namespace_id + 0).join(SchemaStateTable)
    own = or_(
        number.in_(modules.where(EncodingTable.key == EvictionTable.key)),
        number.in_(schemas.where(SchemaStateTable.key == EvictionTable.key)),
    )
    if namespace != DEFAULT_NAMESPACE:
        return own
    owned = [exists().where(t.key == EvictionTable.key) for t in (EncodingTable, SchemaStateTable)]
    return or_(own, ~or_(*owned))


def _count(table: Any) -> Any:
    return select(func.count()).select_from(table)


def list_modules(
    database: Database, collection: str | None = None, namespace: str = DEFAULT_NAMESPACE
) -> list[ModuleListing]:
    """Every module of a namespace, or of one collection, with the size, tiers and hits of its
    states. Raises `UnknownCollection`."""
    statement = _in_namespace(namespace, ModuleTable.id)
    statement = statement.order_by(CollectionTable.name, ModuleTable.id)
    with database.reading() as session:
        if collection is not None:
            owner = collection_id(session, collection, namespace)
            statement = statement.where(CollectionTable.id == owner)
        return listings(session, list(session.scalars(statement)))


def module_detail(database: Database, module: int | str, namespace: str) -> ModuleDetail:
    """A module with its text and states, by its id or public id. Raises `UnknownModule`, also for
    a module of another namespace."""
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
    """The keys of the states that tiers hold of modules. Raises `UnknownModule`, also for a module
    of another namespace."""
    keys: dict[KVKey, None] = {}
    with database.reading() as session:
        for begin in range(0, len(modules), CHUNK):
            ids = modules[begin : begin + CHUNK]
            mine = _in_namespace(namespace, ModuleTable.id)
            known = set(session.scalars(mine.where(ModuleTable.id.in_(ids))))
            for module in ids:
                if module not in known:
                    raise UnknownModule(f"there is no module {module}")
            states = _states(session, ids)
            keys |= {KVKey(row.key): None for module in ids for row in states[module]}
    return list(keys)


def listings(session: Session, modules: Sequence[int]) -> list[ModuleListing]:
    """The modules of these ids, in their order; those that are gone are left out."""
    found: dict[int, ModuleListing] = {}
    names = from_modules(
        ModuleTable.id, ModuleTable.public_id, ModuleTable.name,
        DocumentTable.source_id.label("document"), CollectionTable.name.label("collection"),
    )  # fmt: skip
    for begin in range(0, len(modules), CHUNK):
        ids = modules[begin : begin + CHUNK]
        states = _states(session, ids)
        for row in session.execute(names.where(ModuleTable.id.in_(ids))):
            found[row.id] = _listing(row, states[row.id])
    return [found[number] for number in modules if number in found]


def _in_namespace(namespace: str, *columns: Any) -> Select[Any]:
    """Columns of the modules of a namespace."""
    return from_modules(*columns).join(NamespaceTable).where(NamespaceTable.name == namespace)


def _states(session: Session, modules: Sequence[int]) -> defaultdict[int, list[Any]]:
    """The rows of states by module."""
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
    """A page of a namespace's modules. `total` comes with the first page, unless counting would
    read all modules. Raises `InvalidRequest`, or `UnknownCollection`."""
    if sort not in SORTS:
        raise InvalidRequest(f"unknown order {sort!r}; orders: {', '.join(SORTS)}")
    last = _last(cursor, sort, descending)
    check_limit(limit)
    with database.reading() as session:
        named = wanted.collection
        owner = None if named is None else collection_id(session, named, namespace)
        number = session.scalar(select(NamespaceTable.id).where(NamespaceTable.name == namespace))
        if number is None:
            return Page((), None, 0)
        query = _ModuleQuery(session, wanted, number, owner)
        walk = _Walk(query, query.few(), sort, descending, limit)
        places, more = cut(walk.places(last), limit)
        items = listings(session, [place[-1] for place in places])
        following = cursor_of(sort, int(descending), *places[-1]) if more else None
        return Page(tuple(items), following, walk.total() if last is None else None)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Modules in order. few: the ids among which they are, if they are few."""

    query: _ModuleQuery
    few: Sequence[int] | None
    sort: str
    descending: bool
    limit: int

    def places(self, last: PagePlace | None) -> list[PagePlace]:
        """Those of a page and of one module more."""
        if self.sort in ("id", "name"):
            return self._named(last)
        found: list[PagePlace] = []
        if last is None or last[0] is not None:
            found, last = self._by_states(last), None
        lacking = self.limit + 1 - len(found)
        wanted = self.query.wanted
        if lacking and wanted.tier is None and not wanted.pinned:
            found += self._without_states(last, lacking)
        return found

    def total(self) -> int | None:
        """How many modules there are; None where they would have to be looked through."""
        query, wanted = self.query, self.query.wanted
        if self.few is not None:
            count = self._chosen(select(func.count()).select_from(ModuleTable), ModuleTable.id)
        elif wanted == ModuleFilter(collection=wanted.collection):
            count = query.members(func.count())
        else:
            return None
        return int(query.session.scalar(count))

    def _named(self, last: PagePlace | None) -> list[PagePlace]:
        columns = (ModuleTable.id,) if self.sort == "id" else (ModuleTable.name, ModuleTable.id)
        statement = self._chosen(select(*columns), ModuleTable.id)
        if last is not None:
            statement = statement.where(self._beyond(columns, last))
        return self._read(statement, columns)

    def _by_states(self, last: PagePlace | None) -> list[PagePlace]:
        """Along the states, each module with the highest of its own."""
        value, module = StateTable.__table__.c[self.sort], EncodingTable.module_id
        columns = (value, StateTable.key, module)
        state, encoding = aliased(StateTable), aliased(EncodingTable)
        here = tuple_(value, StateTable.key, StateTable.tier, StateTable.place)
        there = tuple_(getattr(state, self.sort), state.key, state.tier, state.place)
        own = (encoding.module_id == module) & (state.key == encoding.key)
        higher = exists().where(own, there > here)
        joined = select(*columns).join(EncodingTable, EncodingTable.key == StateTable.key)
        statement = self._chosen(joined, module).where(~higher)
        if last is not None:
            same = and_(value == last[0], StateTable.key == last[1])
            passed = module >= last[2] if self.descending else module <= last[2]
            beyond = self._beyond(columns[:2], last[:2], or_equal=True)
            statement = statement.where(beyond, ~and_(same, passed))
        return self._read(statement, columns)

    def _without_states(self, last: PagePlace | None, limit: int) -> list[PagePlace]:
        own = EncodingTable.module_id == ModuleTable.id
        held = exists().where(own, StateTable.key == EncodingTable.key)
        statement = self._chosen(select(ModuleTable.id), ModuleTable.id).where(~held)
        if last is not None:
            statement = statement.where(ModuleTable.id > last[2])
        rows = self.query.session.scalars(statement.order_by(ModuleTable.id).limit(limit))
        return [(None, "", number) for number in rows]

    def _chosen(self, statement: Select[Any], module: Any) -> Select[Any]:
        chosen = statement.where(*self.query.conditions(module))
        return chosen if self.few is None else chosen.where(module.in_(self.few))

    def _read(self, statement: Select[Any], columns: Sequence[Any]) -> list[PagePlace]:
        order = [column.desc() if self.descending else column for column in columns]
        ordered = statement.order_by(*order).limit(self.limit + 1)
        return [tuple(row) for row in self.query.session.execute(ordered)]

    def _beyond(
        self, columns: Sequence[Any], last: PagePlace, *, or_equal: bool = False
    ) -> Condition:
        row, values = (tuple_(*columns), last) if len(columns) > 1 else (columns[0], last[0])
        if or_equal:
            condition = row <= values if self.descending else row >= values
        else:
            condition = row < values if self.descending else row > values
        return cast("Condition", condition)


def _last(cursor: str | None, sort: str, descending: bool) -> PagePlace | None:
    """Where the page before ended. Raises `InvalidRequest`, also for a cursor of another order."""
    values = after(cursor, str, int, *_KINDS[sort])
    if values is None:
        return None
    if values[:2] != [sort, int(descending)]:
        raise InvalidRequest("the cursor is of another order; begin without a cursor")
    return tuple(values[2:])


@dataclass(frozen=True, slots=True)
class _ModuleQuery:
    """A filter in a session. namespace: its id; owner: that of the collection, if one is named."""

    session: Session
    wanted: ModuleFilter
    namespace: int
    owner: int | None

    def conditions(self, module: Any) -> Iterator[Condition]:
        """The conditions on a module, which it is looked up by its id for: written so, they give
        no database a reason to read in another order."""
        wanted = self.wanted
        yield self._membership(module)
        if wanted.document is not None:
            yield _of(DocumentTable.source_id, module) == wanted.document
        if wanted.tier is not None:
            yield _has_state(module, StateTable.tier.key, wanted.tier)
        if wanted.pinned is not None:
            pinned = _has_state(module, StateTable.pinned.key, True)
            yield pinned if wanted.pinned else ~pinned
        if wanted.search is not None:
            name = self._contains(_of(ModuleTable.name, module))
            yield or_(name, self._contains(_of(DocumentTable.source_id, module)))

    def members(self, column: Any) -> Select[Any]:
        """A column of the modules of the collection, or of the namespace."""
        statement = from_modules(column)
        if self.owner is None:
            return statement.where(CollectionTable.namespace_id == self.namespace)
        return statement.where(CollectionTable.id == self.owner)

    def few(self) -> list[int] | None:
        """Modules among which are all that match, if one part of the filter leaves few."""
        for probe in self._probes():
            rows: list[int] = []
            for statement in probe:
                rows += self.session.scalars(statement.limit(FEW + 1 - len(rows)))
                if len(rows) > FEW:
                    break
            else:
                return list(dict.fromkeys(rows))
        return None

    def _probes(self) -> Iterator[list[Select[Any]]]:
        """Statements that together find all modules that match one part of the filter."""
        wanted = self.wanted
        held = select(EncodingTable.module_id).join(StateTable, StateTable.key == EncodingTable.key)
        if wanted.pinned:
            yield [held.where(StateTable.pinned)]
        if wanted.tier is not None:
            yield [held.where(StateTable.tier == wanted.tier)]
        members = self.members(ModuleTable.id)
        if wanted.document is not None:
            members = members.where(DocumentTable.source_id == wanted.document)
        yield [members]
        if wanted.search is not None:
            named = select(ModuleTable.id).where(self._contains(ModuleTable.name))
            theirs = self.members(ModuleTable.id).where(self._contains(DocumentTable.source_id))
            yield [theirs, named.where(self._membership(ModuleTable.id))]

    def _membership(self, module: Any) -> Condition:
        if self.owner is not None:
            return cast("Condition", _of(CollectionTable.id, module) == self.owner)
        return cast("Condition", _of(CollectionTable.namespace_id, module) == self.namespace)

    def _contains(self, column: Any) -> Condition:
        """SQLite's LIKE ignores the case of ASCII letters as it is."""
        search = self.wanted.search or ""
        for sign in "\\%_":
            search = search.replace(sign, f"\\{sign}")
        postgresql = self.session.get_bind().dialect.name == "postgresql"
        like = column.ilike if postgresql else column.like
        return cast("Condition", like(f"%{search}%", escape="\\"))


def _of(column: Any, module: Any) -> Any:
    """A column of a module, its document or its collection."""
    inner = aliased(ModuleTable)
    if column.class_ is ModuleTable:
        found = select(getattr(inner, column.key))
    else:
        joined = select(column).select_from(inner)
        found = joined.join(DocumentTable, DocumentTable.id == inner.document_id)
    if column.class_ is CollectionTable:
        found = found.join(CollectionTable, CollectionTable.id == DocumentTable.collection_id)
    return found.where(inner.id == module).scalar_subquery()


def _has_state(module: Any, name: str, value: Any) -> Condition:
    """Whether some states of a module have a value. The module's are read and then compared:
    SQLite would rather look through all states that have it."""
    state, encoding = aliased(StateTable), aliased(EncodingTable)
    values = select(getattr(state, name)).join(encoding, encoding.key == state.key)
    return literal(value).in_(values.where(encoding.module_id == module))
