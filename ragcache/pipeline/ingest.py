"""Ingestion: compare documents with stored ones; split, encode and store the changed.

`Ingestor` runs in its caller's thread, when its turn in the collection's queue comes.
`ragcache.pipeline.ingestion_jobs` runs it in the background.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ragcache.db import (
    Catalog,
    DocumentRow,
    Jobs,
    MovedDocument,
    NewDocument,
    NewModule,
    RunningJob,
    collection_target,
)
from ragcache.documents import (
    LoadedSources,
    SkippedFile,
    SourceDocument,
    SplitModule,
    split_document,
)
from ragcache.documents.split import SPLIT_VERSION
from ragcache.errors import ConfigurationError, DocumentError, DocumentsChanged
from ragcache.params import OpenConfig
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, portions
from ragcache.retrieval import Retriever
from ragcache.store import KVStore

_SHOWN = 3  # most collisions that an error lists
_ATTEMPTS = 3  # if others change the documents in the meantime

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` with numbers of encoded modules."""
Preparing = Callable[[str, int, int], None]
"""Called as `preparing(stage, done, total)`: `reading` in bytes, `splitting` in characters."""
Prepared = tuple[SourceDocument, list[SplitModule]]
"""A document and its modules."""


def check_collection(name: str) -> str:
    """Return the name of a collection. Raises `ConfigurationError` if it is blank."""
    if not name.strip():
        raise ConfigurationError("a collection needs a name")
    return name


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Summary of an ingestion."""

    collection: str
    """The collection that holds the documents."""
    added: int
    """Number of new documents."""
    updated: int
    """Number of documents that replaced another version."""
    unchanged: int
    """Number of documents that were stored already."""
    modules: int
    """Number of modules of the added and updated documents."""
    tokens: int
    """Number of tokens of these modules."""
    encoded: int
    """Number of states that were computed: of modules, and once for a collection's instruction of
    the preamble, which all prompts begin with."""
    skipped: tuple[SkippedFile, ...] = ()
    """Files that were not ingested, each with the reason."""
    omitted: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    """Descriptions of content that the documents omit, such as scanned pages, by id."""
    vanished: tuple[str, ...] = ()
    """Ids of documents of the same folders whose files no longer exist. They are still stored."""
    removed: tuple[str, ...] = ()
    """Ids of documents that `sync` removed."""
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    """New ids of documents that `sync` renamed, by their old ids."""

    @property
    def failed(self) -> tuple[SkippedFile, ...]:
        """Skipped files with content that could not be read: damaged, binary, or inaccessible."""
        return tuple(file for file in self.skipped if file.failed)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes that an ingestion makes to a collection."""

    documents: tuple[SourceDocument, ...]
    """All documents of the sources."""
    changed: tuple[SourceDocument, ...]
    """Documents to store."""
    known: Mapping[str, DocumentRow]
    """Stored documents, by id."""
    gone: tuple[str, ...] = ()
    """Ids of stored documents that the sources no longer hold."""
    moved: tuple[MovedDocument, ...] = ()
    """Stored documents whose content the sources hold under another id."""

    @property
    def unchanged(self) -> frozenset[str]:
        """Ids of documents that are stored already."""
        other = {each.id for each in self.changed} | {each.to for each in self.moved}
        return frozenset(each.id for each in self.documents) - other

    @property
    def renamed(self) -> dict[str, str]:
        """New ids of documents, by their earlier ones."""
        return {each.source_id: each.to for each in self.moved if each.source_id != each.to}

    def report(self, loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
        """Return the fields of an `Ingestion` that are not counts."""
        return {
            "skipped": tuple(loaded.skipped),
            "omitted": loaded.omitted,
            "vanished": () if sync else self.gone,
            "removed": self.gone if sync else (),
            "renamed": self.renamed,
        }


class EncodingTurns:
    """Turns in which ingestions encode a portion of modules. Thread-safe.

    `size` portions are encoded at a time. The next turn goes to the namespace that has waited
    longest since its last one, so that a long ingestion does not keep other namespaces waiting.
    """

    def __init__(self, size: int = 2) -> None:
        self._free = size
        self._waiting: list[tuple[str, object]] = []
        self._served: dict[str, int] = {}
        self._turns = 0
        self._changed = threading.Condition()

    @property
    def contended(self) -> bool:
        """Whether the next turn has to be waited for."""
        return self._free == 0 or bool(self._waiting)

    @contextmanager
    def turn(self, namespace: str) -> Iterator[None]:
        """Wait for a turn of a namespace, and take it for the block."""
        ticket = (namespace, object())
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._free and self._first() is ticket)
                self._free -= 1
                self._turns += 1
                self._served[namespace] = self._turns
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _first(self) -> tuple[str, object]:
        return min(self._waiting, key=lambda each: self._served.get(each[0], 0))


@dataclass(frozen=True, slots=True)
class Ingestor:
    """Stores documents with their modules, vectors and states."""

    catalog: Catalog
    store: KVStore
    encoder: ModuleEncoder
    retriever: Retriever
    config: OpenConfig
    turns: EncodingTurns

    def ingest(
        self,
        collection: str,
        loaded: LoadedSources,
        progress: Progress | None = None,
        *,
        sync: bool = False,
        preparing: Preparing | None = None,
    ) -> Ingestion:
        """Store documents by id, after the earlier jobs of the collection have ended.

        Args:
            collection: The collection, which is created if there is none.
            loaded: The documents.
            progress: Called with the number of encoded modules.
            sync: Remove documents that are gone, or rename them if their content has moved. Applies
                to the loaded folders or, without folders, to the whole collection.
            preparing: Called while documents are split.

        Raises:
            ConfigurationError: The collection's name is blank.
            DocumentError: Two files would be stored under one id.
            DocumentsChanged: As in `store_sources`.
            JobCanceled: The ingestion was canceled.
        """
        check_collection(collection)
        with self._jobs.turn(collection_target(collection)) as job:
            return self.store_sources(
                job, collection, loaded, progress, sync=sync, preparing=preparing
            )

    def store_sources(
        self,
        job: int,
        collection: str,
        loaded: LoadedSources,
        progress: Progress | None = None,
        *,
        sync: bool = False,
        preparing: Preparing | None = None,
    ) -> Ingestion:
        """Store documents as `ingest` does, for a job that is running.

        States are on disk before a row refers to them. Rows change in batches of
        `OpenConfig.batch_documents` documents, each in one transaction. The last one also removes
        and renames documents, and ends the job.

        Raises:
            DocumentError: Two files would be stored under one id.
            DocumentsChanged: In every attempt, others renamed or deleted a document to rename.
            JobCanceled: The job was canceled.
            JobTaken: Another process runs the job.
        """
        encoder = self.encoder.with_texts(self.catalog.collection_texts(collection))
        own = replace(self, encoder=encoder)
        attempt = partial(
            own._attempt, job, collection, loaded, progress, sync=sync, preparing=preparing
        )
        for _ in range(_ATTEMPTS - 1):
            with suppress(DocumentsChanged):
                return attempt()
        return attempt()

    @property
    def _jobs(self) -> Jobs:
        return self.store.jobs.within(self.catalog.namespace)

    def _attempt(
        self,
        job: int,
        collection: str,
        loaded: LoadedSources,
        progress: Progress | None,
        *,
        sync: bool,
        preparing: Preparing | None,
    ) -> Ingestion:
        changes = self._compare(collection, loaded, sync=sync)
        report = changes.report(loaded, sync=sync)
        prepared = self._prepare(job, changes.changed, preparing)
        modules = [module for _, each in prepared for module in each]
        self.check_window([module.token_ids for module in modules])
        skipped = [asdict(each) for each in loaded.skipped]
        self._jobs.describe(job, len(modules), {**report, "skipped": skipped})
        encoded, stores = 0, bool(prepared or report["removed"] or changes.moved)
        if stores:
            store = partial(self._store, collection, RunningJob(job, self._jobs.session))
            rows, encoded = self._encode(job, prepared, progress, partial(store, ends=False))
            store(rows, removed=report["removed"], moved=changes.moved)
        encoded += self._encode_lost(collection, changes.unchanged)
        if changes.unchanged:
            self.retriever.indexes.embed_missing(collection)
        if not stores:
            self._jobs.finish(job)
        updated = sum(d.id in changes.known for d in changes.changed)
        return Ingestion(
            collection,
            added=len(changes.changed) - updated,
            updated=updated,
            unchanged=len(changes.documents) - len(changes.changed) - len(changes.renamed),
            modules=len(modules),
            tokens=sum(len(each.token_ids) for each in modules),
            encoded=encoded,
            **report,
        )

    def _store(
        self,
        collection: str,
        job: RunningJob,
        rows: Sequence[NewDocument],
        *,
        removed: Sequence[str] = (),
        moved: Sequence[MovedDocument] = (),
        ends: bool = True,
    ) -> None:
        """Change the rows of a collection in one transaction, and let questions find the change."""
        job = job._replace(ends=ends)
        freed = self.catalog.replace_documents(
            collection, rows, removed=removed, moved=moved, job=job
        )
        self.store.discard(freed)
        self.retriever.indexes.update(collection)

    @property
    def _encodes(self) -> bool:
        """Whether states of modules are kept. The texts alone are, if they would not compose."""
        return self.encoder.model.causal.composes

    def _encode_lost(self, collection: str, documents: frozenset[str]) -> int:
        """Encode modules of these documents whose states were lost, and return how many.

        States are lost, for example, if a repair deleted damaged blobs. Skipped if the disk tier
        has a budget: the states may have been evicted.
        """
        if not (documents and self._encodes) or self.store.disk.budget_bytes is not None:
            return 0
        rows = [row for row in self.catalog.modules(collection) if row.document in documents]
        tokens = ModuleTokens(self.catalog, self.encoder.model).of(rows)
        lost = []
        for row, ids in zip(rows, tokens, strict=True):
            key = self.encoder.key(ids)
            if not self.store.memory.is_known(key):
                self.catalog.add_key(row.id, key)
                lost.append(ids)
        for part in portions(lost):
            with self.encoder.lease(part, origin="ingest"):
                pass
        return len(lost)

    def _compare(self, collection: str, loaded: LoadedSources, *, sync: bool) -> _Changes:
        """Compare the sources with the stored documents. Raises `DocumentError` on collisions."""
        ids = [d.id for d in loaded.documents]
        every = sync or loaded.files or loaded.folders
        known = self.catalog.documents(collection, None if every else ids)
        documents = loaded.documents if sync else _with_known_ids(loaded, known)
        if loaded.folders or not sync:  # else the files are all that the collection is to hold
            _check_collisions(loaded, documents, known)
        gone = {row.source_id: row for row in _gone(loaded, documents, known, sync=sync)}
        by_digest = {row.digest: row for row in gone.values()} if sync else {}
        changed, moved = [], []
        for document in documents:
            row, digest = known.get(document.id), self._digest(document)
            place = (document.id, document.uri, document.original)
            if row is not None and (row.digest, row.uri) == (digest, document.uri):
                if row.original != document.original:  # saved again with the same text
                    moved.append(MovedDocument(document.id, *place))
                continue
            source = by_digest.pop(digest, None) if row is None else None
            if source is None:
                changed.append(document)
            else:
                moved.append(MovedDocument(source.source_id, *place))
                del gone[source.source_id]
        return _Changes(tuple(documents), tuple(changed), known, tuple(gone), tuple(moved))

    def _prepare(
        self, job: int, documents: Sequence[SourceDocument], preparing: Preparing | None
    ) -> list[Prepared]:
        """Split documents into modules. Raises `JobCanceled` within a second of a cancellation."""
        total, done = sum(len(d.text) for d in documents), 0
        check_running = self._jobs.progress(job)

        def note(characters: int) -> None:
            nonlocal done
            done = min(done + characters, total)
            check_running(0)
            if preparing is not None:
                preparing("splitting", done, total)

        tokenize = self.encoder.model.encode_untrusted
        limit = self.encoder.model.causal.module_limit(self.config.module_tokens)
        return [(d, split_document(d, limit, tokenize, note)) for d in documents]

    def _encode(
        self,
        job: int,
        prepared: Sequence[Prepared],
        progress: Progress | None,
        store_batch: Callable[[Sequence[NewDocument]], None],
    ) -> tuple[list[NewDocument], int]:
        """Encode documents, and store all but the last batch of them.

        New states belong to the job. If it is interrupted, the next job of the collection finds
        them.

        Args:
            job: The job.
            prepared: The documents.
            progress: Called with the number of encoded modules.
            store_batch: Stores a batch of documents whose states are on disk. Not called for the
                last batch.

        Returns:
            The rows of the last batch, and the number of states that were computed.
        """
        done, encoded = 0, 0
        rows: list[NewDocument] = []
        began = time.monotonic()
        total = sum(len(modules) for _, modules in prepared)
        note = self._jobs.progress(job)
        with ExitStack() as writing:  # holds a lease whose blobs are written during the next one
            for document, modules in prepared:
                if self._is_batch(rows, time.monotonic() - began):
                    writing.close()
                    store_batch(rows)
                    rows, began = [], time.monotonic()
                wanted = [module.token_ids for module in modules] if self._encodes else []
                for part in portions(wanted):
                    encoded += self._encode_portion(job, part, writing)
                    done += len(part)
                    note(done)
                    if progress is not None:
                        progress(done, total)
                rows.append(self._row(document, modules))
        return rows, encoded

    def _encode_portion(
        self, job: int, modules: Sequence[Sequence[int]], writing: ExitStack
    ) -> int:
        """Encode some modules, and return the number of states that were computed.

        Args:
            job: The job.
            modules: Tokens of each module.
            writing: Holds the lease of the portion before, whose blobs may still be written, and
                then the lease of this portion.
        """
        self._jobs.expect(job, [self.encoder.key(ids) for ids in modules])
        if self.turns.contended:
            writing.close()
        with self.turns.turn(self.catalog.namespace):
            lease = self.encoder.lease(modules, origin="ingest")
        computed = sum(tier == "encoded" for tier in lease.source.values())
        before = writing.pop_all()
        writing.callback(lease.release)
        before.close()
        if not lease.is_writing:
            writing.close()
        return computed

    def _is_batch(self, rows: Sequence[NewDocument], seconds: float) -> bool:
        """Tell whether documents that took some seconds are to be stored before more follow."""
        config = self.config
        full = len(rows) >= config.batch_documents or seconds >= config.batch_seconds
        return full and bool(rows)

    def _digest(self, document: SourceDocument) -> str:
        """Return a digest of the text, the metadata and all settings of the splitter."""
        metadata = json.dumps(dict(document.metadata), sort_keys=True, default=str)
        size = str(self.encoder.model.causal.module_limit(self.config.module_tokens))
        parts = (document.digest, metadata, str(SPLIT_VERSION), size)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def check_window(self, modules: Sequence[Sequence[int]]) -> None:
        """Raise `ConfigurationError` if a module leaves no room for an answer."""
        window = self.encoder.model.causal.window
        taken = len(self.encoder.preamble_ids) + self.config.max_tokens
        longest = max(map(len, modules), default=0)
        if longest + taken >= window:
            raise ConfigurationError(
                f"a module takes {longest} tokens, but of the model's window of {window} preamble "
                f"and answer leave {window - taken}; give a smaller module_tokens"
            )

    def _row(self, document: SourceDocument, modules: Sequence[SplitModule]) -> NewDocument:
        vectors = self.retriever.indexes.embed_texts([module.text for module in modules])
        rows = []
        for number, module in enumerate(modules):
            name = f"{document.id}#{number + 1}"
            key = self.encoder.key(module.token_ids)
            vector = None if vectors is None else vectors[number]
            details = _storable(module.metadata)
            rows.append(
                NewModule(name, module.text, module.token_ids, key, vector, details, module.places)
            )
        return NewDocument(
            document.id,
            document.uri,
            self._digest(document),
            rows,
            document.metadata,
            document.text,
            document.original,
        )


def _storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as JSON values. Others, such as dates and paths, become text."""
    stored: dict[str, Any] = json.loads(json.dumps(dict(metadata), default=str))
    return stored


def _check_collisions(
    loaded: LoadedSources, documents: Sequence[SourceDocument], known: Mapping[str, DocumentRow]
) -> None:
    """Raise `DocumentError` for files with the id of another stored file.

    Two folders with files of the same name would replace each other's documents. The stored file
    must still exist, with another content.
    """
    pairs = []
    for given, each in zip(loaded.documents, documents, strict=True):
        other = _collides(each, known.get(each.id)) if given.id in loaded.files else None
        if other is not None:
            pairs.append(f"{_file_at(each.uri)} and {other} are both called {each.id!r}")
    if pairs:
        more = f" (and {len(pairs) - _SHOWN} more)" if len(pairs) > _SHOWN else ""
        raise DocumentError(
            f"{'; '.join(pairs[:_SHOWN])}{more}, and the second is stored; files are called by "
            "their paths within the folder. Ingest the folder above both, use another collection, "
            "or remove what is stored first. Nothing was ingested"
        )


def _collides(document: SourceDocument, stored: DocumentRow | None) -> Path | None:
    """Return the stored file that a document would replace, if it still exists and differs."""
    if stored is None or stored.uri == document.uri:
        return None
    if urlsplit(stored.uri).scheme != "file":
        return None
    this, other = _file_at(document.uri), _file_at(stored.uri)
    try:
        equal = this.samefile(other) or this.read_bytes() == other.read_bytes()
    except OSError:  # it was moved, or is on another machine
        return None
    return None if equal else other


def _with_known_ids(
    loaded: LoadedSources, known: Mapping[str, DocumentRow]
) -> tuple[SourceDocument, ...]:
    """Return the documents. A file that is stored under another id keeps its stored id."""
    ids = {document.id for document in loaded.documents}
    by_uri = {row.uri: row.source_id for row in known.values() if row.source_id not in ids}
    return tuple(
        replace(each, id=by_uri.pop(each.uri))
        if each.id in loaded.files and each.uri in by_uri and not _is_known(each, known)
        else each
        for each in loaded.documents
    )


def _gone(
    loaded: LoadedSources,
    documents: Sequence[SourceDocument],
    known: Mapping[str, DocumentRow],
    *,
    sync: bool,
) -> Iterator[DocumentRow]:
    """Yield the stored documents that the sources no longer hold.

    From folders: documents whose files do not exist or have another id now. Without folders, and
    with `sync`: all other documents, except documents of files that failed.
    """
    ids = loaded.present.union(document.id for document in documents)
    uris = {document.uri for document in documents if document.id in loaded.files}
    for row in known.values():
        if row.source_id in ids:
            continue
        if not loaded.folders:
            if sync:
                yield row
        elif any(row.uri.startswith(f"{folder.rstrip('/')}/") for folder in loaded.folders) and (
            row.uri in uris or _has_vanished(_file_at(row.uri))
        ):
            yield row


def _is_known(document: SourceDocument, known: Mapping[str, DocumentRow]) -> bool:
    """Tell whether a file is stored under the id of its document."""
    return document.id in known and known[document.id].uri == document.uri


def _file_at(uri: str) -> Path:
    """Return the file of a URI that `load_sources` made."""
    return Path(unquote(urlsplit(uri).path))


def _has_vanished(path: Path) -> bool:
    """Tell whether a file does not exist. A file that cannot be accessed counts as existing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
