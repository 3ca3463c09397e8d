"""The processes that have a ledger open."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import select
from sqlalchemy.orm import Session

from ragcache.db.sql import clock
from ragcache.db.tables import SessionTable

DEAD_SECONDS = 10.0  # after which a silent session of another machine counts as ended


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
    """A process that has the ledger open. silent: seconds since its last heartbeat."""

    machine: str
    pid: int
    silent: float


def is_dead(identity: Identity, silent: float) -> bool:
    """Whether a process has ended or, on another machine, was silent for too long."""
    if identity.machine == _machine():
        return identity.has_ended()
    return silent > DEAD_SECONDS


def living_sessions(session: Session) -> list[LivingSession]:
    """The processes that have the ledger open and live."""
    silent = clock(session) - SessionTable.heartbeat
    rows = select(SessionTable, silent).order_by(SessionTable.machine, SessionTable.pid)
    return [
        LivingSession(row.machine, row.pid, seconds)
        for row, seconds in session.execute(rows)
        if not is_dead(Identity(row.machine, row.pid, row.started), seconds)
    ]


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
