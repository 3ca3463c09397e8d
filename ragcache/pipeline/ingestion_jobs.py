"""Ingestion in the background: jobs that the ledger keeps, and the one thread that runs them.

`IngestionJobs` queues the work of an `Ingestor` for the thread of `IngestionWorker`. The ledger
keeps the state and the documents of every job, so that another process goes on with it where this
one ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ragcache.db import (
    AdoptedJob,
    JobDocument,
    JobRow,
    Jobs,
    Page,
    WaitingDocuments,
    collection_target,
)
from ragcache.documents import (
    DocumentPart,
    LoadedSources,
    SkippedFile,
    SourceDocument,
    load_sources,
)
from ragcache.documents.source import DocumentSource
from ragcache.errors import (
    EngineClosed,
    InvalidRequest,
    JobTaken,
    QueueFull,
    RagCacheError,
)
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.ingest import Ingestor, check_collection

logger = logging.getLogger(__name__)

MAX_JOBS = 256  # queued and running
_MAX_KEY_LENGTH = 255
_POLL_SECONDS = 0.5  # between two looks at a job of another process


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
            self.ingestor.retriever.prepare_index(collection)
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
