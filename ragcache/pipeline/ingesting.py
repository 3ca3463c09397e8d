"""Ingestion in the background: documents are queued, and the ledger tells what became of them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ragcache.documents import SourceDocument, load_sources
from ragcache.documents.source import DocumentSource
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    InvalidRequest,
    RagCacheError,
)
from ragcache.pipeline.asked import Returned
from ragcache.pipeline.ingestion import Ingestor
from ragcache.pipeline.worker import Worker
from ragcache.store import JobRow, Jobs, Page

_KEY = 255  # characters of an idempotency key


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
        sources: Iterable[DocumentSource] | DocumentSource,
        *,
        idempotency_key: str | None = None,
    ) -> JobRow:
        """Reads the documents, queues their ingestion and returns.

        idempotency_key: sent again with the same documents it gives the same job; one that was
        interrupted or failed is queued again under its number. Raises `DocumentError`,
        `ConfigurationError`, `InvalidRequest`, `QueueFull`, `EngineClosed`, or
        `IdempotencyConflict` for a key that came with other documents.
        """
        if not collection.strip():
            raise ConfigurationError("a collection needs a name")
        if idempotency_key is not None and not 0 < len(idempotency_key) <= _KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {_KEY} characters")
        documents = load_sources(sources).documents
        target, request = f"collection {collection}", _Request.of(collection, documents)
        known = self.rows.known(idempotency_key, request.digest)
        if known is not None and not known.can_be_retried:
            return known  # needs no place
        with self.worker.place(self.rows.namespace, request.nbytes) as place:
            job, new = self.rows.queue(target, idempotency_key, request.digest)
            row = self.rows.get(job)
            if new:
                self.worker.put(job, partial(self._run, job, collection, documents), place)
        return row

    def get(self, job: int | str) -> JobRow:
        """A job as it is now, by its id or its public id; its progress is at most a second old.
        Raises `UnknownJob`."""
        return self.rows.get(job)

    def list(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """Jobs, the newest first. Raises `InvalidRequest`."""
        return self.rows.page(cursor, limit)

    def wait(self, job: int | str, timeout: float | None = None) -> JobRow:
        """A job when it has ended. Raises `TimeoutError` where it has not within `timeout`
        seconds, and `UnknownJob`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (row := self.get(job)).ended:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"job {job} has not ended within {timeout} s; it goes on")
            if self.worker.stopping:
                raise EngineClosed("the folder was closed before the job ended")
            self.worker.wait(row.id, left)
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


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked. digest: of all that an ingestion depends on. nbytes: that its documents take
    in memory, about."""

    digest: str
    nbytes: int

    @classmethod
    def of(cls, collection: str, documents: Sequence[SourceDocument]) -> _Request:
        parts = [(d.id, d.digest, d.uri, dict(d.metadata)) for d in documents]
        content = json.dumps([collection, parts], sort_keys=True, default=str).encode()
        texts = sum(sys.getsizeof(text) for d in documents for text in (d.text, *d.parts))
        return cls(hashlib.sha256(content).hexdigest(), texts + len(content))
