"""Ingestion jobs. What is encoded for documents that are not stored yet belongs to their job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, select, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.sql import Page, after, check_limit, insert_new, insert_returning, page_of
from ragcache.db.tables import DEFAULT_NAMESPACE, JobStateTable, JobTable
from ragcache.errors import EngineClosed, IdempotencyConflict, StoreError, UnknownJob
from ragcache.states import KVKey

logger = logging.getLogger(__name__)

OPEN = ("queued", "running")
RETRIED = ("interrupted", "failed")
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobRow:
    """An ingestion. target: `collection NAME` or `schema NAME`. status: queued, running, done,
    failed or interrupted. done, total: its modules, 0 while they are not known. states: that it
    still holds. Times in Unix seconds."""

    id: int
    public_id: str
    target: str
    status: str
    done: int
    total: int
    states: int
    error: str
    created_at: float
    started_at: float | None
    finished_at: float | None

    @property
    def ended(self) -> bool:
        return self.status not in OPEN

    @property
    def can_be_retried(self) -> bool:
        """Whether its request, sent again, begins it anew."""
        return self.status in RETRIED


@dataclass(frozen=True, slots=True)
class Jobs:
    """The ingestions of one session in one namespace. Every method is one transaction.

    States are encoded before the rows of their documents are written. Until then they belong to the
    job, and after an interruption they still do: the next ingestion of the same target finds them,
    and ends the earlier job.
    """

    database: Database
    session: str
    namespace: str = DEFAULT_NAMESPACE

    def within(self, namespace: str) -> Jobs:
        """The jobs of another namespace."""
        return replace(self, namespace=namespace)

    def begin(self, target: str, modules: int) -> int:
        """Begins a job; returns its id."""
        now = time.time()
        with self.database.transaction() as session:
            row = JobTable(**self._new(target, "running", now), started_at=now, modules=modules)
            session.add(row)
            session.flush()
            return row.id

    def known(self, key: str | None, digest: str) -> JobRow | None:
        """The job of an earlier request with this idempotency key, None where there is none. Raises
        `IdempotencyConflict`."""
        if key is None:
            return None
        with self.database.reading() as session:
            found = session.scalars(select(JobTable).where(self._requested(key))).one_or_none()
            number = None if found is None else _same(found, digest).id
        return None if number is None else self.get(number)

    def queue(self, target: str, key: str | None, digest: str) -> tuple[int, bool]:
        """Queues a job, or finds that of the same idempotency key and request. Returns its id, and
        whether it is to be run: new, interrupted or failed. Raises `IdempotencyConflict`."""
        new = self._new(target, "queued", time.time())
        new |= {"modules": 0, "error": "", "idempotency_key": key, "request_digest": digest}
        with self.database.transaction() as session:
            number = insert_returning(session, JobTable, new)
            if number is not None:
                return number, True
            assert key is not None
            row = session.scalars(select(JobTable).where(self._requested(key))).one()
            return row.id, self._retry(session, _same(row, digest).id)

    def _retry(self, session: Session, job: int) -> bool:
        """Queues an ended job again; False for one that is done or queued already. It finds the
        states that it still holds."""
        again = {
            "status": "queued", "session": self.session, "error": "", "modules": 0, "done": 0,
            "started_at": None, "finished_at": None,
        }  # fmt: skip
        chosen = (JobTable.id == job) & JobTable.status.in_(RETRIED)
        rows = update(JobTable).where(chosen).values(again).returning(JobTable.id)
        return session.scalar(rows) is not None

    def _requested(self, key: str) -> ColumnElement[bool]:
        return and_(JobTable.namespace == self.namespace, JobTable.idempotency_key == key)

    @contextmanager
    def running(self, target: str, modules: int, job: int | None = None) -> Iterator[int]:
        """A job while the block runs: a new one, which an error ends, or a queued one, which its
        runner ends. Without `complete`, its states are left to the next job of its target."""
        if job is not None:
            self._set(job, modules=modules)
            yield job
            return
        job = self.begin(target, modules)
        try:
            yield job
        except BaseException as error:
            self.fail(job, error)
            raise

    def start(self, job: int) -> None:
        """Marks a queued job as running."""
        self._set(job, status="running", started_at=time.time())

    def finish(self, job: int) -> None:
        """Ends a job that had nothing to store; one that has ended stays as it is."""
        with self.database.transaction() as session:
            if session.get_one(JobTable, job).status in OPEN:
                _end(session, job, "done", "")

    def progress(self, job: int) -> Callable[[int], None]:
        """Returns a function that writes how many modules of a job are done, once a second at
        most."""
        written = time.monotonic()

        def note(done: int) -> None:
            nonlocal written
            if time.monotonic() - written >= PROGRESS_SECONDS:
                written = time.monotonic()
                self._set(job, done=done)

        return note

    def expect(self, job: int, keys: Iterable[KVKey]) -> None:
        """Makes a job an owner of states, before they are encoded."""
        rows = [{"job_id": job, "key": str(key)} for key in dict.fromkeys(keys)]
        with self.database.transaction() as session:
            insert_new(session, JobStateTable, rows)

    def fail(self, job: int, error: BaseException) -> None:
        """Ends a job that was not completed; its states stay for the next one. One that ends
        because the folder is closed is interrupted."""
        stopped = isinstance(error, EngineClosed) or not isinstance(error, Exception)
        status = "interrupted" if stopped else "failed"
        try:
            with self.database.transaction() as session:
                _end(session, job, status, f"{type(error).__name__}: {error}")
        except StoreError as unwritten:  # a full disk, as a rule: the error before is what counts
            logger.warning("%s; the job counts as running until this process ends", unwritten)

    def get(self, job: int | str) -> JobRow:
        """The job of an id or a public id. Raises `UnknownJob`."""
        id_column = JobTable.id if isinstance(job, int) else JobTable.public_id
        mine = (JobTable.namespace == self.namespace) & (id_column == job)
        found = self._rows(select(JobTable).where(mine))
        if not found:
            raise UnknownJob(f"there is no job {job}")
        return found[0]

    def page(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """The namespace's jobs, the newest first. Raises `InvalidRequest`."""
        limit, last = check_limit(limit), after(cursor, int)
        rows = select(JobTable).where(JobTable.namespace == self.namespace)
        if last is not None:
            rows = rows.where(JobTable.id < last[0])
        read = self._rows(rows.order_by(JobTable.id.desc()).limit(limit + 1))
        return page_of(read, limit, lambda row: (row.id,))

    def listed(self) -> list[JobRow]:
        """All jobs of all namespaces, the oldest first."""
        return self._rows(select(JobTable).order_by(JobTable.id))

    def _rows(self, statement: Any) -> list[JobRow]:
        held = select(func.count()).where(JobStateTable.job_id == JobTable.id).scalar_subquery()
        with self.database.reading() as session:
            return [_row(row, n) for row, n in session.execute(statement.add_columns(held))]

    def _new(self, target: str, status: str, now: float) -> dict[str, Any]:
        return {
            "target": target, "session": self.session, "status": status,
            "namespace": self.namespace, "created_at": now,
        }  # fmt: skip

    def _set(self, job: int, **values: Any) -> None:
        with self.database.transaction() as session:
            session.execute(update(JobTable).where(JobTable.id == job).values(**values))


def complete(session: Session, job: int) -> list[KVKey]:
    """Ends a job, and the earlier ones of its target that were interrupted, in the transaction that
    stores its documents. Returns the keys that they held."""
    done = session.get_one(JobTable, job)
    same = (JobTable.namespace == done.namespace) & (JobTable.target == done.target)
    ended = select(JobTable.id).where(same, JobTable.status.not_in(OPEN))
    ids = [job, *session.scalars(ended)]
    held = select(JobStateTable.key).where(JobStateTable.job_id.in_(ids))
    keys = [KVKey(key) for key in session.scalars(held)]
    session.execute(delete(JobStateTable).where(JobStateTable.job_id.in_(ids)))
    _end(session, job, "done", "")
    return keys


def _same(row: JobTable, digest: str) -> JobTable:
    """The row, if the request is the same. Raises `IdempotencyConflict`."""
    if row.request_digest != digest:
        raise IdempotencyConflict(
            f"the idempotency key {row.idempotency_key!r} was sent with another request; give each "
            "request a key of its own"
        )
    return row


def _end(session: Session, job: int, status: str, error: str) -> None:
    values: dict[str, Any] = {"status": status, "finished_at": time.time(), "error": error}
    if status == "done":
        values["done"] = JobTable.modules
    session.execute(update(JobTable).where(JobTable.id == job).values(values))


def _row(row: JobTable, states: int) -> JobRow:
    return JobRow(
        row.id, row.public_id, row.target, row.status, row.done, row.modules, states, row.error,
        row.created_at, row.started_at, row.finished_at,
    )  # fmt: skip
