"""Ingestion jobs. What is encoded for documents that are not stored yet belongs to their job, and
so do the documents of one in the background: where its process dies, another one goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.sql import (
    Page,
    after,
    check_limit,
    chunks,
    insert_new,
    insert_returning,
    page_of,
)
from ragcache.db.tables import DEFAULT_NAMESPACE, JobDocumentTable, JobStateTable, JobTable
from ragcache.errors import EngineClosed, IdempotencyConflict, JobTaken, StoreError, UnknownJob
from ragcache.states import KVKey

logger = logging.getLogger(__name__)

OPEN = ("queued", "running")
RETRIED = ("interrupted", "failed")
NOBODY = ""  # the session of a job that waits for any process
PROGRESS_SECONDS = 1.0
_SUPERSEDED = "later requests replaced or deleted its documents before they were stored"


@dataclass(frozen=True, slots=True)
class JobRow:
    """An ingestion. target: `collection NAME` or `schema NAME`. status: queued, running, done,
    failed or interrupted. done, total: its modules, 0 while they are not known. states: that it
    still holds. report: files that were skipped, and documents that vanished, were removed or were
    renamed. Times in Unix seconds."""

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
    report: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ended(self) -> bool:
        return self.status not in OPEN

    @property
    def can_be_retried(self) -> bool:
        """Whether its request, sent again, begins it anew."""
        return self.status in RETRIED


@dataclass(frozen=True, slots=True)
class JobDocument:
    """A document that a job will store. content: for the one who does."""

    source_id: str
    content: str


@dataclass(frozen=True, slots=True)
class AdoptedJob:
    """A job of a process that has ended, which this one goes on with."""

    id: int
    namespace: str
    target: str
    contents: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    report: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class StoringRequest:
    """What an ingestion was to store. source_ids: of its documents, the ids under which they are
    stored and those of the request; queued: whether it is a job that waited, which yields to later
    requests, or comes at once, before earlier jobs that wait; replaces_all: as in `Jobs.queue`."""

    source_ids: Mapping[str, str] = field(hash=False)
    queued: bool
    replaces_all: bool = False

    @property
    def every_id(self) -> list[str]:
        return sorted({*self.source_ids, *self.source_ids.values()})


@dataclass(frozen=True, slots=True)
class WaitingDocuments:
    """What a queued job may still change. source_ids: its documents that no later request replaced
    or deleted; present: those that its sources have, or that later requests store, and that it
    does not remove."""

    source_ids: frozenset[str]
    present: frozenset[str]

    @classmethod
    def of(cls, session: Session, job: int) -> WaitingDocuments:
        rows = select(JobDocumentTable.source_id).where(JobDocumentTable.job_id == job)
        options = session.scalars(select(JobTable.options).where(JobTable.id == job)).one()
        return cls(frozenset(session.scalars(rows)), frozenset(options.get("present", ())))


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

    def queue(
        self, target: str, key: str | None, digest: str, documents: Sequence[JobDocument] = (),
        options: Mapping[str, Any] | None = None, report: Mapping[str, Any] | None = None,
        replaces_all: bool = False,
    ) -> tuple[int, bool]:  # fmt: skip
        """Queues a job, or finds that of the same idempotency key and request. Returns its id, and
        whether it is to be run: new, interrupted or failed. Its documents are kept until it has
        ended, instead of earlier ones of their ids that wait, or of all that wait if it
        `replaces_all`; `options` for a process that goes on with it. Raises
        `IdempotencyConflict`."""
        new = self._new(target, "queued", time.time())
        new |= {"modules": 0, "error": "", "idempotency_key": key, "request_digest": digest}
        new |= {"options": dict(options or {}), "report": dict(report or {})}
        with self.database.transaction() as session:
            number, runs = insert_returning(session, JobTable, new), True
            if number is None:
                assert key is not None
                row = session.scalars(select(JobTable).where(self._requested(key))).one()
                number = row.id
                runs = self._retry(session, _same(row, digest).id, new["options"])
            if runs:
                ids = [document.source_id for document in documents]
                supersede(session, self.namespace, target, ids, replaces_all=replaces_all)
                _keep_documents(session, number, documents)
            return number, runs

    def adopt(self) -> AdoptedJob | None:
        """Takes over the oldest job of any namespace that waits for a process: its own one has
        ended. None where there is none."""
        left = JobTable.status.in_(OPEN) & (JobTable.session == NOBODY)
        waits = or_(left, JobTable.status == "interrupted") & has_documents()
        oldest = select(JobTable).where(waits).order_by(JobTable.id).limit(1)
        with self.database.reading() as session:
            if session.scalar(oldest) is None:
                return None
        with self.database.transaction() as session:
            row = session.scalar(oldest.with_for_update(skip_locked=True))
            if row is None:
                return None
            row.session, row.status, row.error = self.session, "queued", ""
            row.started_at = row.finished_at = None
            mine = select(JobDocumentTable.content).where(JobDocumentTable.job_id == row.id)
            contents = session.scalars(mine.order_by(JobDocumentTable.ordinal))
            return AdoptedJob(
                row.id, row.namespace, row.target, tuple(contents), row.options, row.report
            )

    def leave(self, job: int) -> None:
        """Leaves a job to any process."""
        self._set(job, session=NOBODY)

    def _retry(self, session: Session, job: int, options: Mapping[str, Any]) -> bool:
        """Queues an ended job again; False for one that is done or queued already. It finds the
        states that it still holds."""
        again = {
            "status": "queued", "session": self.session, "error": "", "modules": 0, "done": 0,
            "started_at": None, "finished_at": None, "options": dict(options),
        }  # fmt: skip
        chosen = (JobTable.id == job) & JobTable.status.in_(RETRIED)
        rows = update(JobTable).where(chosen).values(again).returning(JobTable.id)
        return session.scalar(rows) is not None

    def _requested(self, key: str) -> ColumnElement[bool]:
        return and_(JobTable.namespace == self.namespace, JobTable.idempotency_key == key)

    @contextmanager
    def attempts(self, target: str, queued: int | None = None) -> Iterator[RunningJob]:
        """A job while the block tries to do it: a new one, which an error ends, or a queued one,
        which its runner ends. Without `complete`, its states are left to the next job of its
        target."""
        job = RunningJob(self, target, queued, queued)
        try:
            yield job
        except BaseException as error:
            if queued is None and job.id is not None:
                self.fail(job.id, error)
            raise

    @contextmanager
    def running(self, target: str, modules: int) -> Iterator[int]:
        """The id of a new job with one attempt, which is the block."""
        with self.attempts(target) as job:
            yield job.begin(modules)

    def begin_again(self, job: int, modules: int) -> None:
        """Begins another attempt at a running job, whose states it finds."""
        self._set(job, modules=modules, done=0)

    def waiting(self, job: int) -> WaitingDocuments:
        """What a queued job may still change."""
        with self.database.reading() as session:
            return WaitingDocuments.of(session, job)

    def start(self, job: int) -> None:
        """Marks a queued job as running."""
        self._set(job, status="running", started_at=time.time())

    def finish(self, job: int) -> None:
        """Ends a job that had nothing to store; one that has ended stays as it is."""
        with self.database.transaction() as session:
            row = session.get_one(JobTable, job)
            if row.status in OPEN and row.session == self.session:
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

    def note_report(self, job: int, report: Mapping[str, Any]) -> None:
        """Stores what became of files and documents that are not simply stored."""
        self._set(job, report=dict(report))

    def expect(self, job: int, keys: Iterable[KVKey]) -> None:
        """Makes a job an owner of states, before they are encoded."""
        rows = [{"job_id": job, "key": str(key)} for key in dict.fromkeys(keys)]
        with self.database.transaction() as session:
            insert_new(session, JobStateTable, rows)

    def fail(self, job: int, error: BaseException) -> None:
        """Ends a job that was not completed; its states stay for the next one. One that ends
        because the folder is closed is interrupted, one that has ended stays as it is."""
        stopped = isinstance(error, EngineClosed) or not isinstance(error, Exception)
        status = "interrupted" if stopped else "failed"
        try:
            with self.database.transaction() as session:
                row = session.get_one(JobTable, job)
                if row.session == self.session and row.status in OPEN:
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
        """Raises `JobTaken`."""
        mine = (JobTable.id == job) & (JobTable.session == self.session)
        with self.database.transaction() as session:
            changed = update(JobTable).where(mine).values(**values).returning(JobTable.id)
            if session.scalar(changed) is None:
                raise _taken(job)


@dataclass(slots=True)
class RunningJob:
    """A job over the attempts at it. queued: its id where it waited in the queue. id: None until
    the first attempt begins."""

    jobs: Jobs
    target: str
    queued: int | None
    id: int | None

    def begin(self, modules: int) -> int:
        """Begins an attempt that stores so many modules; returns the job's id."""
        if self.id is None:
            self.id = self.jobs.begin(self.target, modules)
        else:
            self.jobs.begin_again(self.id, modules)
        return self.id

    def finish(self) -> None:
        """Ends a new job whose last attempt has nothing to store."""
        if self.queued is None and self.id is not None:
            self.jobs.finish(self.id)


def collection_target(collection: str) -> str:
    """The target of the jobs that store documents in a collection."""
    return f"collection {collection}"


def has_documents() -> ColumnElement[bool]:
    """The condition on jobs whose documents any process can store."""
    return exists().where(JobDocumentTable.job_id == JobTable.id)


def any_wait(session: Session, namespace: str, target: str) -> bool:
    """Whether any job of a target waits for its end, here or in another process."""
    rows = select(JobTable.id).where(_wait(namespace, target)).limit(1)
    return session.scalar(rows) is not None


def _wait(namespace: str, target: str) -> ColumnElement[bool]:
    left = (JobTable.status == "interrupted") & has_documents()
    same = (JobTable.namespace == namespace) & (JobTable.target == target)
    return same & or_(JobTable.status.in_(OPEN), left)


def supersede(
    session: Session, namespace: str, target: str, source_ids: Sequence[str], *,
    replaces_all: bool = False, before: int | None = None,
) -> None:  # fmt: skip
    """Lets a request have its way over the earlier ones of a target: their documents of these ids,
    or all if it `replaces_all`, are forgotten, and no earlier sync removes its own. before: the job
    of the request, where later ones may have come since it began."""
    waits = _wait(namespace, target)
    if before is not None:
        waits &= JobTable.id < before
    rows = select(JobTable).where(waits).order_by(JobTable.id).with_for_update()
    for row in session.scalars(rows):
        if row.options.get("sync"):
            present = sorted({*row.options.get("present", ()), *source_ids})
            row.options = {**row.options, "present": present}
    ids = None if replaces_all else source_ids
    forget_documents(session, namespace, target, ids, before)


def forget_documents(
    session: Session, namespace: str, target: str, source_ids: Sequence[str] | None = None,
    before: int | None = None,
) -> None:  # fmt: skip
    """Forgets documents that wait in jobs of a target, those of some ids or all: others took their
    place, or they were deleted. before: only jobs older than this one."""
    same = (JobTable.namespace == namespace) & (JobTable.target == target)
    if before is not None:
        same &= JobTable.id < before
    waiting = JobDocumentTable.job_id.in_(select(JobTable.id).where(same))
    if source_ids is None:
        session.execute(delete(JobDocumentTable).where(waiting))
    for chunk in chunks(source_ids or ()):
        named = JobDocumentTable.source_id.in_(chunk)
        session.execute(delete(JobDocumentTable).where(waiting, named))
    left = same & JobTable.status.in_(OPEN) & (JobTable.session == NOBODY) & ~has_documents()
    ended = {"status": "interrupted", "finished_at": time.time(), "error": _SUPERSEDED}
    session.execute(update(JobTable).where(left).values(ended))


def hand_over(session: Session, sessions: Sequence[str]) -> None:
    """Leaves the jobs of sessions that end, and whose documents are kept, to any other process."""
    stopped = JobTable.status.in_((*OPEN, "interrupted"))
    chosen = JobTable.session.in_(sessions) & stopped & has_documents()
    again = {"status": "queued", "session": NOBODY, "error": "", "finished_at": None}
    session.execute(update(JobTable).where(chosen).values(again))


def _keep_documents(session: Session, job: int, documents: Sequence[JobDocument]) -> None:
    session.execute(delete(JobDocumentTable).where(JobDocumentTable.job_id == job))
    rows = [
        {"job_id": job, "ordinal": number, "source_id": each.source_id, "content": each.content}
        for number, each in enumerate(documents)
    ]
    if rows:
        session.execute(insert(JobDocumentTable), rows)


def _taken(job: int) -> JobTaken:
    return JobTaken(
        f"another process goes on with the ingestion {job}: this one was silent for so long that "
        "it counted as dead"
    )


def complete(session: Session, job: int, runner: str | None = None) -> list[KVKey]:
    """Ends a job, and the earlier ones of its target that were interrupted, in the transaction that
    stores its documents. Returns the keys that they held. runner: the session that must still run
    it. Raises `JobTaken`."""
    done = session.get_one(JobTable, job, with_for_update=True)
    if runner is not None and done.session != runner:
        raise _taken(job)
    same = (JobTable.namespace == done.namespace) & (JobTable.target == done.target)
    ended = select(JobTable.id).where(same, JobTable.status.not_in(OPEN))
    ids = [job, *session.scalars(ended)]
    held = select(JobStateTable.key).where(JobStateTable.job_id.in_(ids))
    keys = [KVKey(key) for key in session.scalars(held)]
    session.execute(delete(JobStateTable).where(JobStateTable.job_id.in_(ids)))
    _end(session, job, "done", "")
    return keys


def hand_on(session: Session, job: int, states: Mapping[str, Sequence[KVKey]]) -> None:
    """Makes later jobs owners of states that a job has encoded for documents which they have taken
    over, so that equal texts are not encoded again. states: keys by the documents' ids."""
    if not states:
        return
    mine = session.get_one(JobTable, job)
    later = _wait(mine.namespace, mine.target) & (JobTable.id > job)
    locked = select(JobTable.id).where(later).order_by(JobTable.id).with_for_update()
    holders = JobDocumentTable.job_id.in_(list(session.scalars(locked)))
    for chunk in chunks(states):
        taken = select(JobDocumentTable).where(holders, JobDocumentTable.source_id.in_(chunk))
        rows = [
            {"job_id": each.job_id, "key": str(key)}
            for each in session.scalars(taken)
            for key in states[each.source_id]
        ]
        insert_new(session, JobStateTable, rows)


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
    if status != "interrupted":
        session.execute(delete(JobDocumentTable).where(JobDocumentTable.job_id == job))


def _row(row: JobTable, states: int) -> JobRow:
    return JobRow(
        row.id, row.public_id, row.target, row.status, row.done, row.modules, states, row.error,
        row.created_at, row.started_at, row.finished_at, row.report,
    )  # fmt: skip
