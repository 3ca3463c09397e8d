"""Processes as on several machines: each with a disk of its own, over one PostgreSQL and one remote
tier. Another machine is a namespace of host names where this process may make one; elsewhere the
identity of the process is patched."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragcache.db import sessions
from ragcache.db.database import Database
from tests.ragcache.store.store_fixture import Library

_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


def move_to_machine(name: str) -> None:
    """Lets this process, which has one thread, be one of another machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(name)
    else:
        sessions._machine = lambda: name  # type: ignore[assignment]


@dataclass
class Machine:
    """A process of another machine. It reports lines, and ends by itself or by a signal."""

    name: str
    pid: int
    _reading: int
    lines: list[Any] = field(default_factory=list)

    def read_line(self) -> Any:
        """The next report; None when the process has ended."""
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._reading, 1)
            if not byte:
                return None
            text += byte
        self.lines.append(json.loads(text))
        return self.lines[-1]

    def read_all(self) -> list[Any]:
        """All reports; waits for the end of the process."""
        while self.read_line() is not None:
            pass
        self.wait()
        return self.lines

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        if self.pid:
            os.waitpid(self.pid, 0)
            os.close(self._reading)
            self.pid = 0

    def end(self) -> None:
        """Kills what still runs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


Report = Callable[[Any], None]
Work = Callable[[Library, Report], None]


@dataclass
class Machines:
    """Starts processes with a library each over one ledger."""

    folder: Path
    url: str
    started: list[Machine] = field(default_factory=list)

    def start(self, name: str, work: Work) -> Machine:
        """Forks a process that opens the library on a disk of its own and works."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            report = lambda line: os.write(writing, f"{json.dumps(line)}\n".encode()) and None  # noqa: E731
            try:
                move_to_machine(name)
                library = Library(self.disk(name), self.url, states=400)
                work(library, report)
                library.close()
            except BaseException as error:
                report(f"failed {error!r}")
            finally:
                os._exit(0)
        os.close(writing)
        self.started.append(Machine(name, pid, reading))
        return self.started[-1]

    def disk(self, name: str) -> Path:
        """The state folder of a machine."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def database(self) -> Database:
        return Database.open(self.url)

    def end(self) -> None:
        for each in self.started:
            each.end()


def wait_until(seconds: float, found: Callable[[], Any], every: float = 0.05) -> Any:
    """Looks until something is found, and returns it; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every)
    return value
