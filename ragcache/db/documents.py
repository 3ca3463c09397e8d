"""Documents and modules as rows, and the versions of the collections that they make up.

The functions run in the transaction of a `Catalog`. `owner` is the id of a collection.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from ragcache.db.schemas import delete_scaffolds
from ragcache.db.sql import chunks, insert_new, lock_rows, namespace_id, rows_of
from ragcache.db.summaries import insert_summaries, lock_summaries, rename_summaries, sum_up
from ragcache.db.tables import (
    CollectionTable,
    DocumentTable,
    DocumentTextTable,
    EncodingTable,
    ModuleTable,
    OriginalTable,
    TokenTable,
    VectorTable,
)
from ragcache.errors import DocumentsChanged
from ragcache.states import KVKey

_EPOCHS = 1 << 31
EPOCH = 1 << 22
"""A collection's revisions start at a random multiple of this."""


class CollectionTexts(NamedTuple):
    """Texts that a collection's modules see when they are encoded."""

    instruction: str | None = None
    """Instruction of its prompts. Defaults to the folder's instruction."""
    priming: str | None = None
    """Text in front of modules in later places. Defaults to the built-in one."""


class CollectionVersion(NamedTuple):
    """Version of a collection. Every change of the collection changes it."""

    collection: int
    """Id of the collection."""
    revision: int
    scaffold: int = 0
    """Id of the newest scaffold. 0 without one."""
    instruction: str | None = None
    """As in `CollectionTexts`."""
    priming: str | None = None
    """As in `CollectionTexts`."""
    calibrations: str | None = None
    """Calibrations of its answers, as `ragcache.answers.confidence` writes them."""
    similar: bool = False
    """Whether modules in later places see the most similar other module before them."""

    @property
    def texts(self) -> CollectionTexts:
        """Texts that its modules see when they are encoded."""
        return CollectionTexts(self.instruction, self.priming)

    def covers(self, other: CollectionVersion) -> bool:
        """Whether documents at this version are at least as new as at another version.

        Revisions are only compared within an epoch: ids of deleted collections are used again.
        """
        mine, its = self.revision, other.revision
        same = self.collection == other.collection and mine // EPOCH == its // EPOCH
        return same and mine >= its


@dataclass(frozen=True, slots=True)
class NewModule:
    """A nested module to store."""

    name: str
    text: str
    token_ids: Sequence[int]
    key: KVKey
    """Key of its states."""
    vector: np.ndarray | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the module itself."""
    places: Sequence[tuple[int, int]] = ()
    """Positions of runs of its text, as pairs of characters: in the module, in the document."""
    other_keys: Sequence[KVKey] = ()
    """Keys of its states under other encodings."""


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to store, which replaces an earlier one of the same `source_id`."""

    source_id: str
    uri: str
    digest: str
    modules: Sequence[NewModule]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """Whole text of the document. Its modules may repeat headings and leave out space."""
    original: str = ""
    """Digest of the file that it was read from, as in `SourceDocument`."""

    @property
    def keys(self) -> Iterator[KVKey]:
        """Keys of the states of its modules."""
        for module in self.modules:
            yield module.key
            yield from module.other_keys


@dataclass(frozen=True, slots=True)
class MovedDocument:
    """A stored document of unchanged text that gets another id, address or original."""

    source_id: str
    to: str
    uri: str
    original: str = ""
    """As in `NewDocument`."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Numbers of documents, modules and states that a deletion removes."""

    documents: int
    modules: int
    states: int
    """Number of states that nothing else needs."""
    tiers: Mapping[str, int]
    """Bytes of these states by tier, on all machines."""

    @property
    def nbytes(self) -> int:
        """Bytes in all tiers."""
        return sum(self.tiers.values())


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A stored document."""

    id: int
    source_id: str
    uri: str
    digest: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Metadata of the document."""
    modules: int = 0
    """Number of its modules."""
    original: str = ""
    """As in `NewDocument`."""

    @classmethod
    def of(cls, row: DocumentTable, modules: int) -> DocumentRow:
        facts = (row.id, row.source_id, row.uri, row.digest, row.attributes)
        return cls(*facts, modules, row.original)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A stored module, with the name, address and metadata of its document."""

    id: int
    name: str
    document: str
    uri: str
    text: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Metadata of the document."""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Metadata of the module itself, such as its page and the headings above it."""
    places: Sequence[tuple[int, int]] = field(default=(), hash=False)
    """Positions of runs of its text, as pairs of characters: in the module, in the document."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the module and of its document, for filters."""
        return {**self.attributes, **self.details}

    @property
    def page(self) -> int | None:
        """Page or slide that the module is from, if its document has any."""
        page = self.metadata.get("page")
        return page if isinstance(page, int) else None

    @property
    def headings(self) -> tuple[str, ...]:
        """Titles above the module, outermost first."""
        headings = self.details.get("headings", ())  # a loader's metadata may use this name, too
        return tuple(map(str, headings)) if isinstance(headings, list) else ()


@dataclass(frozen=True, slots=True)
class Contents:
    """The modules of a collection at a version."""

    version: CollectionVersion
    modules: Sequence[ModuleRow]


def change_collection(session: Session, namespace: str, name: str) -> int:
    """Raise the revision of a collection, created if need be, and return its id.

    Writers of one collection wait for each other here.
    """
    row = new_collection(session, namespace, name)
    own = CollectionTable.namespace_id == row["namespace_id"]
    raised = update(CollectionTable).where(own, CollectionTable.name == name)
    raised = raised.values(revision=CollectionTable.revision + 1)
    number: int | None = None
    while number is None:  # a deletion may come between the statements
        insert_new(session, CollectionTable, row)
        number = session.scalar(raised.returning(CollectionTable.id))
    return number


def new_collection(session: Session, namespace: str, name: str) -> dict[str, Any]:
    """Return the row of a new collection, whose revisions begin at a random epoch.

    Ids of deleted collections are used again. The epoch keeps versions from repeating.
    """
    owner = namespace_id(session, namespace)
    revision = secrets.randbelow(_EPOCHS) * EPOCH
    return {"name": name, "namespace_id": owner, "revision": revision}


def insert_rows(
    session: Session, owner: int, document: NewDocument, tokenizer: str, embedder: str | None
) -> None:
    """Store a document whose name is free in the collection."""
    row = DocumentTable(
        collection_id=owner,
        source_id=document.source_id,
        uri=document.uri,
        digest=document.digest,
        attributes=dict(document.attributes),
        original=document.original,
    )
    session.add(row)
    session.flush()
    session.add(DocumentTextTable(document_id=row.id, text=document.text))
    modules = [
        ModuleTable(
            document_id=row.id,
            ordinal=number,
            name=module.name,
            text=module.text,
            details=dict(module.details),
            places=list(module.places),
        )
        for number, module in enumerate(document.modules)
    ]
    session.add_all(modules)
    session.flush()
    for stored, module in zip(modules, document.modules, strict=True):
        tokens = np.asarray(module.token_ids, dtype="<i4").tobytes()
        session.add(TokenTable(module_id=stored.id, tokenizer=tokenizer, token_ids=tokens))
        for key in (module.key, *module.other_keys):
            session.add(EncodingTable(module_id=stored.id, key=key))
        if module.vector is not None and embedder is not None:
            vector = module.vector.astype("<f4").tobytes()
            session.add(VectorTable(module_id=stored.id, embedder=embedder, vector=vector))
    session.flush()
    insert_summaries(session, owner, row.id)


def move_rows(session: Session, owner: int, moved: Sequence[MovedDocument]) -> list[KVKey]:
    """Rename documents of a collection. Two documents may swap names.

    Returns:
        Keys of the states of renamed modules.

    Raises:
        DocumentsChanged: A document is gone, or its new name is taken.
    """
    found: list[tuple[DocumentTable, MovedDocument]] = []
    own = select(DocumentTable).where(DocumentTable.collection_id == owner)
    for each in moved:
        row = session.scalar(own.where(DocumentTable.source_id == each.source_id))
        if row is None:
            raise DocumentsChanged(
                f"the document {each.source_id!r} was removed meanwhile; try again"
            )
        row.source_id = f"\x1f{row.id}"
        found.append((row, each))
    session.flush()
    for (taken,) in rows_of(session, own, DocumentTable.source_id, [each.to for each in moved]):
        raise DocumentsChanged(f"a document {taken.source_id!r} was stored meanwhile; try again")
    keys: list[KVKey] = []
    for row, each in found:
        if row.original != each.original:
            session.execute(delete(OriginalTable).where(OriginalTable.document_id == row.id))
        row.source_id, row.uri, row.original = each.to, each.uri, each.original
        if each.to == each.source_id:
            continue  # the names of its modules stay, too
        modules = select(ModuleTable).where(ModuleTable.document_id == row.id)
        for module in session.scalars(modules):
            module.name = f"{each.to}#{module.ordinal + 1}"
        session.flush()
        rename_summaries(session, row.id)
        own_keys = select(EncodingTable.key).join(ModuleTable)
        keys += session.scalars(own_keys.where(ModuleTable.document_id == row.id))
    return keys


def delete_rows(session: Session, owner: int, source_ids: Sequence[str]) -> list[KVKey]:
    """Delete documents of a collection. Returns the keys of states that belonged to them.

    The caller holds the row of the collection. The modules are locked before their states are read,
    so that no others come to them or behind them. Whoever holds the lock of `lock_summaries` waits
    for no module.
    """
    own = DocumentTable.collection_id == owner
    for chunk in chunks(source_ids):
        leaving = select(DocumentTable.id).where(own, DocumentTable.source_id.in_(chunk))
        lock_rows(session, ModuleTable, ModuleTable.document_id.in_(leaving))
    modules, found = modules_of(session, owner, source_ids)
    behind = states_behind(session, modules)
    for chunk in chunks(source_ids):
        session.execute(delete(DocumentTable).where(own, DocumentTable.source_id.in_(chunk)))
    if changed := {module for module, _ in behind} - modules:
        lock_summaries(session)
    for gone in chunks(modules if changed else ()):
        session.execute(delete(EncodingTable).where(EncodingTable.behind_id.in_(gone)))
    for some in chunks(changed):
        left = select(EncodingTable.key).where(EncodingTable.module_id.in_(some))
        sum_up(session, map(KVKey, session.scalars(left)))
    found += [key for _, key in behind]
    return found + delete_scaffolds(session, owner, modules)


def states_behind(session: Session, modules: Iterable[int]) -> list[tuple[int, KVKey]]:
    """Return the owner and the key of states that were encoded behind these modules."""
    rows = select(EncodingTable.module_id, EncodingTable.key)
    found = rows_of(session, rows, EncodingTable.behind_id, sorted(modules))
    return [(row.module_id, row.key) for row in found]


def modules_of(
    session: Session, owner: int, source_ids: Sequence[str]
) -> tuple[set[int], list[KVKey]]:
    """Return the ids of the modules of documents, and the keys of their states."""
    encodings = (
        select(ModuleTable.id, EncodingTable.key)
        .join(DocumentTable, DocumentTable.id == ModuleTable.document_id)
        .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
        .where(DocumentTable.collection_id == owner)
    )
    found = list(rows_of(session, encodings, DocumentTable.source_id, source_ids))
    return {row.id for row in found}, [row.key for row in found if row.key is not None]
