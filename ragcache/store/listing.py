"""Modules with what the tiers hold of them: what an operator lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from ragcache.errors import UnknownModule
from ragcache.states import KVKey
from ragcache.store.database import Database
from ragcache.store.lookup import collection_id
from ragcache.store.statements import CHUNK
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    NamespaceTable,
    StateTable,
)


@dataclass(frozen=True, slots=True)
class ModuleListing:
    """A module as it is listed. nbytes, tokens, hits: the most of any of its states. last_use: on
    the store's logical clock, 0 for never. expires_at: Unix seconds, None for never."""

    id: int
    public_id: str
    name: str
    document: str
    collection: str
    tokens: int
    nbytes: int
    tiers: tuple[str, ...]
    hits: int
    last_use: int
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
    last_use: int
    encode_seconds: float
    pinned: bool
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class ModuleDetail:
    """All that is known of a module. attributes: its document's metadata."""

    listing: ModuleListing
    text: str
    uri: str
    attributes: Mapping[str, Any]
    states: tuple[HeldState, ...]


def list_modules(
    database: Database, collection: str | None = None, namespace: str = DEFAULT_NAMESPACE
) -> list[ModuleListing]:
    """Every module of a namespace with the size, tiers and hits of its states. Raises
    `UnknownCollection`."""
    statement = _in_namespace(select(ModuleTable.id), namespace)
    statement = statement.order_by(CollectionTable.name, ModuleTable.id)
    with database.reading() as session:
        if collection is not None:
            owner = collection_id(session, collection, namespace)
            statement = statement.where(CollectionTable.id == owner)
        return listings(session, list(session.scalars(statement)))


def module_detail(database: Database, module: int | str, namespace: str) -> ModuleDetail:
    """module: its id, or its public id. Raises `UnknownModule`, also for a module of another
    namespace."""
    id_column = ModuleTable.id if isinstance(module, int) else ModuleTable.public_id
    columns = (ModuleTable.id, ModuleTable.text, DocumentTable.uri, DocumentTable.attributes)
    statement = _in_namespace(select(*columns), namespace).where(id_column == module)
    with database.reading() as session:
        found = session.execute(statement).one_or_none()
        if found is None:
            raise UnknownModule(f"there is no module {module}")
        number, text, uri, attributes = found
        [listing] = listings(session, [number])
        states = _states(session, [number])[number]
    held = sorted(states, key=lambda s: (s.key, s.tier))
    return ModuleDetail(listing, text, uri, attributes, tuple(map(_held, held)))


def held_keys(database: Database, modules: Sequence[int], namespace: str) -> list[KVKey]:
    """The keys of the states that tiers hold of modules. Raises `UnknownModule`, also for a module
    of another namespace."""
    keys: dict[KVKey, None] = {}
    with database.reading() as session:
        for begin in range(0, len(modules), CHUNK):
            ids = modules[begin : begin + CHUNK]
            mine = _in_namespace(select(ModuleTable.id), namespace)
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
    for begin in range(0, len(modules), CHUNK):
        ids = modules[begin : begin + CHUNK]
        states = _states(session, ids)
        names = (
            select(
                ModuleTable.id,
                ModuleTable.public_id,
                ModuleTable.name,
                DocumentTable.source_id.label("document"),
                CollectionTable.name.label("collection"),
            )
            .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
            .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
            .where(ModuleTable.id.in_(ids))
        )
        for row in session.execute(names):
            found[row.id] = _listing(row, states[row.id])
    return [found[number] for number in modules if number in found]


def _in_namespace(statement: Any, namespace: str) -> Any:
    """A statement over the modules of a namespace."""
    return (
        statement.select_from(ModuleTable)
        .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
        .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
        .join(NamespaceTable, CollectionTable.namespace_id == NamespaceTable.id)
        .where(NamespaceTable.name == namespace)
    )


def _states(session: Session, modules: Sequence[int]) -> defaultdict[int, list[Any]]:
    """The rows of states by module."""
    rows = (
        select(EncodingTable.module_id, *StateTable.__table__.c)
        .join(StateTable, StateTable.key == EncodingTable.key)
        .where(EncodingTable.module_id.in_(modules))
    )
    states: defaultdict[int, list[Any]] = defaultdict(list)
    for row in session.execute(rows):
        states[row.module_id].append(row)
    return states


def _listing(module: Any, states: Sequence[Any]) -> ModuleListing:
    return ModuleListing(
        module.id, module.public_id, module.name, module.document, module.collection,
        tokens=max((s.tokens for s in states), default=0),
        nbytes=max((s.nbytes for s in states), default=0),
        tiers=tuple(sorted({s.tier for s in states})),
        hits=max((s.hits for s in states), default=0),
        last_use=max((s.last_use for s in states), default=0),
        pinned=any(s.pinned for s in states),
        expires_at=min((s.expires_at for s in states if s.expires_at is not None), default=None),
    )  # fmt: skip


def _held(row: Any) -> HeldState:
    return HeldState(
        row.key, row.tier, row.mode, row.kv_dtype, row.tokens, row.nbytes, row.hits, row.last_use,
        row.encode_seconds, row.pinned, row.expires_at,
    )  # fmt: skip
