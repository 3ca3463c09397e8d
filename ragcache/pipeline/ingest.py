"""Ingestion: load, split, encode, and store documents; at once or in the background.

`Ingestor` does the work in its caller's thread. `IngestionJobs` queues it for the one thread of
`IngestionWorker`, and the ledger keeps the state and the documents of every job, so that another
process goes on with it where this one ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ragcache.config import RagCacheConfig
from ragcache.db import (
    AdoptedJob,
    Catalog,
    DocumentRow,
    JobDocument,
    JobRow,
    Jobs,
    MovedDocument,
    NewDocument,
    NewModule,
    Page,
    StoringRequest,
    WaitingDocuments,
    collection_target,
)
from ragcache.documents import (
    DocumentPart,
    LoadedSources,
    SkippedFile,
    SourceDocument,
    SplitModule,
    load_sources,
    split_document,
)
from ragcache.documents.source import DocumentSource
from ragcache.documents.split import SPLIT_VERSION
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    InvalidRequest,
    JobTaken,
    QueueFull,
    RagCacheError,
)
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, portions
from ragcache.retrieval import Retriever
from ragcache.store import KVStore, Lease

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Preparing = Callable[[str, int, int], None]
"""Called with a stage (`reading` bytes, `splitting` characters), what is done, and the total."""
Prepared = tuple[SourceDocument, list[SplitModule]]

MAX_JOBS = 256  # queued and running
_MAX_KEY_LENGTH = 255
_POLL_SECONDS = 0.5  # between two looks at a job of another process


def check_collection(name: str) -> str:
    """The name, unless it is blank. Raises `ConfigurationError`."""
    if not name.strip():
        raise ConfigurationError("a collection needs a name")
    return name


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Summary of an ingestion.

    Attributes:
        collection: The collection that holds the documents.
        added: Documents that were new.
        updated: Documents that replaced another version.
        unchanged: Documents that cost nothing.
        modules: Modules of the added and updated documents.
        tokens: Tokens of these modules.
        encoded: Module states that were computed.
        skipped: Files that were not ingested, each with the reason.
        vanished: Documents of the same folders whose files are gone; they are still stored.
        removed: Documents that `sync` removed.
        renamed: Documents that `sync` renamed, with their new ids.
    """

    collection: str
    added: int
    updated: int
    unchanged: int
    modules: int
    tokens: int
    encoded: int
    skipped: tuple[SkippedFile, ...] = ()
    vanished: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def failed(self) -> tuple[SkippedFile, ...]:
        """The skipped files that should have been ingested: damaged, binary or not accessible."""
        return tuple(file for file in self.skipped if file.failed)


@dataclass(frozen=True, slots=True)
class _Changes:
    """What an ingestion does to a collection. gone: documents whose files are gone; moved: those
    of them whose content has come back under another name."""

    documents: tuple[SourceDocument, ...]
    changed: tuple[SourceDocument, ...]
    known: Mapping[str, DocumentRow]
    gone: tuple[str, ...] = ()
    moved: tuple[MovedDocument, ...] = ()

    def request(self, loaded: LoadedSources, *, queued: bool, sync: bool) -> StoringRequest:
        """The request, with the ids under which its documents are stored."""
        pairs = zip(self.documents, loaded.documents, strict=True)
        ids = {stored.id: given.id for stored, given in pairs}
        return StoringRequest(ids, queued, sync and not loaded.folders)

    @property
    def unchanged(self) -> frozenset[str]:
        """Documents that are stored as they are."""
        other = {each.id for each in self.changed} | {each.to for each in self.moved}
        return frozenset(each.id for each in self.documents) - other

    def report(self, loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
        """The fields of an `Ingestion` that are not counts."""
        return {
            "skipped": tuple(loaded.skipped),
            "vanished": () if sync else self.gone,
            "removed": self.gone if sync else (),
            "renamed": {each.source_id: each.to for each in self.moved},
        }


@dataclass(frozen=True, slots=True)
class Ingestor:
    """Stores documents with their modules, vectors and states."""

    catalog: Catalog
    store: KVStore
    encoder: ModuleEncoder
    retriever: Retriever
    config: RagCacheConfig

    def ingest(
        self, collection: str, loaded: LoadedSources, progress: Progress | None = None,
        job: int | None = None, *, sync: bool = False, preparing: Preparing | None = None,
    ) -> Ingestion:  # fmt: skip
        """Upserts documents by id. States are on disk before a row refers to them, and all rows
        change in one transaction: no answer mixes old and new. job: the queued job that this call
        runs; its caller ends it. sync: whether documents that are gone are removed, or renamed
        where their content has moved; of the loaded folders, or of the whole collection."""
        check_collection(collection)
        changes = self._compare(collection, loaded, sync=sync)
        report = changes.report(loaded, sync=sync)
        if job is not None:
            jobs = self.store.jobs.within(self.catalog.namespace)
            jobs.note_report(job, {**report, "skipped": [asdict(each) for each in loaded.skipped]})
        prepared = self._prepare(changes.changed, preparing)
        self._check_window([module.token_ids for _, modules in prepared for module in modules])
        removed = report["removed"]
        stores = prepared or removed or changes.moved
        request = changes.request(loaded, queued=job is not None, sync=sync)
        encoded = 0
        if stores:
            encoded = self._store(
                collection, prepared, progress, job, removed, changes.moved, request
            )
        elif job is None:
            self.catalog.supersede(collection, request)
        encoded += self._encode_lost(collection, changes.unchanged)
        updated = sum(d.id in changes.known for d in changes.changed)
        return Ingestion(
            collection,
            added=len(changes.changed) - updated,
            updated=updated,
            unchanged=len(changes.documents) - len(changes.changed) - len(changes.moved),
            modules=sum(len(modules) for _, modules in prepared),
            tokens=sum(len(each.token_ids) for _, modules in prepared for each in modules),
            encoded=encoded,
            **report,
        )

    def _encode_lost(self, collection: str, documents: frozenset[str]) -> int:
        """Encodes modules of these documents whose states no tier has any more, as after a repair;
        returns how many. Not where the disk has a budget: there they may have been evicted."""
        if not documents or self.store.disk.budget_bytes is not None:
            return 0
        rows = [row for row in self.catalog.modules(collection) if row.document in documents]
        tokens = ModuleTokens(self.catalog, self.encoder.model).of(rows)
        keys = [self.encoder.key(ids, "rooted") for ids in tokens]
        held = [any(key in index.entries for index in self.store.memory.every) for key in keys]
        for row, key, is_held in zip(rows, keys, held, strict=True):
            if not is_held:
                self.catalog.add_key(row.id, key)
        lost = [ids for ids, is_held in zip(tokens, held, strict=True) if not is_held]
        for part in portions(lost):
            with self.encoder.lease(part, "rooted", "ingest"):
                pass
        return len(lost)

    def _compare(self, collection: str, loaded: LoadedSources, *, sync: bool) -> _Changes:
        """What differs from what is stored."""
        ids = [d.id for d in loaded.documents]
        every = sync or loaded.files or loaded.folders
        known = self.catalog.documents(collection, None if every else ids)
        documents = loaded.documents if sync else _with_known_ids(loaded, known)
        gone = {row.source_id: row for row in _gone(loaded, documents, known, sync=sync)}
        by_digest = {row.digest: row for row in gone.values()} if sync else {}
        changed, moved = [], []
        for document in documents:
            row, digest = known.get(document.id), self._digest(document)
            if row is not None and (row.digest, row.uri) == (digest, document.uri):
                continue
            source = by_digest.pop(digest, None) if row is None else None
            if source is None:
                changed.append(document)
            else:
                moved.append(MovedDocument(source.source_id, document.id, document.uri))
                del gone[source.source_id]
        return _Changes(tuple(documents), tuple(changed), known, tuple(gone), tuple(moved))

    def _prepare(
        self, documents: Sequence[SourceDocument], preparing: Preparing | None
    ) -> list[Prepared]:
        """Splits documents."""
        total, done = sum(len(d.text) for d in documents), 0

        def note(characters: int) -> None:
            nonlocal done
            done = min(done + characters, total)
            if preparing is not None:
                preparing("splitting", done, total)

        tokenize = self.encoder.model.encode_untrusted
        limit = self.config.module_tokens
        return [(d, split_document(d, limit, tokenize, note)) for d in documents]

    def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Deletes documents with modules, vectors and states; returns how many there were."""
        known = self.catalog.documents(collection, document_ids)
        self.store.discard(self.catalog.delete_documents(collection, document_ids))
        return len(known)

    def delete_collection(self, collection: str) -> int:
        """Deletes a collection with everything in it; returns how many documents there were."""
        documents, freed = self.catalog.delete_collection(collection)
        self.store.discard(freed)
        return documents

    def _store(
        self, collection: str, prepared: Sequence[Prepared], progress: Progress | None,
        queued: int | None, removed: Sequence[str], moved: Sequence[MovedDocument],
        request: StoringRequest,
    ) -> int:  # fmt: skip
        """Encodes, then replaces documents in one transaction; returns how many modules were
        encoded. New states belong to the job until then; if it is interrupted, the next job of the
        collection finds them."""
        jobs = self.store.jobs.within(self.catalog.namespace)
        rows, done, encoded = [], 0, 0
        total = sum(len(modules) for _, modules in prepared)
        with jobs.running(collection_target(collection), total, queued) as job:
            note = jobs.progress(job)
            with _Writing() as writing:
                for document, modules in prepared:
                    for part in portions([module.token_ids for module in modules]):
                        jobs.expect(job, [self.encoder.key(ids, "rooted") for ids in part])
                        lease = self.encoder.lease(part, "rooted", "ingest")
                        done += len(part)
                        encoded += sum(tier == "encoded" for tier in lease.source.values())
                        writing.follow(lease)
                        note(done)
                        if progress is not None:
                            progress(done, total)
                    rows.append(self._row(document, modules))
            freed = self.catalog.replace_documents(
                collection, rows, job, jobs.session, removed, moved, request
            )
            self.store.discard(freed)
        self.retriever.update_index(collection)
        return encoded

    def _digest(self, document: SourceDocument) -> str:
        """Digest of text, metadata and everything that decides how the text is split."""
        metadata = json.dumps(dict(document.metadata), sort_keys=True, default=str)
        size = str(self.config.module_tokens)
        parts = (document.digest, metadata, str(SPLIT_VERSION), size)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def _check_window(self, modules: Sequence[Sequence[int]]) -> None:
        window = self.encoder.model.causal.window
        taken = len(self.encoder.preamble_ids) + self.config.max_new_tokens
        longest = max(map(len, modules), default=0)
        if longest + taken >= window:
            raise ConfigurationError(
                f"a module takes {longest} tokens, but of the model's window of {window} preamble "
                f"and answer leave {window - taken}; give a smaller module_tokens"
            )

    def _row(self, document: SourceDocument, modules: Sequence[SplitModule]) -> NewDocument:
        vectors = self.retriever.embed_texts([module.text for module in modules])
        rows = []
        for number, module in enumerate(modules):
            name = f"{document.id}#{number + 1}"
            key = self.encoder.key(module.token_ids, "rooted")
            vector = None if vectors is None else vectors[number]
            details = _storable(module.metadata)
            rows.append(NewModule(name, module.text, module.token_ids, key, vector, details))
        return NewDocument(
            document.id, document.uri, self._digest(document), rows, document.metadata,
            document.text,
        )  # fmt: skip


def _storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON can hold it; other values (dates, paths) become text."""
    stored: dict[str, Any] = json.loads(json.dumps(dict(metadata), default=str))
    return stored


def _with_known_ids(
    loaded: LoadedSources, known: Mapping[str, DocumentRow]
) -> tuple[SourceDocument, ...]:
    """The documents, where a file that is stored under another id keeps that."""
    ids = {document.id for document in loaded.documents}
    by_uri = {row.uri: row.source_id for row in known.values() if row.source_id not in ids}
    return tuple(
        replace(each, id=by_uri.pop(each.uri))
        if each.id in loaded.files and each.id not in known and each.uri in by_uri
        else each
        for each in loaded.documents
    )


def _gone(
    loaded: LoadedSources, documents: Sequence[SourceDocument], known: Mapping[str, DocumentRow], *,
    sync: bool,
) -> Iterator[DocumentRow]:  # fmt: skip
    """Stored documents that the sources lack: of folders, those whose files do not exist or have
    another id now; if there are no folders, all but those of files that failed."""
    ids = loaded.present.union(document.id for document in documents)
    uris = {document.uri for document in documents if document.id in loaded.files}
    for row in known.values():
        if row.source_id in ids:
            continue
        if not loaded.folders:
            if sync:
                yield row
        elif any(row.uri.startswith(f"{folder.rstrip('/')}/") for folder in loaded.folders) and (
            row.uri in uris or _has_vanished(Path(unquote(urlsplit(row.uri).path)))
        ):
            yield row


def _has_vanished(path: Path) -> bool:
    """Whether there is no such file; one that cannot be looked at is there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


class _Writing:
    """The lease whose blobs are written while the next modules are encoded."""

    def __init__(self) -> None:
        self._lease: Lease | None = None

    def follow(self, lease: Lease) -> None:
        """Releases the lease before this one, and this one unless its blobs are under way. Raises
        what releases raise."""
        before, self._lease = self._lease, lease
        if before is not None:
            before.release()
        if not lease.is_writing:
            lease.release()

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._lease.release()


@dataclass(slots=True, eq=False)
class QueueSlot:
    """Room in the queue for one job. nbytes: size of its documents, which stay in memory until the
    job ends. taken: whether a job uses the slot."""

    namespace: str
    nbytes: int
    taken: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    job: int
    run: Callable[[], None]
    slot: QueueSlot
    ended: threading.Event = field(default_factory=threading.Event)


class IngestionWorker:
    """Runs jobs in one thread: round-robin over the namespaces, first come first served within one,
    so that a namespace with many jobs delays another by one job at most. The thread starts with the
    first job. Thread-safe."""

    def __init__(self, budget: int) -> None:
        """budget: bytes of documents in the queue, the running job's included. A single job may
        exceed it if the queue is empty."""
        self.stopping = False
        self._budget = budget
        self._slots: list[QueueSlot] = []
        self._turns: dict[str, deque[_Task]] = {}
        self._open: dict[int, _Task] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def reserve_slot(self, namespace: str, nbytes: int) -> Iterator[QueueSlot]:
        """Reserves a slot, which is free again after the block unless `put_job` took it. Raises
        `QueueFull` or `EngineClosed`."""
        slot = QueueSlot(namespace, nbytes)
        with self._changed:
            self.check_open()
            self._check_room(nbytes)
            self._slots.append(slot)
        try:
            yield slot
        finally:
            if not slot.taken:
                with self._changed:
                    self._slots.remove(slot)

    def put_job(self, job: int, run: Callable[[], None], slot: QueueSlot) -> None:
        """Queues a job. If the folder is closed before the job starts, the end of the session marks
        it as interrupted."""
        with self._changed:
            if self.stopping:
                return
            slot.taken = True
            task = _Task(job, run, slot)
            self._open[job] = task
            self._turns.setdefault(slot.namespace, deque()).append(task)
            self._changed.notify()
            if self._thread is None:
                name = "ragcache-ingestion"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def wait_for(self, job: int, seconds: float | None) -> None:
        """Waits for the end of a job; for a job of another process, half a second at most."""
        task = self._open.get(job)
        if task is not None:
            task.ended.wait(seconds)
        else:
            time.sleep(_POLL_SECONDS if seconds is None else min(seconds, _POLL_SECONDS))

    @property
    def is_idle(self) -> bool:
        """Whether there is no job, and one may come."""
        return not (self._slots or self.stopping)

    def check_open(self) -> None:
        """Raises `EngineClosed` after `halt`."""
        if self.stopping:
            raise EngineClosed("the folder was closed before the ingestion ended")

    def halt(self) -> None:
        """Starts no further job; the running one stops at its next check."""
        with self._changed:
            self.stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Waits for the thread, then wakes all callers of `wait_for`."""
        if self._thread is not None:
            self._thread.join()
        for task in self._open.values():
            task.ended.set()

    def _check_room(self, nbytes: int) -> None:
        if len(self._slots) >= MAX_JOBS:
            raise QueueFull(f"{MAX_JOBS} ingestions wait already; try again later")
        taken = sum(slot.nbytes for slot in self._slots)
        if self._slots and taken + nbytes > self._budget:
            raise QueueFull(
                f"documents of {taken:,} bytes wait to be ingested, and with {nbytes:,} more they "
                f"would exceed the {self._budget:,} that may; try again later"
            )

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            except Exception:
                logger.exception("job %s failed", task.job)
            finally:
                self._end(task)

    def _next(self) -> _Task | None:
        """Waits for the next job; None after `halt`."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopping or self._turns)
            if self.stopping:
                return None
            namespace, waiting = next(iter(self._turns.items()))
            task = waiting.popleft()
            del self._turns[namespace]
            if waiting:
                self._turns[namespace] = waiting  # behind all others
            return task

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._slots.remove(task.slot)
            if self._open.get(task.job) is task:  # one that failed may be queued again by now
                del self._open[task.job]
        task.ended.set()


@dataclass(frozen=True, slots=True)
class IngestionJobs:
    """The ingestion jobs of one namespace, which the ledger keeps: those that `submit` queued, and
    those of `ingest`. The ledger keeps the documents of a queued job until it has ended: where its
    process ends before, another one goes on with it, or the next that opens the folder."""

    rows: Jobs
    ingestor: Ingestor
    deferred: DeferredReleases
    worker: IngestionWorker

    def submit(
        self, collection: str, sources: Iterable[DocumentSource] | DocumentSource | LoadedSources,
        *, idempotency_key: str | None = None, sync: bool = False,
    ) -> JobRow:  # fmt: skip
        """Reads documents, queues their ingestion and returns; they are in the ledger then.

        Args:
            collection: The collection to store them in; made if need be.
            sources: Files, folders or documents, as for `RagCache.ingest`.
            idempotency_key: Identifies the request. Sent again with the same documents, it returns
                the same job; one that was interrupted or failed is queued again under its number.
            sync: Whether stored documents that the sources lack are removed, as `RagCache.sync`
                does.

        Returns:
            The queued job, or the job of the key.

        Raises:
            DocumentError: A document cannot be read; nothing is queued.
            ConfigurationError: The collection's name is blank.
            InvalidRequest: The key is empty or too long.
            QueueFull: Too many jobs or too many bytes wait.
            IdempotencyConflict: The key came with other documents before.
            EngineClosed: The folder was closed.

        Example:
            >>> job = rag.jobs.submit("handbook", ["docs/"])
            >>> rag.jobs.wait(job.id).status
            'done'
        """
        check_collection(collection)
        if idempotency_key is not None and not 0 < len(idempotency_key) <= _MAX_KEY_LENGTH:
            raise InvalidRequest(f"an idempotency key has 1 to {_MAX_KEY_LENGTH} characters")
        loaded = sources if isinstance(sources, LoadedSources) else load_sources(sources)
        target = collection_target(collection)
        request = _IngestionRequest.of(collection, loaded.documents, sync=sync)
        known = self.rows.known(idempotency_key, request.digest)
        if known is not None and not known.can_be_retried:
            return known  # needs no slot
        with self.worker.reserve_slot(self.rows.namespace, request.nbytes) as slot:
            kept = [JobDocument(each.id, _content_of(each)) for each in loaded.documents]
            job, new = self.rows.queue(
                target, idempotency_key, request.digest, kept, _options_of(loaded, sync=sync),
                {"skipped": [asdict(each) for each in loaded.skipped]},
                replaces_all=sync and not loaded.folders,
            )  # fmt: skip
            row = self.rows.get(job)
            if new:
                run = partial(self._run, job, collection, loaded, sync=sync)
                self.worker.put_job(job, run, slot)
        return row

    def resume(self, job: AdoptedJob) -> None:
        """Queues a job that another process has left; leaves it again where there is no room."""
        loaded = _loaded_of(job)
        collection = job.target.removeprefix(collection_target(""))
        sync = bool(job.options.get("sync"))
        nbytes = _IngestionRequest.of(collection, loaded.documents, sync=sync).nbytes
        try:
            with self.worker.reserve_slot(self.rows.namespace, nbytes) as slot:
                run = partial(self._run, job.id, collection, loaded, sync=sync)
                self.worker.put_job(job.id, run, slot)
        except (QueueFull, EngineClosed):
            self.rows.leave(job.id)

    def get(self, job: int | str) -> JobRow:
        """A job as it is now, by its id or its public id; its progress is at most a second old.
        Raises `UnknownJob`."""
        return self.rows.get(job)

    def list(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """A page of the jobs, the newest first. Raises `InvalidRequest`."""
        return self.rows.page(cursor, limit)

    def wait(self, job: int | str, timeout: float | None = None) -> JobRow:
        """Waits for the end of a job and returns it. Raises `TimeoutError` after `timeout` seconds,
        `UnknownJob` or `EngineClosed`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (row := self.get(job)).ended:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"job {job} has not ended within {timeout} s; it goes on")
            if self.worker.stopping:
                raise EngineClosed("the folder was closed before the job ended")
            self.worker.wait_for(row.id, left)
        return row

    def _run(self, job: int, collection: str, loaded: LoadedSources, *, sync: bool) -> None:
        """Runs a queued job in the worker's thread and ends it, once: as soon as it has ended, it
        may be queued again."""

        try:
            self.rows.start(job)
            self.deferred.release()
            loaded = _left_of(loaded, self.rows.waiting(job))
            check_open = lambda *_: self.worker.check_open()  # noqa: E731
            self.ingestor.ingest(collection, loaded, check_open, job, sync=sync)
            self.rows.finish(job)
        except JobTaken as error:
            logger.warning("%s", error)
        except RagCacheError as error:  # expected; the job's row holds the reason
            self.rows.fail(job, error)
        except BaseException as error:
            self.rows.fail(job, error)
            raise


def _content_of(document: SourceDocument) -> str:
    """A document as the ledger keeps it."""
    parts = [asdict(part) for part in document.sections] if document.parts else []
    fields = (document.id, document.text, document.uri, dict(document.metadata), parts)
    return json.dumps(fields, default=str)


def _document_of(content: str) -> SourceDocument:
    name, text, uri, metadata, parts = json.loads(content)
    return SourceDocument(name, text, uri, metadata, tuple(DocumentPart(**part) for part in parts))


def _options_of(loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
    """What else another process must know to go on with an ingestion. present: all ids of the
    sources, since later requests take single documents away from the ledger."""
    if not (sync or loaded.files):
        return {}
    present = sorted(loaded.present.union(each.id for each in loaded.documents))
    return {
        "sync": sync, "folders": loaded.folders, "files": sorted(loaded.files), "present": present,
    }  # fmt: skip


def _left_of(loaded: LoadedSources, waiting: WaitingDocuments) -> LoadedSources:
    """What later requests leave of a queued one."""
    documents = tuple(each for each in loaded.documents if each.id in waiting.source_ids)
    present = loaded.present.union(waiting.present, (each.id for each in loaded.documents))
    return replace(loaded, documents=documents, present=present)


def _loaded_of(job: AdoptedJob) -> LoadedSources:
    return LoadedSources(
        tuple(_document_of(content) for content in job.contents),
        tuple(SkippedFile(**each) for each in job.report.get("skipped", ())),
        tuple(job.options.get("folders", ())),
        frozenset(job.options.get("files", ())),
        frozenset(job.options.get("present", ())),
    )


@dataclass(frozen=True, slots=True)
class _IngestionRequest:
    """digest: of everything that the ingestion depends on. nbytes: approximate memory of the
    documents."""

    digest: str
    nbytes: int

    @classmethod
    def of(
        cls, collection: str, documents: Sequence[SourceDocument], *, sync: bool
    ) -> _IngestionRequest:
        parts = [(d.id, d.digest, d.uri, dict(d.metadata)) for d in documents]
        asked = [collection, parts, *(["sync"] if sync else [])]
        content = json.dumps(asked, sort_keys=True, default=str).encode()
        texts = sum(
            sys.getsizeof(text)
            for d in documents
            for text in (d.text, *(each.text for each in d.sections if d.parts))
        )
        return cls(hashlib.sha256(content).hexdigest(), texts + len(content))
