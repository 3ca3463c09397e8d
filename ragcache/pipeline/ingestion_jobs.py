"""Background ingestion: a queue of requests in the ledger, and threads that run them.

`IngestionJobs` queues the requests of one namespace. `IngestionWorkers` take the requests of all
namespaces from the queue (`ragcache.db.Jobs`), one thread per request.
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

from ragcache.config import parse_bytes
from ragcache.db import JobRequest, JobRow, Jobs, Page, TakenJob, collection_target
from ragcache.documents import (
    LoadedSources,
    ReadOptions,
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
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.ingest import Ingestor, check_collection

logger = logging.getLogger(__name__)

WORKERS = 16
"""Requests that run at the same time, for different collections, at most `RUNNING` of them for a
namespace. They take turns at encoding (`EncodingTurns`)."""
_MAX_KEY_LENGTH = 255
_POLL_SECONDS = 0.25  # between checks of a queue whose requests have to wait for others
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.25  # seconds between checks of a job


class IngestionWorkers:
    """Threads that run the requests of the queue. Thread-safe.

    A thread ends when no request waits. The next `wake` starts another one.
    """

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
        """Raise `EngineClosed` after `halt`."""
        if self._stopping.is_set():
            raise EngineClosed("the folder was closed before the ingestion ended")

    def halt(self) -> None:
        """Start no further requests. Running ones stop at their next check."""
        with self._lock:
            self._stopping.set()

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in list(self._threads):
            thread.join()

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                job = self._next()
                if job is not None:
                    self.wake()  # more requests may wait
                    self._run(job)
                elif threading.current_thread() not in self._threads:
                    return
                else:
                    self._stopping.wait(_POLL_SECONDS)
        except (EngineClosed, LedgerUnavailable) as error:
            logger.warning("%s; a later heartbeat checks the queue again", error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> TakenJob | None:
        """Take the next request.

        If no request waits, the thread leaves the workers under the same lock, so that a request
        that is queued later starts another thread.
        """
        with self._lock:
            job = self._rows.take()
            if job is None and not self._rows.any_waits():
                self._threads.discard(threading.current_thread())
            return job


@dataclass(frozen=True, slots=True)
class IngestionJobs:
    """The ingestion jobs of one namespace; `RagCache.jobs`.

    Jobs come from `submit` and from `RagCache.ingest`. Jobs of one collection run one after the
    other, in the order in which they came. The ledger keeps the documents of a queued job until it
    has ended: if its process ends first, another process, or the next one that opens the folder,
    continues the job.
    """

    rows: Jobs
    ingestor: Ingestor
    deferred: DeferredReleases
    workers: IngestionWorkers

    def submit(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource | LoadedSources,
        *,
        idempotency_key: str | None = None,
        sync: bool = False,
    ) -> JobRow:
        """Read documents into the ledger, queue their ingestion, and return.

        Args:
            collection: The collection, which is created if there is none.
            sources: Files, folders or documents, as for `RagCache.ingest`.
            idempotency_key: Identifies the request. The same key with the same documents returns
                the same job. A job that failed or was canceled is queued again under its id.
            sync: Remove stored documents that the sources no longer hold, as `RagCache.sync` does.

        Returns:
            The queued job, or the job of the key.

        Raises:
            DocumentError: A document cannot be read. Nothing is queued.
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
        limits = ReadOptions.of(self.ingestor.config)
        loaded = (
            sources if isinstance(sources, LoadedSources) else load_sources(sources, limits=limits)
        )
        self.workers.check_open()
        documents = [each.to_json() for each in loaded.documents]
        options = _options_of(loaded, sync=sync)
        request = JobRequest(
            collection_target(collection),
            _digest_of(collection, documents, sync=sync),
            documents,
            loaded.originals,
            options,
            {"skipped": [asdict(each) for each in loaded.skipped]},
            idempotency_key,
        )
        config = self.ingestor.config
        budgets = parse_bytes(config.ingestion_bytes), parse_bytes(config.originals_bytes)
        job, _ = self.rows.queue(request, *budgets)
        row = self.rows.get(job)
        self.workers.wake()
        return row

    def get(self, job: int | str) -> JobRow:
        """Return a job by its id or its public id. Its progress is at most a second old.

        Raises:
            UnknownJob: There is no such job.
        """
        return self.rows.get(job)

    def cancel(self, job: int | str) -> JobRow:
        """Cancel a job that waits or runs, and return it.

        A canceled job stores and removes nothing. A running `RagCache.ingest` raises `JobCanceled`.
        A job that has ended stays as it is.

        Raises:
            UnknownJob: There is no such job.

        Example:
            >>> rag.jobs.cancel(job.id).status
            'done'
        """
        return self.rows.cancel(job)

    def list(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """List a page of the jobs, the newest first.

        Raises:
            InvalidRequest: The cursor or the limit cannot be used.
        """
        return self.rows.page(cursor, limit)

    def wait(self, job: int | str, timeout: float | None = None) -> JobRow:
        """Wait until a job has ended, and return it.

        Args:
            job: Id or public id of the job.
            timeout: Most seconds to wait. Unlimited by default.

        Raises:
            TimeoutError: The job has not ended in time.
            UnknownJob: There is no such job.
            EngineClosed: The folder was closed.
        """
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
        """Run a request of the queue and end it.

        The job ends exactly once, because it may be queued again as soon as it has ended. A job
        that is interrupted by `close`, or by the interpreter's exit, is left to the next process.
        """
        collection = job.target.removeprefix(collection_target(""))
        try:
            self.deferred.release()
            self.ingestor.store_sources(
                job.id,
                collection,
                _loaded_of(job),
                lambda *_: self.workers.check_open(),
                sync=bool(job.options.get("sync")),
            )
            self.ingestor.retriever.indexes.prepare(collection)
        except (EngineClosed, JobCanceled, JobTaken) as error:
            logger.warning("%s", error)
        except RagCacheError as error:  # expected: the job's row holds the reason
            self.rows.fail(job.id, error)
        except Exception as error:  # the thread goes on with the next job
            if _is_of_exit(error):
                logger.warning("job %s is left to the next process: %s", job.id, error)
                return
            logger.exception("job %s failed", job.id)
            self.rows.fail(job.id, error)


def _is_of_exit(error: Exception) -> bool:
    """Tell whether a pool of threads refused work because the interpreter exits.

    Python ends all pools before it calls the functions that close a folder.
    """
    return isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error)


def _options_of(loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
    """Return the facts about the sources that the process which runs the job needs."""
    if not (sync or loaded.files):
        return {}
    return {
        "sync": sync,
        "folders": loaded.folders,
        "files": sorted(loaded.files),
        "present": sorted(loaded.present),
    }


def _loaded_of(job: TakenJob) -> LoadedSources:
    return LoadedSources(
        tuple(SourceDocument.from_json(content) for content in job.documents),
        tuple(SkippedFile(**each) for each in job.report.get("skipped", ())),
        tuple(job.options.get("folders", ())),
        frozenset(job.options.get("files", ())),
        frozenset(job.options.get("present", ())),
    )


def _digest_of(collection: str, documents: Iterable[str], *, sync: bool) -> str:
    """Return a digest of the request, to compare requests with the same idempotency key."""
    digest = hashlib.sha256(json.dumps([collection, sync]).encode())
    for content in documents:
        digest.update(hashlib.sha256(content.encode()).digest())
    return digest.hexdigest()
