"""Ingestion jobs: what is encoded for documents that are not stored yet belongs to its job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from ragcache.errors import StoreError
from ragcache.states import KVKey
from ragcache.store.database import Database
from ragcache.store.statements import insert_new
from ragcache.store.tables import JobStateTable, JobTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobRow:
    """An ingestion. target: `collection NAME` or `schema NAME`. states: that it still holds."""

    id: int
    target: str
    status: str
    modules: int
    states: int
    error: str


@dataclass(frozen=True, slots=True)
class Jobs:
    """The ingestions of one session. Every method is one transaction.

    States are encoded before the rows of their documents are written. Until then they are the
    job's, and after an interruption they stay so: the next ingestion of the same target finds them,
    and ends the earlier job.
    """

    database: Database
    session: str

    def begin(self, target: str, modules: int) -> int:
        """The number of a new job."""
        row = JobTable(
            target=target, session=self.session, status="running", started_at=time.time(),
            modules=modules,
        )  # fmt: skip
        with self.database.transaction() as session:
            session.add(row)
            session.flush()
            return row.id

    @contextmanager
    def running(self, target: str, modules: int) -> Iterator[int]:
        """A job for as long as the block runs; one that ends with an error, or without `complete`,
        leaves its states to the next job of its target."""
        job = self.begin(target, modules)
        try:
            yield job
        except BaseException as error:
            self.fail(job, error)
            raise

    def expect(self, job: int, keys: Iterable[KVKey]) -> None:
        """Notes that a job needs states, before they are encoded."""
        rows = [{"job_id": job, "key": str(key)} for key in dict.fromkeys(keys)]
        with self.database.transaction() as session:
            insert_new(session, JobStateTable, rows)

    def fail(self, job: int, error: BaseException) -> None:
        """Ends a job that was not completed; its states stay for the next one."""
        status = "failed" if isinstance(error, Exception) else "interrupted"
        try:
            with self.database.transaction() as session:
                _end(session, job, status, f"{type(error).__name__}: {error}")
        except StoreError as unwritten:  # a full disk, as a rule: the error before is what counts
            logger.warning("%s; the job counts as running until this process ends", unwritten)

    def listed(self) -> list[JobRow]:
        """All jobs, the oldest first."""
        held = select(JobStateTable.job_id, func.count()).group_by(JobStateTable.job_id)
        with self.database.reading() as session:
            rows = list(session.scalars(select(JobTable).order_by(JobTable.id)))
            counts: dict[int, int] = {}
            for job, number in session.execute(held):
                counts[job] = number
        return [
            JobRow(r.id, r.target, r.status, r.modules, counts.get(r.id, 0), r.error) for r in rows
        ]


def complete(session: Session, job: int) -> list[KVKey]:
    """Ends a job and the earlier ones of its target that were interrupted, in the transaction that
    stores its documents. Returns the keys that they held."""
    done = session.get_one(JobTable, job)
    ended = select(JobTable.id).where(JobTable.target == done.target, JobTable.status != "running")
    ids = [job, *session.scalars(ended)]
    held = select(JobStateTable.key).where(JobStateTable.job_id.in_(ids))
    keys = [KVKey(key) for key in session.scalars(held)]
    session.execute(delete(JobStateTable).where(JobStateTable.job_id.in_(ids)))
    _end(session, job, "done", "")
    return keys


def _end(session: Session, job: int, status: str, error: str) -> None:
    row = update(JobTable).where(JobTable.id == job)
    session.execute(row.values(status=status, finished_at=time.time(), error=error))
