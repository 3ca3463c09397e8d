"""Ingestion in the background: requests that wait in the ledger's queue, and threads that run them.

`IngestionJobs` queues requests of one namespace; `IngestionWorkers` take the requests of all
namespaces from the queue (`ragcache.db.Jobs`), one thread a request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ragcache.db import JobRequest, JobRow, Jobs, Page, TakenJob, collection_target
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
    JobCanceled,
    JobTaken,
    LedgerUnavailable,
    RagCacheError,
)
from ragcache.params import parse_bytes
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.ingest import Ingestor, check_collection

logger = logging.getLogger(__name__)

WORKERS = 2  # requests that run at once, of different collections
_MAX_KEY_LENGTH = 255
_POLL_SECONDS = 0.25  # between two looks at a queue whose requests have to wait for others
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.25  # seconds between two looks at a job


class IngestionWorkers:
    """Threads that run the requests which `Jobs.take` gives them. A thread ends when none waits;
    the next `wake` starts another one. Thread-safe."""

    def __init__(self, rows: Jobs, run: Callable[[TakenJob], None]) -> None:
        self._rows, self._run = rows, run
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def wake(self) -> None:
        """Start another thread, if a request waits and fewer than `WORKERS` run."""
        if self._stopping.is_set() or len(self._threads) == WORKERS or not self._rows.any_waits():
            return
        with self._lock:
            if len(self._threads) < WORKERS and not self._stopping.is_set():
                thread = threading.Thread(target=self._work, name="ragcache-ingestion", daemon=True)
                self._threads.add(thread)
                thread.start()

    def check_open(self) -> None:
        """Raises `EngineClosed` after `halt`."""
        if self._stopping.is_set():
            raise EngineClosed("the folder was closed before the ingestion ended")

    def halt(self) -> None:
        """Start no further request; the running ones stop at their next check."""
        with self._lock:
            self._stopping.set()

    def join(self) -> None:
        """Wait for the threads."""
        for thread in list(self._threads):
            thread.join()

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                job = self._next()
                if job is not None:
                    self.wake()  # others may wait beside it
                    self._run(job)
                elif threading.current_thread() not in self._threads:
                    return
                else:
                    self._stopping.wait(_POLL_SECONDS)
        except (EngineClosed, LedgerUnavailable) as error:
            logger.warning("%s; a later heartbeat looks at the queue again", error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> TakenJob | None:
        """The next request. The thread is no worker any more where none waits: one that is queued
        later wakes another one."""
        with self._lock:
            job = self._rows.take()
            if job is None and not self._rows.any_waits():
                self._threads.discard(threading.current_thread())
            return job


@dataclass(frozen=True, slots=True)
class IngestionJobs:
    """The ingestion jobs of one namespace, which the ledger keeps: those that `submit` queued, and
    those of `ingest`. Jobs of one collection run in the order in which they came. The ledger keeps
    the documents of a queued job until it has ended: where its process ends before, another one
    goes on with it, or the next that opens the folder."""

    rows: Jobs
    ingestor: Ingestor
    deferred: DeferredReleases
    workers: IngestionWorkers

    def submit(
        self, collection: str, sources: Iterable[DocumentSource] | DocumentSource | LoadedSources,
        *, idempotency_key: str | None = None, sync: bool = False,
    ) -> JobRow:  # fmt: skip
        """Reads documents, queues their ingestion and returns; they are in the ledger then.

        Args:
            collection: The collection to store them in; made if need be.
            sources: Files, folders or documents, as for `RagCache.ingest`.
            idempotency_key: Identifies the request. Sent again with the same documents, it returns
                the same job; one that failed or was canceled is queued again under its number.
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
        self.workers.check_open()
        documents = [_content_of(each) for each in loaded.documents]
        options = _options_of(loaded, sync=sync)
        request = JobRequest(
            collection_target(collection), _digest_of(collection, documents, sync=sync), documents,
            options, {"skipped": [asdict(each) for each in loaded.skipped]}, idempotency_key,
        )  # fmt: skip
        job, _ = self.rows.queue(request, parse_bytes(self.ingestor.config.ingestion_bytes))
        row = self.rows.get(job)
        self.workers.wake()
        return row

    def get(self, job: int | str) -> JobRow:
        """A job as it is now, by its id or its public id; its progress is at most a second old.
        Raises `UnknownJob`."""
        return self.rows.get(job)

    def cancel(self, job: int | str) -> JobRow:
        """Cancels a job that waits or runs, also one of `ingest`, which then raises `JobCanceled`;
        returns it as it is then. It stores and removes nothing. A job that has ended stays as it
        is. Raises `UnknownJob`.

        Example:
            >>> rag.jobs.cancel(job.id).status
            'done'
        """
        return self.rows.cancel(job)

    def list(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """A page of the jobs, the newest first. Raises `InvalidRequest`."""
        return self.rows.page(cursor, limit)

    def wait(self, job: int | str, timeout: float | None = None) -> JobRow:
        """Waits for the end of a job and returns it. Raises `TimeoutError` after `timeout` seconds,
        `UnknownJob` or `EngineClosed`."""
        until = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_WAIT
        while not (row := self.get(job)).ended:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"job {job} has not ended within {timeout} s; it goes on")
            self.workers.check_open()
            time.sleep(pause if until is None else max(0.0, min(pause, until - time.monotonic())))
            pause = min(2 * pause, _LONGEST_WAIT)
        return row

    def run(self, job: TakenJob) -> None:
        """Runs a request of the queue and ends it, once: as soon as it has ended, it may be queued
        again. The end of the session leaves one that is stopped to the next process."""
        collection = job.target.removeprefix(collection_target(""))
        try:
            self.deferred.release()
            check_open = lambda *_: self.workers.check_open()  # noqa: E731
            sync = bool(job.options.get("sync"))
            self.ingestor.store_sources(job.id, collection, _loaded_of(job), check_open, sync=sync)
            self.ingestor.retriever.indexes.prepare(collection)
        except (EngineClosed, JobCanceled, JobTaken) as error:
            logger.warning("%s", error)
        except RagCacheError as error:  # expected; the job's row holds the reason
            self.rows.fail(job.id, error)
        except Exception as error:
            logger.exception("job %s failed", job.id)
            self.rows.fail(job.id, error)


def _content_of(document: SourceDocument) -> str:
    """A document as the ledger keeps it."""
    parts = [asdict(part) for part in document.sections] if document.parts else []
    fields = (document.id, document.text, document.uri, dict(document.metadata), parts)
    return json.dumps(fields, default=str)


def _document_of(content: str) -> SourceDocument:
    name, text, uri, metadata, parts = json.loads(content)
    return SourceDocument(name, text, uri, metadata, tuple(DocumentPart(**part) for part in parts))


def _options_of(loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
    """Facts that the process which stores the documents must know."""
    if not (sync or loaded.files):
        return {}
    return {
        "sync": sync, "folders": loaded.folders, "files": sorted(loaded.files),
        "present": sorted(loaded.present),
    }  # fmt: skip


def _loaded_of(job: TakenJob) -> LoadedSources:
    return LoadedSources(
        tuple(_document_of(content) for content in job.documents),
        tuple(SkippedFile(**each) for each in job.report.get("skipped", ())),
        tuple(job.options.get("folders", ())),
        frozenset(job.options.get("files", ())),
        frozenset(job.options.get("present", ())),
    )


def _digest_of(collection: str, documents: Iterable[str], *, sync: bool) -> str:
    """Digest of everything that an ingestion depends on."""
    digest = hashlib.sha256(json.dumps([collection, sync]).encode())
    for content in documents:
        digest.update(hashlib.sha256(content.encode()).digest())
    return digest.hexdigest()
