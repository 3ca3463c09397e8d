"""The processes that have a ledger open, read from sessions of any revision of its tables: the code
that opens a ledger asks for them before it migrates it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import inspect, select, text
from sqlalchemy.orm import Session

from ragcache.db.sql import clock

DEAD_SECONDS = 10.0  # after which a silent session of another machine counts as ended
_FIRST_FORMAT = 2  # of the code before sessions noted theirs


@dataclass(frozen=True, slots=True)
class Identity:
    """A process: its machine, its number, and when it began."""

    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Identity:
        """Of this process."""
        return cls(_machine(), os.getpid(), _started(psutil.Process()))

    def has_ended(self) -> bool:
        """Whether the process is gone; False for other machines', which cannot be seen."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or _started(process) != self.started
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclass(frozen=True, slots=True)
class LivingSession:
    """A process that has the ledger open. silent: seconds since its last heartbeat; format: of its
    states; revision: of the tables that its code was written for."""

    machine: str
    pid: int
    silent: float
    format: int
    revision: str


def is_dead(identity: Identity, silent: float) -> bool:
    """Whether a process has ended or, on another machine, was silent for too long."""
    if identity.machine == _machine():
        return identity.has_ended()
    return silent > DEAD_SECONDS


def living_sessions(session: Session, revision: str) -> list[LivingSession]:
    """The processes that live. revision: of the ledger, which counts for sessions that note none:
    the columns of both facts were added later."""
    if not inspect(session.connection()).has_table("sessions"):
        return []
    now = session.scalars(select(clock(session))).one()
    living: list[LivingSession] = []
    for row in session.execute(text("SELECT * FROM sessions ORDER BY machine, pid")).mappings():
        silent = now - row["heartbeat"]
        if not is_dead(Identity(row["machine"], row["pid"], row["started"]), silent):
            noted = row.get("format", _FIRST_FORMAT), row.get("revision", revision)
            living.append(LivingSession(row["machine"], row["pid"], silent, *noted))
    return living


def _machine() -> str:
    """Distinguishes process numbers: host, boot and, on Linux, the namespace of the numbers."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(facts)


def _started(process: psutil.Process) -> str:
    """When a process began, in seconds since the boot: the system's clock may be set meanwhile."""
    return f"{process.create_time() - psutil.boot_time():.2f}"
