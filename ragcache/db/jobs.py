"""Ingestion jobs: one queue in the ledger, which all processes over it share.

Jobs of one target run in the order of their ids. The ledger keeps the documents of a queued request
until it has ended: if its process dies, another one takes it over. A direct call waits in the same
queue, but runs in the calling process. States that are encoded for documents before these are
stored belong to the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from ragcache.db.database import Database
from ragcache.db.originals import add_originals, forget_originals, place_originals
from ragcache.db.sql import Page, insert_new, insert_returning, namespace_id, read_page
from ragcache.db.tables import DEFAULT_NAMESPACE, JobDocumentTable, JobStateTable, JobTable
from ragcache.errors import (
    EngineClosed,
    IdempotencyConflict,
    JobCanceled,
    JobTaken,
    LedgerUnavailable,
    QueueFull,
    StoreError,
    UnknownJob,
)
from ragcache.states import KVKey

logger = logging.getLogger(__name__)

OPEN = ("queued", "running")
RETRIED = ("interrupted", "failed", "canceled")
NOBODY = ""  # session of a job that any process may run
MAX_JOBS = 256  # open requests
JOBS_KEPT = 10_000
RUNNING = 2  # requests of a namespace that a process runs at the same time
PROGRESS_SECONDS = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.25  # seconds between reads of the queue
_HELD = select(func.count()).where(JobStateTable.job_id == JobTable.id)
_JOBS = select(JobTable, _HELD.scalar_subquery())
_IS_REQUEST = JobTable.request_digest != ""  # the documents of a direct call are not stored


@dataclass(frozen=True, slots=True)
class JobRow:
    """An ingestion. Times are Unix seconds."""

    id: int
    public_id: str
    target: str
    """`collection NAME` or `schema NAME`."""
    status: str
    """`queued`, `running`, `done`, `failed`, `canceled` or `interrupted`."""
    done: int
    """Number of modules that are stored."""
    total: int
    """Number of modules. 0 until it is known."""
    states: int
    """Number of states that the job still owns."""
    error: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    report: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Skipped files, and documents that vanished, were removed or were renamed."""

    @property
    def ended(self) -> bool:
        return self.status not in OPEN


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to queue."""

    target: str
    digest: str
    """Digest of the whole request, by which a repeated request is recognized."""
    documents: Sequence[str]
    """Contents of the documents."""
    originals: Mapping[str, bytes] = field(default_factory=dict, hash=False, repr=False)
    """Contents of the files that the documents were read from, by the digests that these have."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How to store the documents, for the process that does."""
    report: Mapping[str, Any] = field(default_factory=dict, hash=False)
    idempotency_key: str | None = None


class RunningJob(NamedTuple):
    """A job and the session that must still run it when it changes documents."""

    id: int
    session: str
    ends: bool = True
    """Whether the change is the job's last."""


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A queued request that this process runs now."""

    id: int
    namespace: str
    target: str
    documents: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    report: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The ingestions of one session in one namespace. Every method is one transaction.

    States are encoded before the rows of their documents are written. Until then they belong to the
    job, even if it fails: the next ingestion of the same target uses them and ends the job's
    ownership.
    """

    database: Database
    session: str
    namespace: str = DEFAULT_NAMESPACE
    _unended: dict[int, BaseException] = field(default_factory=dict)
    """Errors of jobs that have ended while the ledger did not answer, in all namespaces."""

    def within(self, namespace: str) -> Jobs:
        """Return the jobs of another namespace."""
        return replace(self, namespace=namespace)

    def queue(
        self, request: JobRequest, budget: int, originals_budget: int = 0
    ) -> tuple[int, bool]:
        """Queue a request, or find the request of the same idempotency key.

        Args:
            request: The request.
            budget: Most bytes of the documents of all open requests.
            originals_budget: Most bytes of all originals. Further originals are not kept.

        Returns:
            The job's id, and whether it was queued by this call: as a new job, or as another try.

        Raises:
            IdempotencyConflict: The key came with another request before.
            QueueFull: `MAX_JOBS` requests are open, or their documents would take more than
                `budget` bytes. A single request may.
        """
        nbytes = sum(map(len, request.documents))
        again = {
            "session": self.session,
            "status": "queued",
            "error": "",
            "modules": 0,
            "done": 0,
            "started_at": None,
            "finished_at": None,
            "options": dict(request.options),
            "report": dict(request.report),
            "nbytes": nbytes,
        }
        new = self._new(request.target) | again
        new |= {"idempotency_key": request.idempotency_key, "request_digest": request.digest}
        with self.database.transaction() as session:
            namespace_id(session, self.namespace)
            number = insert_returning(session, JobTable, new)
            if number is None:
                named = JobTable.idempotency_key == request.idempotency_key
                mine = (JobTable.namespace == self.namespace) & named
                row = session.scalars(select(JobTable).where(mine).with_for_update()).one()
                if row.request_digest != request.digest:
                    raise IdempotencyConflict(
                        f"the idempotency key {row.idempotency_key!r} was sent with another "
                        "request; give each request a key of its own"
                    )
                number = row.id
                if row.status not in RETRIED:
                    return number, False
                session.execute(update(JobTable).where(JobTable.id == number).values(again))
            _check_room(session, number, nbytes, budget)
            if request.documents:
                contents = enumerate(request.documents)
                rows = [{"job_id": number, "ordinal": n, "content": each} for n, each in contents]
                session.execute(insert(JobDocumentTable), rows)
            add_originals(session, number, request.originals, originals_budget)
            return number, True

    def bring_originals(self, job: int, originals: Mapping[str, bytes], budget: int) -> None:
        """Keep files for the documents that a running job is about to store.

        Args:
            job: The job.
            originals: Contents by their digests.
            budget: Most bytes of all originals. Further originals are not kept.
        """
        with self.database.transaction() as session:
            add_originals(session, job, originals, budget)

    def take(self) -> TakenJob | None:
        """Begin to run the next request, of any namespace, if there is one.

        Takes requests of this session and of processes that have ended, after the earlier jobs of
        their target. Namespaces take turns, and none runs more than `RUNNING` at a time.
        """
        with self.database.reading() as session:
            if session.scalar(self._next()) is None:
                return None
        with self.database.transaction() as session:
            row = session.scalar(self._next().with_for_update(of=JobTable, skip_locked=True))
            if row is None:
                return None
            row.session, row.status, row.started_at = self.session, "running", time.time()
            mine = select(JobDocumentTable.content).where(JobDocumentTable.job_id == row.id)
            contents = session.scalars(mine.order_by(JobDocumentTable.ordinal))
            return TakenJob(
                row.id, row.namespace, row.target, tuple(contents), row.options, row.report
            )

    def any_waits(self) -> bool:
        """Whether a request waits that this process may run, now or after earlier jobs."""
        return bool(self.database.fetch(select(JobTable.id).where(self._is_ours()).limit(1)))

    def _next(self) -> Any:
        served = aliased(JobTable)
        last = select(func.max(served.started_at)).where(served.namespace == JobTable.namespace)
        turn = func.coalesce(last.scalar_subquery(), 0.0)
        running = (
            (served.status == "running")
            & (served.session == self.session)
            & (served.request_digest != "")
        )
        number = select(func.count()).where(served.namespace == JobTable.namespace, running)
        free = number.scalar_subquery() < RUNNING
        first = select(JobTable).where(self._is_ours(), ~_is_behind_another(), free)
        return first.order_by(turn, JobTable.id).limit(1)

    def _is_ours(self) -> ColumnElement[bool]:
        ours = JobTable.session.in_((self.session, NOBODY))
        return and_(JobTable.status == "queued", ours, _IS_REQUEST)

    @contextmanager
    def turn(self, target: str) -> Iterator[int]:
        """Queue a job for the block, wait until its target is free, and yield the job's id.

        An error in the block ends the job; its states are left to the next one.
        """
        with self._ended_by_errors(self.begin(target, 0, status="queued")) as job:
            pause = _FIRST_WAIT
            while not self._start(job):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_WAIT)
            yield job

    def _start(self, job: int) -> bool:
        """Begin to run a job of this session, if it is its turn."""
        mine = and_(JobTable.id == job, JobTable.session == self.session)
        with self.database.reading() as session:
            row = session.scalar(select(JobTable.status).where(mine))
            if row != "queued":
                raise _gone(session, job)
            if session.scalar(select(JobTable.id).where(mine, _is_behind_another())) is not None:
                return False
        self._set(job, "queued", status="running", started_at=time.time())
        return True

    @contextmanager
    def running(self, target: str, modules: int) -> Iterator[int]:
        """Begin a job for the block at once, and yield its id. Errors end it as in `turn`."""
        with self._ended_by_errors(self.begin(target, modules)) as job:
            yield job

    @contextmanager
    def _ended_by_errors(self, job: int) -> Iterator[int]:
        try:
            yield job
        except BaseException as error:
            self.fail(job, error)
            raise

    def begin(self, target: str, modules: int, *, status: str = "running") -> int:
        """Insert a job of this session, and return its id."""
        row = JobTable(
            **self._new(target),
            session=self.session,
            status=status,
            modules=modules,
            started_at=time.time() if status == "running" else None,
        )
        with self.database.transaction() as session:
            namespace_id(session, self.namespace)
            session.add(row)
            session.flush()
            return row.id

    def describe(self, job: int, modules: int, report: Mapping[str, Any]) -> None:
        """Set the number of modules of a running job, and its report. Raises as `expect`."""
        self._set(job, modules=modules, done=0, report=dict(report))

    def finish(self, job: int) -> None:
        """End a job that had nothing to store. Does nothing if it has ended."""
        with self.database.transaction() as session:
            row = session.get(JobTable, job)
            if row is not None and row.status in OPEN and row.session == self.session:
                _place_originals(session, row)
                _end(session, job, "done", "")

    def progress(self, job: int) -> Callable[[int], None]:
        """Return a function that writes how many modules are done, at most once a second."""
        written = time.monotonic()

        def note(done: int) -> None:
            nonlocal written
            if time.monotonic() - written >= PROGRESS_SECONDS:
                written = time.monotonic()
                self._set(job, done=done)

        return note

    def expect(self, job: int, keys: Iterable[KVKey]) -> None:
        """Make a running job an owner of states, before they are encoded.

        Raises:
            JobCanceled: The job was canceled.
            JobTaken: Another process runs the job.
        """
        rows = [{"job_id": job, "key": key} for key in dict.fromkeys(keys)]
        with self.database.transaction() as session:
            mine = and_(JobTable.id == job, JobTable.session == self.session)
            status = select(JobTable.status).where(mine)
            if session.scalar(status.with_for_update(read=True, key_share=True)) != "running":
                raise _gone(session, job)
            insert_new(session, JobStateTable, rows)

    def fail(self, job: int, error: BaseException) -> None:
        """End a job that was not completed. Its states stay for the next one.

        A job that ends because the folder is closed is interrupted. A request that ends because the
        ledger did not answer is queued again, for any process. Does nothing if the job has ended.
        """
        try:
            self._fail(job, error)
        except StoreError as unwritten:  # usually a full disk; `error` matters more
            self._unended[job] = error
            logger.warning("%s; a later heartbeat ends the job %s", unwritten, job)

    def end_late(self) -> None:
        """End the jobs that could not be ended before. Raises `StoreError`."""
        for job, error in list(self._unended.items()):
            self._fail(job, error)
            del self._unended[job]

    def _fail(self, job: int, error: BaseException) -> None:
        stopped = isinstance(error, EngineClosed) or not isinstance(error, Exception)
        with self.database.transaction() as session:
            row = session.get(JobTable, job)
            if row is None or row.session != self.session or row.status not in OPEN:
                return
            if isinstance(error, LedgerUnavailable) and row.request_digest:
                row.status, row.session, row.started_at = "queued", NOBODY, None
                return
            _end(
                session,
                job,
                "interrupted" if stopped else "failed",
                f"{type(error).__name__}: {error}",
            )

    def cancel(self, job: int | str) -> JobRow:
        """End an open job, by its id or public id. Does nothing if it has ended.

        The process that runs it stops before its next portion of modules, and stores nothing.
        Raises `UnknownJob`.
        """
        row = self.get(job)
        with self.database.transaction() as session:
            cancel_jobs(session, JobTable.id == row.id)
        return self.get(row.id)

    def get(self, job: int | str) -> JobRow:
        """Return the job of an id or a public id. Raises `UnknownJob`."""
        id_column = JobTable.id if isinstance(job, int) else JobTable.public_id
        mine = (JobTable.namespace == self.namespace) & (id_column == job)
        found = self._rows(_JOBS.where(mine))
        if not found:
            raise UnknownJob(f"there is no job {job}")
        return found[0]

    def page(self, cursor: str | None = None, limit: int = 100) -> Page[JobRow]:
        """Return the namespace's jobs, the newest first. Raises `InvalidRequest`."""
        mine = JobTable.namespace == self.namespace
        with self.database.reading() as session:
            column = JobTable.public_id
            return read_page(session, _JOBS.where(mine), column, _row, cursor, limit, mine)

    def listed(self) -> list[JobRow]:
        """Return all jobs of all namespaces, the oldest first."""
        return self._rows(_JOBS.order_by(JobTable.id))

    def _rows(self, statement: Any) -> list[JobRow]:
        with self.database.reading() as session:
            return [_row(*row) for row in session.execute(statement)]

    def _new(self, target: str) -> dict[str, Any]:
        return {"target": target, "namespace": self.namespace, "created_at": time.time()}

    def _set(self, job: int, before: str = "running", **values: Any) -> None:
        mine = and_(JobTable.id == job, JobTable.session == self.session, JobTable.status == before)
        with self.database.transaction() as session:
            changed = update(JobTable).where(mine).values(**values).returning(JobTable.id)
            if session.scalar(changed) is None:
                raise _gone(session, job)


def collection_target(collection: str) -> str:
    """Return the target of the jobs that store documents in a collection."""
    return f"collection {collection}"


def cancel_jobs(session: Session, *chosen: ColumnElement[bool]) -> int:
    """End the open jobs among the chosen ones, in whichever session, and return their number."""
    rows = select(JobTable.id).where(JobTable.status.in_(OPEN), *chosen).order_by(JobTable.id)
    open_jobs = session.scalars(rows.with_for_update()).all()
    for job in open_jobs:
        _end(session, job, "canceled", "")
    return len(open_jobs)


def note_deleted(session: Session, namespace: str, target: str, source_ids: Sequence[str]) -> None:
    """Record in the open jobs of a target that documents were deleted and must not be stored."""
    same = (JobTable.namespace == namespace) & (JobTable.target == target)
    rows = select(JobTable).where(same, JobTable.status.in_(OPEN)).order_by(JobTable.id)
    for row in session.scalars(rows.with_for_update()):
        deleted = sorted({*row.options.get("deleted", ()), *source_ids})
        row.options = {**row.options, "deleted": deleted}


def deleted_meanwhile(session: Session, job: int) -> frozenset[str]:
    """Return the documents that were deleted since a job was queued."""
    options = session.scalar(select(JobTable.options).where(JobTable.id == job)) or {}
    return frozenset(options.get("deleted", ()))


def hand_over(session: Session, sessions: Sequence[str]) -> None:
    """Release the requests of sessions that end, so that any process may run them."""
    chosen = JobTable.session.in_(sessions) & JobTable.status.in_(OPEN) & _IS_REQUEST
    again = {"status": "queued", "session": NOBODY, "started_at": None}
    session.execute(update(JobTable).where(chosen).values(again))


def complete(session: Session, job: RunningJob) -> list[KVKey]:
    """Check a job in the transaction that stores its documents, and end it if it `ends`.

    Returns:
        Keys that the job, if it has ended, and earlier jobs of its target owned.

    Raises:
        JobCanceled: The job was canceled.
        JobTaken: Another process runs the job.
    """
    done = session.get(JobTable, job.id, with_for_update=True)
    if done is None or (done.session, done.status) != (job.session, "running"):
        raise _gone(session, job.id)
    _place_originals(session, done)
    if not job.ends:
        return []
    same = (JobTable.namespace == done.namespace) & (JobTable.target == done.target)
    ended = exists().where(JobTable.id == JobStateTable.job_id, same, JobTable.status.not_in(OPEN))
    held = or_(JobStateTable.job_id == job.id, ended)
    keys = list(session.scalars(delete(JobStateTable).where(held).returning(JobStateTable.key)))
    _end(session, job.id, "done", "")
    return keys


def _place_originals(session: Session, job: JobTable) -> None:
    collection = job.target.removeprefix(collection_target(""))
    place_originals(session, job.id, job.namespace, collection)


def _is_behind_another() -> ColumnElement[bool]:
    """Return the condition on queued jobs that another job of their target goes first."""
    other = aliased(JobTable)
    same = and_(other.namespace == JobTable.namespace, other.target == JobTable.target)
    earlier = and_(other.status == "queued", other.id < JobTable.id)
    return exists().where(same, or_(earlier, other.status == "running"))


def _check_room(session: Session, job: int, nbytes: int, budget: int) -> None:
    others = select(func.count(), func.coalesce(func.sum(JobTable.nbytes), 0)).where(
        JobTable.status.in_(OPEN), _IS_REQUEST, JobTable.id != job
    )
    number, taken = session.execute(others).one()
    if number >= MAX_JOBS:
        raise QueueFull(f"{MAX_JOBS} ingestions wait already; try again later")
    if number and taken + nbytes > budget:
        raise QueueFull(
            f"documents of {taken:,} bytes wait to be ingested, and with {nbytes:,} more they "
            f"would exceed the {budget:,} that may; try again later"
        )


def _gone(session: Session, job: int) -> JobCanceled | JobTaken:
    """Return the error of a job that this session no longer runs.

    A deletion of its namespace has canceled a job without a row.
    """
    status = session.scalar(select(JobTable.status).where(JobTable.id == job))
    if status in ("canceled", None):
        return JobCanceled(f"the ingestion {job} was canceled; it stored nothing")
    return JobTaken(
        f"another process goes on with the ingestion {job}: this one was silent for so long that "
        "it counted as dead"
    )


def _end(session: Session, job: int, status: str, error: str) -> None:
    values: dict[str, Any] = {"status": status, "finished_at": time.time(), "error": error}
    if status == "done":
        values["done"] = JobTable.modules
    session.execute(update(JobTable).where(JobTable.id == job).values(values))
    session.execute(delete(JobDocumentTable).where(JobDocumentTable.job_id == job))
    forget_originals(session, JobTable.id == job)
    _forget_jobs(session, job - JOBS_KEPT)


def _forget_jobs(session: Session, last: int) -> None:
    """Delete ended jobs up to an id. Jobs that own states stay for the next of their target."""
    owned = exists().where(JobStateTable.job_id == JobTable.id)
    old = select(JobTable.id).where(JobTable.id <= last, JobTable.status.not_in(OPEN), ~owned)
    free = old.with_for_update(skip_locked=True)  # another session may delete them as well
    session.execute(delete(JobTable).where(JobTable.id.in_(free)))


def _row(row: JobTable, states: int) -> JobRow:
    return JobRow(
        row.id,
        row.public_id,
        row.target,
        row.status,
        row.done,
        row.modules,
        states,
        row.error,
        row.created_at,
        row.started_at,
        row.finished_at,
        row.report,
    )
