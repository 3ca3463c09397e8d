"""Ingestion in the background: jobs that wait for one thread, and what is known of each."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from ragcache.documents import SourceDocument, load_sources
from ragcache.documents.source import Source
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    InvalidRequest,
    QueueFull,
    RagCacheError,
)
from ragcache.pipeline.asked import Returned
from ragcache.pipeline.ingestion import Ingestor
from ragcache.store import JobRow, Jobs, Page

logger = logging.getLogger(__name__)

WAITING = 256  # jobs, whose documents are in memory meanwhile
_KEY = 255  # characters of an idempotency key
_LOOK_SECONDS = 0.5  # between two looks at a job of another process


class Worker:
    """One thread that runs jobs one after another; it begins with the first. Thread-safe."""

    def __init__(self) -> None:
        self.stopping = False
        self._tasks: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._open: dict[int, threading.Event] = {}
        self._room = threading.BoundedSemaphore(WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def reserve(self) -> None:
        """Takes a place in the queue. Raises `QueueFull` or `EngineClosed`."""
        self.check()
        if not self._room.acquire(blocking=False):
            raise QueueFull(f"{WAITING} ingestions wait already; try again later")

    def give_back(self) -> None:
        """Takes no place after all."""
        self._room.release()

    def put(self, job: int, run: Callable[[], None]) -> None:
        """Queues a job in a place that was reserved. When the folder is closed before it begins,
        the end of the session interrupts it."""
        with self._lock:
            if self.stopping:
                return
            self._open[job] = threading.Event()
            self._tasks.put((job, run))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="ragcache-ingestion", daemon=True
                )
                self._thread.start()

    def wait(self, job: int, seconds: float | None) -> None:
        """Waits for the end of a job; for one that is not here, a moment at most."""
        event = self._open.get(job)
        if event is not None:
            event.wait(seconds)
        else:
            time.sleep(_LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS))

    def check(self) -> None:
        """Raises `EngineClosed` once the thread is to stop."""
        if self.stopping:
            raise EngineClosed("the folder was closed before the ingestion ended")

    def halt(self) -> None:
        """Begins nothing more; what runs stops when it looks."""
        with self._lock:
            self.stopping = True
            self._tasks.put(None)

    def join(self) -> None:
        """Waits for the thread, and lets those go who wait for jobs."""
        if self._thread is not None:
            self._thread.join()
        for event in self._open.values():
            event.set()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self.stopping:
            job, run = task
            try:
                run()
            except Exception:
                logger.exception("job %s failed", job)
            finally:
                self._room.release()
                self._open.pop(job).set()


@dataclass(frozen=True, slots=True)
class IngestionJobs:
    """The ingestions of one namespace: those that `submit` queued, and those that a caller waits
    for. The ledger keeps them; the documents of one that is queued are in memory alone, so that
    one that is interrupted has to be given them again. It goes on where it ended."""

    rows: Jobs
    ingestor: Ingestor
    returned: Returned
    worker: Worker

    def submit(
        self,
        collection: str,
        sources: Iterable[Source] | Source,
        *,
        idempotency_key: str | None = None,
    ) -> JobRow:
        """Reads the documents, queues their ingestion and returns.

        idempotency_key: sent again with the same documents it gives the same job, whatever became
        of it. Raises `DocumentError`, `ConfigurationError`, `InvalidRequest`, `QueueFull`,
        `EngineClosed`, or `IdempotencyConflict` for a key that came with other documents.
        """
        if not collection.strip():
            raise ConfigurationError("a collection needs a name")
        if idempotency_key is not None and not 0 < len(idempotency_key) <= _KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {_KEY} characters")
        documents = load_sources(sources).documents
        self.worker.reserve()
        try:
            target = f"collection {collection}"
            job, new = self.rows.queue(target, idempotency_key, _digest(collection, documents))
        except BaseException:
            self.worker.give_back()
            raise
        row = self.rows.get(job)
        if new:
            self.worker.put(job, partial(self._run, job, collection, documents))
        else:
            self.worker.give_back()
        return row

    def get(self, job: int) -> JobRow:
        """A job as it is now; its progress is at most a second old. Raises `UnknownJob`."""
        return self.rows.get(job)

    def list(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """Jobs, the newest first. Raises `InvalidRequest`."""
        return self.rows.page(cursor, limit)

    def wait(self, job: int, timeout: float | None = None) -> JobRow:
        """A job when it has ended. Raises `TimeoutError` where it has not within `timeout`
        seconds, and `UnknownJob`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (row := self.get(job)).ended:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"job {job} has not ended within {timeout} s; it goes on")
            if self.worker.stopping:
                raise EngineClosed("the folder was closed before the job ended")
            self.worker.wait(job, left)
        return row

    def _run(self, job: int, collection: str, documents: Sequence[SourceDocument]) -> None:
        def look(_: int, __: int) -> None:
            self.worker.check()

        try:
            self.rows.start(job)
            self.returned.release()
            self.ingestor.ingest(collection, documents, look, job)
            self.rows.finish(job)
        except RagCacheError as error:  # the job tells
            self.rows.fail(job, error)
        except BaseException as error:
            self.rows.fail(job, error)
            raise


def _digest(collection: str, documents: Sequence[SourceDocument]) -> str:
    """Of all that an ingestion depends on."""
    parts = [(d.id, d.digest, d.uri, dict(d.metadata)) for d in documents]
    content = json.dumps([collection, parts], sort_keys=True, default=str)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
