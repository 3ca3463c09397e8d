"""The catalog: collections, documents and their modules.

The document is the unit of change: it is stored, replaced and deleted with everything that belongs
to it, in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from ragcache.db import jobs
from ragcache.db.collection_settings import CollectionSettings
from ragcache.db.database import Database, StaleCache, Unchanged
from ragcache.db.documents import (
    CollectionTexts,
    CollectionVersion,
    Contents,
    Deletion,
    DocumentRow,
    ModuleRow,
    MovedDocument,
    NewDocument,
    change_collection,
    delete_rows,
    insert_rows,
    modules_of,
    move_rows,
    new_collection,
    states_behind,
)
from ragcache.db.jobs import RunningJob
from ragcache.db.references import freed_states, retire
from ragcache.db.schemas import scaffolds_of
from ragcache.db.sql import (
    CHUNK,
    UNLESS_DELETED,
    collection_id,
    from_modules,
    in_collection,
    insert_for_module,
    insert_returning,
    lock_rows,
    rows_of,
)
from ragcache.db.summaries import lock_summaries, sum_up
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    DocumentTextTable,
    EncodingTable,
    JobTable,
    ModuleTable,
    NamespaceTable,
    ScaffoldTable,
    TokenTable,
)
from ragcache.errors import CollectionExists, DocumentError, UnknownCollection
from ragcache.states import KVKey

_REMEMBERED = 20_000  # modules whose token ids stay in memory
_VERSIONS = (
    select(CollectionTable.name, CollectionTable.id, CollectionTable.revision)
    .join(NamespaceTable)
    .where(NamespaceTable.name == bindparam("namespace"))
)
_VERSION = (
    select(
        CollectionTable.id,
        CollectionTable.revision,
        select(func.coalesce(func.max(ScaffoldTable.id), 0))
        .where(ScaffoldTable.collection_id == CollectionTable.id)
        .scalar_subquery(),
        CollectionTable.instruction,
        CollectionTable.priming,
        CollectionTable.calibrations,
        CollectionTable.similar,
    )
    .join(NamespaceTable)
    .where(
        NamespaceTable.name == bindparam("namespace"),
        CollectionTable.name == bindparam("collection"),
    )
)
"""The columns of `CollectionVersion`. Every question reads them, so the statement is built once."""


@dataclass(frozen=True, slots=True)
class CollectionContents:
    """All documents of a collection, and its settings."""

    documents: Iterable[NewDocument]
    texts: CollectionTexts
    calibrations: str | None
    """As in `CollectionVersion`."""
    description: str
    scaffolds: Mapping[KVKey, Sequence[str]]
    """Names of modules that were encoded together, by the key of their joint states."""
    similar: bool
    """As in `CollectionVersion`."""


class Catalog:
    """Rows of documents and modules in one namespace. Every method is one transaction."""

    def __init__(
        self,
        database: Database,
        tokenizer: str,
        embedder: str | None,
        namespace: str = DEFAULT_NAMESPACE,
        stale_seconds: float = 0.0,
        note: Callable[[Iterable[KVKey]], object] = lambda _keys: None,
    ) -> None:
        """Create the catalog of a namespace.

        Args:
            database: The database.
            tokenizer: Name under which token ids are stored.
            embedder: Name under which vectors are stored.
            namespace: The namespace.
            stale_seconds: Maximum age of versions while the ledger does not answer.
            note: Takes the keys of the states of stored and renamed documents after the commit:
                `Ledger.usage.note`, for the summaries of their modules.
        """
        self._note = note
        self._version = StaleCache[CollectionVersion](stale_seconds)
        self._versions = StaleCache[dict[str, tuple[int, int]]](stale_seconds)
        self._unchanged = Unchanged(database)
        self._database, self._tokenizer, self._embedder = database, tokenizer, embedder
        self.namespace = namespace
        self.settings = CollectionSettings(database, namespace)
        self._token_ids: dict[int, bytes] = {}  # int32 [tokens] by module; they never change

    @property
    def ledger_is_away(self) -> bool:
        """Whether the ledger did not answer the last question for a version."""
        asked = self._version, self._versions
        return max(each.failed for each in asked) > max(each.answered for each in asked)

    def collections(self) -> dict[str, int]:
        """Return the number of documents by collection."""
        statement = (
            select(CollectionTable.name, func.count(DocumentTable.id))
            .join(NamespaceTable)
            .outerjoin(DocumentTable)
            .where(NamespaceTable.name == self.namespace)
            .group_by(CollectionTable.name)
            .order_by(CollectionTable.name)
        )
        return dict(self._database.fetch(statement))

    def documents(
        self, collection: str, source_ids: Sequence[str] | None = None
    ) -> dict[str, DocumentRow]:
        """Read documents of a collection by source id. Reads all by default.

        An unknown collection has none.
        """
        modules = func.count(ModuleTable.id)
        rows = select(DocumentTable, modules).join(CollectionTable).outerjoin(ModuleTable)
        every = self._within(rows, collection).group_by(DocumentTable.id).order_by(DocumentTable.id)
        wanted = None if source_ids is None else dict.fromkeys(source_ids)
        with self._database.reading() as session:
            found = rows_of(session, every, DocumentTable.source_id, wanted)
            return {row.source_id: DocumentRow.of(row, count) for row, count in found}

    def replace_documents(
        self,
        collection: str,
        documents: Sequence[NewDocument],
        *,
        removed: Sequence[str] = (),
        moved: Sequence[MovedDocument] = (),
        job: RunningJob | None = None,
    ) -> list[KVKey]:
        """Store documents in one transaction. Replaces earlier documents of the same names.

        Args:
            collection: Collection to change. Created if it does not exist.
            documents: Documents to store.
            removed: Ids of documents to delete.
            moved: Documents to rename.
            job: Job that makes the change. Documents that were deleted since it was queued are left
                out.

        Returns:
            Keys of states without an owner. Their rows are deleted already.

        Raises:
            DocumentsChanged: A document to rename is gone, or its new name is taken.
            JobCanceled: The job was canceled.
            JobTaken: Another process runs the job.
        """
        with self._database.transaction() as session:
            owner = change_collection(session, self.namespace, collection)
            gone = frozenset() if job is None else jobs.deleted_meanwhile(session, job.id)
            stored = [each for each in documents if each.source_id not in gone]
            freed = delete_rows(session, owner, [*(each.source_id for each in stored), *removed])
            placed = move_rows(session, owner, [each for each in moved if each.to not in gone])
            for document in stored:
                insert_rows(session, owner, document, self._tokenizer, self._embedder)
                placed += document.keys
            if job is not None:
                freed += jobs.complete(session, job)
            retired = retire(session, freed)
        self._note(placed)
        return retired

    def fill_collection(
        self, collection: str, contents: CollectionContents, job: RunningJob, *, replaces: bool
    ) -> list[KVKey]:
        """Store all documents of a collection in one transaction, which ends a job.

        Args:
            collection: The collection, which is created if there is none.
            contents: Its documents and settings.
            job: Job that makes the change.
            replaces: Delete the documents of the collection first.

        Returns:
            Keys as `replace_documents` does.

        Raises:
            CollectionExists: The collection has documents, and `replaces` is not set.
            JobCanceled: The job was canceled.
            JobTaken: Another process runs the job.
        """
        with self._database.transaction() as session:
            owner = change_collection(session, self.namespace, collection)
            rows = select(DocumentTable.source_id).where(DocumentTable.collection_id == owner)
            names = list(session.scalars(rows))
            if names and not replaces:
                raise CollectionExists.with_documents(collection, len(names))
            freed = delete_rows(session, owner, names)
            changed = update(CollectionTable).where(CollectionTable.id == owner)
            settings = {
                **contents.texts._asdict(),
                "calibrations": contents.calibrations,
                "description": contents.description,
                "similar": contents.similar,
            }
            session.execute(changed.values(settings))
            placed: list[KVKey] = []
            for document in contents.documents:
                insert_rows(session, owner, document, self._tokenizer, self._embedder)
                placed += document.keys
            for key, scaffold in contents.scaffolds.items():
                own = from_modules(ModuleTable.name, ModuleTable.id)
                named = own.where(DocumentTable.collection_id == owner)
                found = rows_of(session, named, ModuleTable.name, set(scaffold))
                ids = {row.name: row.id for row in found}
                members = [ids[name] for name in scaffold]
                session.add(ScaffoldTable(collection_id=owner, key=key, members=members))
            freed += jobs.complete(session, job)
            retired = retire(session, freed)
        self._note(placed)
        return retired

    def modules(self, collection: str, names: Sequence[str] | None = None) -> list[ModuleRow]:
        """Read modules of a collection. Raises `UnknownCollection`.

        Reads all by default, in the order of ids, or the named ones in the order of the names.
        Unknown names are left out.
        """
        with self._database.reading() as session:
            collection_id(session, collection, self.namespace)
            wanted = None if names is None else dict.fromkeys(names)
            rows = self._rows(session, collection, ModuleTable.name, wanted)
        if names is None:
            return rows
        found = {row.name: row for row in rows}
        return [found[name] for name in names if name in found]

    def reread_modules(self, collection: str, known: Mapping[int, ModuleRow]) -> Contents:
        """Read the version and all modules of a collection, the known ones first, in their order.

        Known modules are read again only if their document was renamed: nothing else of a module
        changes, and ids are not used again. The token ids of a few new modules are read as well,
        since questions ask for them next. Raises `UnknownCollection`.
        """
        with self._database.reading() as session:
            version = self._version_of(session, collection)
            return self._contents(session, collection, version, known)

    def _contents(
        self,
        session: Session,
        collection: str,
        version: CollectionVersion,
        known: Mapping[int, ModuleRow],
    ) -> Contents:
        if not known:
            kept, new = [], self._rows(session, collection)
        else:
            columns = (ModuleTable.id, DocumentTable.source_id, DocumentTable.uri)
            every = self._within(from_modules(*columns), collection)
            named = {each[0]: each[1:] for each in session.connection().execute(every).all()}
            same = {
                number
                for number, row in known.items()
                if named.get(number) == (row.document, row.uri)
            }
            rows = self._rows(session, collection, ModuleTable.id, named.keys() - same)
            read = {row.id: row for row in rows}
            kept = [read.pop(n, row) for n, row in known.items() if n in named]
            new = [read[number] for number in sorted(read)]
        if len(new) <= CHUNK:
            self._read_tokens(session, [row.id for row in new])
        return Contents(version, kept + new)

    def _rows(
        self,
        session: Session,
        collection: str,
        column: Any = ModuleTable.id,
        values: Iterable[object] | None = None,
    ) -> list[ModuleRow]:
        """Return all modules of a collection, or the modules whose column has one of the values."""
        every = self._within(from_modules(ModuleTable, DocumentTable), collection)
        every = every.order_by(ModuleTable.id)
        return [
            ModuleRow(m.id, m.name, d.source_id, d.uri, m.text, d.attributes, m.details, m.places)
            for m, d in rows_of(session, every, column, values)
        ]

    def texts(self, collection: str, source_ids: Sequence[str]) -> dict[str, str]:
        """Return the texts of documents by source id. Raises `UnknownCollection`.

        Unknown documents are left out.
        """
        rows = select(DocumentTable.source_id, DocumentTextTable.text)
        every = self._within(rows.join(DocumentTextTable).join(CollectionTable), collection)
        with self._database.reading() as session:
            collection_id(session, collection, self.namespace)
            wanted = dict.fromkeys(source_ids)
            return dict(iter(rows_of(session, every, DocumentTable.source_id, wanted)))

    def pages(self, collection: str, source_id: str) -> dict[int, int]:
        """Return where the pages of a document begin. Raises `UnknownCollection`.

        Returns:
            The first character in the document's text by page or slide. Empty for a document
            without pages and for an unknown one.
        """
        with self._database.reading() as session:
            collection_id(session, collection, self.namespace)
            rows = self._rows(session, collection, DocumentTable.source_id, [source_id])
        found: dict[int, int] = {}
        for row in rows:
            if row.page is not None and row.places:
                found.setdefault(row.page, row.places[0][1] - row.places[0][0])
        return {page: max(0, start) for page, start in sorted(found.items())}

    def token_ids(self, module_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the token ids of modules under this catalog's tokenizer, where stored."""
        remembered = self._token_ids.get  # another thread may clear them
        known = {n: ids for n in module_ids if (ids := remembered(n)) is not None}
        missing = [number for number in module_ids if number not in known]
        if missing:
            with self._database.reading() as session:
                known |= self._read_tokens(session, missing)
        return {n: tuple(np.frombuffer(ids, dtype="<i4").tolist()) for n, ids in known.items()}

    def _read_tokens(self, session: Session, module_ids: Sequence[int]) -> dict[int, bytes]:
        statement = select(TokenTable.module_id, TokenTable.token_ids).where(
            TokenTable.tokenizer == self._tokenizer, TokenTable.module_id.in_(module_ids)
        )
        found = {row.module_id: row.token_ids for row in session.execute(statement)}
        if len(self._token_ids) + len(found) > _REMEMBERED:
            self._token_ids.clear()
        self._token_ids.update(found)
        return found

    def version(self, collection: str) -> CollectionVersion:
        """Return the version of a collection. Raises `UnknownCollection`."""
        read = partial(self._read_version, collection)
        unchanged = partial(self._unchanged.read, ("version", collection), read)
        return self._version.read(collection, unchanged)

    def version_and_changes(
        self, collection: str, before: CollectionVersion, known: Mapping[int, ModuleRow]
    ) -> tuple[CollectionVersion, Contents | None]:
        """Read the version of a collection in one snapshot with its contents, if it has changed.

        Args:
            collection: The collection.
            before: Version to compare with.
            known: Modules at that version, by id; see `reread_modules`.

        Raises:
            UnknownCollection: There is no such collection.
        """
        changes: list[Contents] = []

        def read() -> CollectionVersion:
            with self._database.reading() as session:
                version = self._version_of(session, collection)
                if not before.covers(version):
                    changes.append(self._contents(session, collection, version, known))
                return version

        version = self._version.read(collection, read)
        return version, changes[0] if changes else None

    def _read_version(self, collection: str) -> CollectionVersion:
        with self._database.reading() as session:
            return self._version_of(session, collection)

    def _version_of(self, session: Session, collection: str) -> CollectionVersion:
        names = {"namespace": self.namespace, "collection": collection}
        found = session.execute(_VERSION, names).one_or_none()
        if found is None:
            collection_id(session, collection, self.namespace)
            raise AssertionError("the collection appeared within one snapshot")
        return CollectionVersion(*found)

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return the id and the revision of each collection, by name."""
        unchanged = partial(self._unchanged.read, "versions", self._read_versions)
        return self._versions.read("", unchanged)

    def _read_versions(self) -> dict[str, tuple[int, int]]:
        rows = self._database.fetch_values(_VERSIONS, namespace=self.namespace)
        return {name: (number, revision) for name, number, revision in rows}

    def add_tokens(self, module_id: int, token_ids: Sequence[int]) -> None:
        """Store token ids of a module that was ingested with another tokenizer."""
        tokens = np.asarray(token_ids, dtype="<i4").tobytes()
        values = {"tokenizer": self._tokenizer, "token_ids": tokens}
        with self._database.transaction() as session:
            insert_for_module(session, TokenTable, module_id, **values)

    def add_key(self, module_id: int, key: KVKey, behind: int | None = None) -> None:
        """Record that states belong to a module, unless it was deleted.

        Args:
            module_id: Id of the module.
            key: Key of the states.
            behind: Id of the other module that the states were encoded behind. Nothing is recorded
                if this module was deleted.
        """
        with self._database.transaction() as session:
            lock_summaries(session)
            if behind is not None:
                there = select(ModuleTable.id).where(ModuleTable.id == behind)
                if session.scalar(there.with_for_update(**UNLESS_DELETED)) is None:
                    return
            insert_for_module(session, EncodingTable, module_id, key=key, behind_id=behind)
            sum_up(session, [key])

    def companions(self, module_ids: Sequence[int]) -> dict[int, int]:
        """Return by id the other module that states of each module were encoded behind.

        Modules without such states are left out.
        """
        rows = select(EncodingTable.module_id, func.min(EncodingTable.behind_id).label("behind"))
        chosen = rows.where(EncodingTable.behind_id.is_not(None)).group_by(EncodingTable.module_id)
        with self._database.reading() as session:
            found = rows_of(session, chosen, EncodingTable.module_id, module_ids)
            return {row.module_id: row.behind for row in found}

    def keys(
        self,
        collection: str,
        source_ids: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[KVKey, int]:
        """Read the keys of states of modules, each with the id of one module that has it.

        Reads all modules of the collection, or the modules of the given documents and names. Raises
        `UnknownCollection`.
        """
        columns = from_modules(EncodingTable.key, ModuleTable.id)
        statement = self._within(columns.join(EncodingTable), collection)
        if source_ids is not None:
            statement = statement.where(DocumentTable.source_id.in_(source_ids))
        if names is not None:
            statement = statement.where(ModuleTable.name.in_(names))
        with self._database.reading() as session:
            collection_id(session, collection, self.namespace)
            return dict(
                iter(session.execute(statement))
            )  # dict() would call the `keys` of a result

    def delete_documents(self, collection: str, source_ids: Sequence[str]) -> list[KVKey]:
        """Delete documents and everything that belongs to them.

        Open jobs will not store them either. Returns keys as `replace_documents` does. Raises
        `UnknownCollection`.
        """
        with self._database.transaction() as session:
            collection_id(session, collection, self.namespace)
            owner = change_collection(session, self.namespace, collection)
            target = jobs.collection_target(collection)
            freed = delete_rows(session, owner, source_ids)
            jobs.note_deleted(session, self.namespace, target, source_ids)
            return retire(session, freed)

    def add_collection(self, collection: str, description: str = "") -> bool:
        """Create a collection without documents. Returns whether it is new."""
        with self._database.transaction() as session:
            row = new_collection(session, self.namespace, collection) | {"description": description}
            return insert_returning(session, CollectionTable, row) is not None

    def collection_texts(self, collection: str) -> CollectionTexts:
        """Return the texts that a collection's modules see, as far as it has some of its own."""
        try:
            return self.version(collection).texts
        except UnknownCollection:
            return CollectionTexts()

    def delete_collection(self, collection: str) -> tuple[int, list[KVKey]]:
        """Delete a collection and everything that belongs to it, and cancel its open jobs.

        A collection that its first job has yet to create has no documents.

        Returns the number of its documents, and keys as `replace_documents` does. Raises
        `UnknownCollection`.
        """
        its_jobs = (
            JobTable.namespace == self.namespace,
            JobTable.target == jobs.collection_target(collection),
        )
        with self._database.transaction() as session:
            try:
                owner = collection_id(session, collection, self.namespace)
            except UnknownCollection:
                if jobs.cancel_jobs(session, *its_jobs):
                    return 0, []
                raise
            own = CollectionTable.id == owner
            lock_rows(session, CollectionTable, own)
            rows = select(DocumentTable.source_id).where(DocumentTable.collection_id == owner)
            names = list(session.scalars(rows))
            freed = delete_rows(session, owner, names)
            session.execute(delete(CollectionTable).where(own))
            jobs.cancel_jobs(session, *its_jobs)
            return len(names), retire(session, freed)

    def state_keys(self, collection: str, source_ids: Sequence[str] | None) -> list[KVKey]:
        """Return the keys of documents' states, by default of the whole collection.

        Raises `UnknownCollection`.
        """
        with self._database.reading() as session:
            owner = collection_id(session, collection, self.namespace)
            rows = select(DocumentTable.source_id).where(DocumentTable.collection_id == owner)
            names = list(session.scalars(rows)) if source_ids is None else source_ids
            return modules_of(session, owner, names)[1]

    def preview_deletion(self, collection: str, source_ids: Sequence[str] | None) -> Deletion:
        """Count the documents, modules and states that a deletion would remove.

        Counts the whole collection by default. Unknown ids count nothing. Raises
        `UnknownCollection`.
        """
        with self._database.reading() as session:
            owner = collection_id(session, collection, self.namespace)
            rows = select(DocumentTable.source_id).where(DocumentTable.collection_id == owner)
            known = set(session.scalars(rows))
            names = sorted(known if source_ids is None else known.intersection(source_ids))
            modules, keys = modules_of(session, owner, names)
            keys += [key for _, key in states_behind(session, modules)]
            scaffolds = scaffolds_of(session, owner, modules)
            keys += [row.key for row in scaffolds]
            freed = freed_states(session, keys, modules, {row.id for row in scaffolds})
        return Deletion(len(names), len(modules), *freed)

    def rename_document(self, collection: str, source_id: str, to: str) -> None:
        """Change the id of a document, without encoding anything.

        Raises:
            UnknownCollection: There is no such collection.
            DocumentError: There is no such document, or the new id is taken.
        """
        with self._database.transaction() as session:
            collection_id(session, collection, self.namespace)
            owner = change_collection(session, self.namespace, collection)
            rows = select(DocumentTable).where(DocumentTable.collection_id == owner)
            row = session.scalar(rows.where(DocumentTable.source_id == source_id))
            if row is None:
                raise DocumentError(f"the collection {collection!r} holds no {source_id!r}")
            if session.scalar(rows.where(DocumentTable.source_id == to)) is not None:
                raise DocumentError(f"the collection {collection!r} holds a {to!r} already")
            moved = MovedDocument(source_id, to, row.uri, row.original)
            renamed = move_rows(session, owner, [moved])
        self._note(renamed)

    def _within(self, statement: Any, collection: str) -> Any:
        return in_collection(statement, self.namespace, collection)
