"""Sessions, one for each process that has the store open, and their claims on keys.

Rows of memory tiers, claims and running jobs belong to a session and end with it. The database's
clock decides whether a session of another machine lives, so that machines' clocks need not agree.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil
from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.jobs import hand_over
from ragcache.db.migrations import HEAD, check_revision, revision_of
from ragcache.db.originals import forget_originals
from ragcache.db.sql import chunks, clock, insert_new, lock_rows
from ragcache.db.summaries import lock_summaries, sum_up
from ragcache.db.tables import DEAD_SECONDS, ClaimTable, JobTable, SessionTable, StateTable
from ragcache.errors import LedgerUnavailable, StoreError
from ragcache.states import KVKey
from ragcache.tiers import memory_tiers

HEARTBEAT_SECONDS = 2.0
_INTERRUPTED = "the process ended before the ingestion did; give it the same documents again"
_LEFTOVER_SECONDS = 30.0  # between two searches for rows without a session
_FIRST_WAIT, _LONGEST_WAIT = 0.01, 0.25  # seconds between reads of another session's claims


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from later processes with the same number."""

    machine: str
    pid: int
    started: str
    """Seconds from the machine's boot to the start of the process. Setting the clock does not
    change it."""

    @classmethod
    def here(cls) -> ProcessIdentity:
        """Identity of the current process."""
        return cls(_machine(), os.getpid(), _started(psutil.Process()))

    def is_dead(self, silent: float) -> bool:
        """Whether the process has ended or, on another machine, was silent for too long."""
        if self.machine != _machine():
            return silent > DEAD_SECONDS
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or _started(process) != self.started
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclass(frozen=True, slots=True)
class LivingSession:
    """A process that has the ledger open."""

    machine: str
    pid: int
    silent: float
    """Seconds since its last heartbeat."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Revision of a ledger, and the processes that use it."""

    revision: str | None
    """Revision of its tables, if it has any."""
    head: str
    """Revision that this version of ragcache reads and writes. It refuses every other one."""
    sessions: tuple[LivingSession, ...]
    """Processes that have the ledger open. Empty for a ledger of another revision."""


def ledger_status(where: Path | str) -> LedgerStatus:
    """Read the revision of a ledger and the processes that have it open. Changes nothing.

    Args:
        where: Path or URL, as for `Database.open`.

    Raises:
        StoreError: The ledger cannot be read.
    """
    with closing(Database.connect(where)) as database, database.reading() as session:
        revision = revision_of(session.connection())
        living = tuple(
            LivingSession(row.machine, row.pid, silent)
            for row, silent, dead in (_judged(session) if revision == HEAD else ())
            if not dead
        )
    return LedgerStatus(revision, HEAD, living)


@dataclass(slots=True)
class Sessions:
    """The session of the current process in a ledger."""

    database: Database
    id: str = field(default_factory=lambda: uuid4().hex)
    generation: int = 1
    """Number of times that the session has begun."""
    _last_beat: float = field(default_factory=time.monotonic)
    _last_look: float = -_LEFTOVER_SECONDS
    _reaps_from: float = 0.0
    _unreleased: set[KVKey] = field(default_factory=set)
    """Keys whose claims ended while the ledger did not answer."""

    def begin(self) -> None:
        """Write the row of this session, and end sessions whose process has died.

        Raises:
            LedgerOfOtherVersion: A later version has upgraded the ledger meanwhile.
        """
        with self.database.transaction() as session:
            check_revision(self.database.name, session.connection())
            session.add(self._row(session))
        self.reap_dead()

    def heartbeat(self) -> bool:
        """Record that this process lives, and end sessions whose process has died.

        A process that was silent itself, because it was halted or the ledger did not answer, first
        gives the others time for a heartbeat.

        Claims that could not be released before are released.

        Returns:
            Whether the session was still alive. If others had ended it because it was silent for
            too long, it begins again under the next generation, without its claims and its rows of
            memory tiers.
        """
        with self.database.transaction() as session:
            mine = update(SessionTable).where(SessionTable.id == self.id)
            beaten = mine.values(heartbeat=clock(session)).returning(SessionTable.generation)
            alive = session.scalar(beaten) is not None
            if not alive:
                check_revision(self.database.name, session.connection())
                self.generation += 1
                session.add(self._row(session))
            KeyLocks(self).release_within(session, late := list(self._unreleased))
        self._unreleased.difference_update(late)
        now = time.monotonic()
        if now - self._last_beat > DEAD_SECONDS / 2:
            self._reaps_from = now + DEAD_SECONDS
        self._last_beat = now
        self.reap_dead()
        return alive

    def end(self) -> None:
        """End this session and everything that belongs to it."""
        with self.database.transaction() as session:
            hand_over(session, [self.id])
            end_sessions(session, [self.id])

    def reap_dead(self) -> None:
        """End the sessions whose process has died, and delete claims and rows without a session.

        A process that was silent may have claimed keys after others ended its session.
        """
        now = time.monotonic()
        if now < self._reaps_from:
            return
        with self.database.reading() as session:
            found = [row.id for row, _, dead in _judged(session) if dead and row.id != self.id]
            orphaned = session.scalar(select(ClaimTable.key).where(_without_session()).limit(1))
        looks = now - self._last_look > _LEFTOVER_SECONDS
        if found or orphaned is not None or looks:
            with self.database.transaction() as session:
                hand_over(session, found)
                end_sessions(session, found)
                _end_leftovers(session, memory=looks)
            self._last_look = now if looks else self._last_look

    def _row(self, session: Session) -> SessionTable:
        me = ProcessIdentity.here()
        return SessionTable(
            id=self.id,
            machine=me.machine,
            pid=me.pid,
            started=me.started,
            heartbeat=clock(session),
            generation=self.generation,
        )


@dataclass(slots=True)
class SessionWatch:
    """Finds sessions whose process a request should not wait for.

    A halted process of this machine is silent, although its session is not ended: it may go on.
    """

    database: Database
    now: Callable[[], float] = time.monotonic
    """Monotonic clock, in seconds."""
    _seen: frozenset[str] = frozenset()
    _ended: frozenset[str] = frozenset()
    _judges_from: float = -math.inf

    def find_silent(self) -> frozenset[str]:
        """Return the sessions that ended, or were silent for more than `DEAD_SECONDS`.

        Sessions that ended before the first call are not known. While the ledger does not answer,
        no session is judged; afterwards each has time for a heartbeat.
        """
        try:
            with self.database.reading() as session:
                silent = clock(session) - SessionTable.heartbeat
                rows = session.execute(select(SessionTable.id, silent))
                found: dict[str, float] = dict(rows.all())
        except LedgerUnavailable:
            self._judges_from = self.now() + DEAD_SECONDS
            return frozenset()
        self._ended = (self._ended | self._seen) - found.keys()
        self._seen = frozenset(found)
        if self.now() < self._judges_from:
            return frozenset()
        return self._ended | {name for name, seconds in found.items() if seconds > DEAD_SECONDS}


def _judged(session: Session) -> Iterator[tuple[SessionTable, float, bool]]:
    """Yield every session, the seconds since its last heartbeat, and whether it is dead."""
    silent = clock(session) - SessionTable.heartbeat
    rows = select(SessionTable, silent).order_by(SessionTable.machine, SessionTable.pid)
    for row, seconds in session.execute(rows):
        process = ProcessIdentity(row.machine, row.pid, row.started)
        yield row, seconds, process.is_dead(seconds)


def _machine() -> str:
    """Return the scope of process numbers: host, boot and, on Linux, their namespace."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(facts)


def _started(process: psutil.Process) -> str:
    return f"{process.create_time() - psutil.boot_time():.2f}"


def end_sessions(session: Session, ids: list[str]) -> None:
    """Delete sessions with their claims and rows of memory tiers. Interrupts their ingestions."""
    if not ids:
        return
    lock_summaries(session)
    lock_rows(session, SessionTable, SessionTable.id.in_(ids))
    _delete_states(session, StateTable.place.in_(ids))
    lock_rows(session, ClaimTable, ClaimTable.session.in_(ids))
    session.execute(delete(ClaimTable).where(ClaimTable.session.in_(ids)))
    open_jobs = JobTable.session.in_(ids) & JobTable.status.in_(("queued", "running"))
    ended = {"status": "interrupted", "finished_at": time.time(), "error": _INTERRUPTED}
    forget_originals(session, open_jobs)
    session.execute(update(JobTable).where(open_jobs).values(ended))
    session.execute(delete(SessionTable).where(SessionTable.id.in_(ids)))


def _end_leftovers(session: Session, *, memory: bool) -> None:
    lock_rows(session, ClaimTable, _without_session())
    session.execute(delete(ClaimTable).where(_without_session()))
    if memory:
        lock_summaries(session)
        living = select(SessionTable.id)
        _delete_states(
            session, StateTable.tier.in_(memory_tiers()) & StateTable.place.not_in(living)
        )


def _delete_states(session: Session, chosen: ColumnElement[bool]) -> None:
    lock_rows(session, StateTable, chosen)
    keys = list(session.scalars(select(StateTable.key).where(chosen)))
    session.execute(delete(StateTable).where(chosen))
    sum_up(session, keys)


def _without_session() -> ColumnElement[bool]:
    return ClaimTable.session.not_in(select(SessionTable.id))


@dataclass(frozen=True, slots=True)
class KeyLocks:
    """The claims of one session on keys, so that no two processes touch a blob at once.

    A blob of a shared tier is written or deleted under the claim on its key. The claim is released
    in the transaction that changes the row, or after it.
    """

    sessions: Sessions

    def acquire(self, keys: Sequence[KVKey]) -> list[KVKey]:
        """Claim the keys that no living session has claimed, and return them."""
        with self.sessions.database.transaction() as session:
            taken = self.acquire_within(session, keys)
        if len(taken) < len(keys):
            self.sessions.reap_dead()
        return taken

    def acquire_within(self, session: Session, keys: Sequence[KVKey]) -> list[KVKey]:
        """Claim keys as `acquire` does, in the caller's transaction."""
        me = self.sessions.id
        self.sessions._unreleased.difference_update(keys)
        busy: set[KVKey] = set()
        for chunk in chunks(keys):
            wanted = sorted(chunk)  # one order everywhere avoids deadlocks in PostgreSQL
            insert_new(session, ClaimTable, [{"key": key, "session": me} for key in wanted])
            busy |= set(self._others(session, wanted))
        return [key for key in keys if key not in busy]

    def release(self, keys: Iterable[KVKey]) -> None:
        """Release claims. If the ledger does not answer, a later heartbeat releases them.

        Raises `StoreError`.
        """
        keys = list(keys)
        if keys:
            try:
                with self.sessions.database.transaction() as session:
                    self.release_within(session, keys)
            except StoreError:
                self.sessions._unreleased.update(keys)
                raise

    def release_within(self, session: Session, keys: Iterable[KVKey]) -> None:
        """Release claims in the caller's transaction."""
        mine = delete(ClaimTable).where(ClaimTable.session == self.sessions.id)
        for chunk in chunks(keys):
            session.execute(mine.where(ClaimTable.key.in_(chunk)))

    def wait_for(self, keys: Sequence[KVKey], seconds: float) -> bool:
        """Wait until a key is free of other sessions' claims.

        Returns whether one was within `seconds`.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_WAIT
        while len(self._claimed_by_others(keys)) == len(set(keys)):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_WAIT)
            self.sessions.reap_dead()
        return True

    def held_among(self, session: Session, keys: Iterable[KVKey]) -> set[KVKey]:
        """Return the keys that this session has claimed. Locks the claims for the transaction."""
        held: set[KVKey] = set()
        for chunk in chunks(sorted(keys)):
            mine = (ClaimTable.session == self.sessions.id) & ClaimTable.key.in_(chunk)
            rows = select(ClaimTable.key).where(mine).order_by(ClaimTable.key)
            held |= set(session.scalars(rows.with_for_update()))
        return held

    def _claimed_by_others(self, keys: Sequence[KVKey]) -> set[KVKey]:
        with self.sessions.database.reading() as session:
            return {key for chunk in chunks(keys) for key in self._others(session, chunk)}

    def _others(self, session: Session, keys: Sequence[KVKey]) -> Iterable[KVKey]:
        others = select(ClaimTable.key).where(ClaimTable.session != self.sessions.id)
        return session.scalars(others.where(ClaimTable.key.in_(keys)))
