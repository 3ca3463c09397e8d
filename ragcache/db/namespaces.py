"""Namespaces: their names, and their deletion with everything in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select, union, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.references import OWNERS, retire
from ragcache.db.sql import chunks, count_rows, insert_returning, namespace_id, rows_of
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    ApiKeyTable,
    CollectionTable,
    ConversationStateTable,
    DocumentTable,
    EncodingTable,
    JobStateTable,
    JobTable,
    ModuleTable,
    NamespaceTable,
    ObjectTable,
    ObservedModuleTable,
    ObservedStateTable,
    RecordTable,
    ScaffoldTable,
    SchemaStateTable,
    SchemaTable,
    StateTable,
)
from ragcache.errors import ConfigurationError, UnknownNamespace
from ragcache.states import KVKey


@dataclass(frozen=True, slots=True)
class NamespaceDeletion:
    """The contents of a namespace that a deletion removes, as numbers."""

    collections: int
    documents: int
    modules: int
    schemas: int
    """PML schemas."""
    conversations: int
    """Kept conversations."""
    observed: int
    """Texts that recurred in prompts, as far as they are stored."""
    objects: Mapping[str, int]
    """Files, responses, pins and other objects of interfaces, by kind."""
    records: int
    """Records of indexings."""
    jobs: int
    """Ingestions, ended ones included."""
    api_keys: int
    """API keys, revoked ones included. 0 for `default`, whose keys stay."""
    states: int
    """States that nothing outside of the namespace needs."""
    tiers: Mapping[str, int]
    """Bytes of these states by tier, on all machines."""

    @property
    def nbytes(self) -> int:
        """Bytes in all tiers."""
        return sum(self.tiers.values())


class NamespaceRows:
    """The namespaces of a ledger. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def names(self) -> list[str]:
        """Return the names of all namespaces, sorted."""
        rows = select(NamespaceTable.name).order_by(NamespaceTable.name)
        return [name for (name,) in self._database.fetch(rows)]

    def use(self, name: str) -> None:
        """Create a namespace that does not exist, and let `find_deleted` find its deletion."""
        number = select(NamespaceTable.id).where(NamespaceTable.name == name)
        for (found,) in self._database.fetch(number):
            self._database.namespaces.setdefault(name, found)
            return
        with self._database.transaction() as session:
            namespace_id(session, name)

    def preview_deletion(self, name: str, roots: Collection[KVKey] = ()) -> NamespaceDeletion:
        """Count what `delete` would remove. Raises its errors."""
        with self._database.reading() as session:
            return _Contents.of(session, name, roots).deletion

    def delete(
        self, name: str, roots: Collection[KVKey] = ()
    ) -> tuple[NamespaceDeletion, list[KVKey]]:
        """Delete a namespace with everything in it.

        Other processes that use it find it with `find_deleted`. Until they have forgotten it, they
        can store nothing in it.

        Args:
            name: The namespace. `default` keeps its API keys, since operators use them.
            roots: Keys of preambles whose states are the namespace's. Preambles that rows of other
                states name are found in any case.

        Returns:
            The numbers of the deletion, and the keys of states without an owner. Their rows are
            deleted already.

        Raises:
            UnknownNamespace: There is no such namespace.
            ConfigurationError: The namespace has the service's only API keys.
        """
        with self._database.transaction() as session:
            own = select(NamespaceTable.id).where(NamespaceTable.name == name)
            session.execute(own.with_for_update())  # waits for writers, and keeps others waiting
            jobs = select(JobTable.id).where(JobTable.namespace == name)
            session.execute(jobs.with_for_update())  # likewise for states that jobs expect
            found = _Contents.of(session, name, roots)
            if name == DEFAULT_NAMESPACE:
                _move_keys(session, found.number)
            session.execute(delete(JobTable).where(JobTable.namespace == name))
            session.execute(delete(NamespaceTable).where(NamespaceTable.id == found.number))
            return found.deletion, retire(session, found.keys, found.roots)

    def state_keys(self, name: str, roots: Collection[KVKey] = ()) -> list[KVKey]:
        """Return the keys of the states that `delete` would remove. Raises its errors."""
        with self._database.reading() as session:
            found = _Contents.of(session, name, roots)
            return list(session.scalars(select(StateTable.key).where(found.gone).distinct()))

    def find_deleted(self) -> list[str]:
        """Return the namespaces that this process uses and others have deleted.

        They may exist again by now.
        """
        known = dict(self._database.namespaces)
        rows = select(NamespaceTable.name, NamespaceTable.id)
        with self._database.reading() as session:
            there = dict(iter(rows_of(session, rows, NamespaceTable.name, known)))
        return [name for name, number in known.items() if there.get(name) != number]


def _move_keys(session: Session, number: int) -> None:
    """Give the API keys of a namespace to a new row of its name."""
    own = NamespaceTable.id == number
    name = session.scalars(select(NamespaceTable.name).where(own)).one()
    session.execute(update(NamespaceTable).where(own).values(name=f"\x1f{number}"))
    successor = insert_returning(session, NamespaceTable, {"name": name})
    keys = update(ApiKeyTable).where(ApiKeyTable.namespace_id == number)
    session.execute(keys.values(namespace_id=successor))


@dataclass(frozen=True, slots=True)
class _Contents:
    """The contents of a namespace, as a transaction sees them."""

    number: int
    """Id of the namespace."""
    keys: list[KVKey]
    """Keys that the namespace owns or is the only one to need."""
    roots: frozenset[KVKey]
    """Keys of its preambles."""
    gone: ColumnElement[bool]
    """Condition on rows of `StateTable` that nothing outside of the namespace needs."""
    deletion: NamespaceDeletion

    @classmethod
    def of(cls, session: Session, name: str, roots: Iterable[KVKey]) -> _Contents:
        """Read the contents of a namespace. Raises the errors of `NamespaceRows.delete`."""
        named = select(NamespaceTable.id).where(NamespaceTable.name == name)
        number = session.scalar(named)
        if number is None:
            known = ", ".join(map(repr, session.scalars(select(NamespaceTable.name))))
            raise UnknownNamespace(f"there is no namespace {name!r}; known: {known}")
        _check_keys(session, name, number)
        owners = _owners(name, number)
        owned = union(*(select(table.key).where(mine) for table, mine in owners.items()))
        preambles = select(StateTable.root).where(StateTable.root != "", StateTable.key.in_(owned))
        every = frozenset({*roots, *map(KVKey, session.scalars(preambles.distinct()))})
        gone = _is_gone(owners, every)
        keys = {*session.scalars(owned), *session.scalars(select(StateTable.key).where(gone))}
        deletion = _count(session, name, number, gone)
        return cls(number, sorted(keys), every, gone, deletion)


def _check_keys(session: Session, name: str, number: int) -> None:
    """Raise `ConfigurationError` if a deletion would leave a service without any key.

    A service without keys is open to its machine.
    """
    if name == DEFAULT_NAMESPACE:
        return
    own = ApiKeyTable.namespace_id == number
    columns = select(func.count()).select_from(ApiKeyTable)
    if session.scalar(columns.where(own)) and not session.scalar(columns.where(~own)):
        raise ConfigurationError(
            f"the namespace {name!r} has the only API keys, and without a key the service would be "
            "open to its machine; make an operator's key first: "
            "`ragcache keys create NAME --role admin`"
        )


def _owners(name: str, number: int) -> dict[Any, ColumnElement[bool]]:
    """Return the tables of owners of states, with the condition on the namespace's rows."""
    collections = select(CollectionTable.id).where(CollectionTable.namespace_id == number)
    modules = select(ModuleTable.id).join(DocumentTable)
    schemas = select(SchemaTable.id).where(SchemaTable.namespace_id == number)
    texts = select(ObservedModuleTable.id).where(ObservedModuleTable.namespace_id == number)
    jobs = select(JobTable.id).where(JobTable.namespace == name)
    owners: dict[Any, ColumnElement[bool]] = {
        JobStateTable: JobStateTable.job_id.in_(jobs),
        EncodingTable: EncodingTable.module_id.in_(
            modules.where(DocumentTable.collection_id.in_(collections))
        ),
        SchemaStateTable: SchemaStateTable.schema_id.in_(schemas),
        ScaffoldTable: or_(  # one of the two is NULL
            func.coalesce(ScaffoldTable.schema_id, -1).in_(schemas),
            func.coalesce(ScaffoldTable.collection_id, -1).in_(collections),
        ),
        ConversationStateTable: ConversationStateTable.namespace_id == number,
        ObservedStateTable: ObservedStateTable.module_id.in_(texts),
    }
    assert owners.keys() == set(OWNERS), "a new kind of owner belongs here, too"
    return owners


def _is_gone(
    owners: Mapping[Any, ColumnElement[bool]], roots: Collection[KVKey]
) -> ColumnElement[bool]:
    """Return the condition on rows of `StateTable` that a deletion removes.

    Keys are salted with the namespace, so that a preamble and the states behind it belong to one.
    """
    own, others = (
        [exists().where(table.key == StateTable.key, each) for table, each in chosen]
        for chosen in (owners.items(), [(table, ~mine) for table, mine in owners.items()])
    )
    named = [
        column.in_(part) for part in chunks(roots) for column in (StateTable.root, StateTable.key)
    ]
    return or_(*own, *named) & ~or_(*others)


def _count(
    session: Session, name: str, number: int, gone: ColumnElement[bool]
) -> NamespaceDeletion:
    def count(rows: Select[Any]) -> int:
        return count_rows(session, rows)

    def rows_in(table: Any) -> Select[Any]:
        return select(table).where(table.namespace_id == number)

    documents = select(DocumentTable.id).join(CollectionTable)
    documents = documents.where(CollectionTable.namespace_id == number)
    kinds = rows_in(ObjectTable).with_only_columns(ObjectTable.kind, func.count())
    sizes = select(StateTable.tier, func.sum(StateTable.nbytes)).where(gone)
    talks = rows_in(ConversationStateTable).with_only_columns(
        func.count(ConversationStateTable.conversation.distinct())
    )
    return NamespaceDeletion(
        collections=count(rows_in(CollectionTable)),
        documents=count(documents),
        modules=count(documents.join(ModuleTable)),
        schemas=count(rows_in(SchemaTable)),
        conversations=session.scalar(talks) or 0,
        observed=count(rows_in(ObservedModuleTable)),
        objects=dict(iter(session.execute(kinds.group_by(ObjectTable.kind)))),
        records=count(rows_in(RecordTable)),
        jobs=count(select(JobTable).where(JobTable.namespace == name)),
        api_keys=0 if name == DEFAULT_NAMESPACE else count(rows_in(ApiKeyTable)),
        states=session.scalar(select(func.count(StateTable.key.distinct())).where(gone)) or 0,
        tiers={
            tier: int(nbytes) for tier, nbytes in session.execute(sizes.group_by(StateTable.tier))
        },
    )
