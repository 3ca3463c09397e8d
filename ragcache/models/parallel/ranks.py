"""The followers' processes, and the watch that ends all of them with the first that fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ragcache.errors import EngineFailed
from ragcache.machine import run_in_daemon
from ragcache.models.parallel.collectives import SETTLING, SignsOfLife
from ragcache.models.parallel.memory import SharedArena
from ragcache.openmp import share_of_cores

PATIENCE = 3.0
"""Seconds without a sign of life after which a rank counts as hanging."""
COMPILING = 300.0
"""Seconds that a rank may take for a message while the leader works on it as well, and seconds by
which the time of a graph that a rank compiles is longer."""
_LOOKS = 0.1  # seconds between two looks of the watch
_STARTING = 120.0  # seconds that a follower's imports may take
_ENDING = 3.0  # seconds that a follower may take to end by itself

_SCRIPT = "from ragcache.models.parallel.follower import main; main()"
_DEVICE_SCRIPT = "from ragcache.engine.device_follower import main; main()"


class _Follower:
    """A follower's process, as the leader sees it."""

    def __init__(self, rank: int, ranks: int, arena: SharedArena, folder: str, script: str) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self._lock = threading.Lock()
        self._failure = ""
        numbers = (arena.descriptor, arena.nbytes, theirs.fileno(), rank, ranks, os.getpid())
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path),
        }
        environment.setdefault("OMP_NUM_THREADS", str(share_of_cores(ranks)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, *map(str, numbers), folder],
                pass_fds=(arena.descriptor, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the leader
            )
        self.connection = Connection(ours.detach())

    def failure(self) -> str:
        """Say why the process has ended, or nothing while it runs. Thread-safe."""
        with self._lock:
            status = self.process.poll()
            if status is not None and not self._failure:
                with suppress(OSError, EOFError):
                    while not self._failure and self.connection.poll():
                        self._take_message()
                ended = signal.Signals(-status).name if status < 0 else f"status {status}"
                self._failure = self._failure or f"ended with {ended}"
            return self._failure

    def check_ready(self) -> None:
        """Read a message that has come. Raises `RuntimeError` if it tells of an error."""
        with self._lock:
            self._take_message()
            if self._failure:
                raise RuntimeError(self._failure)

    def _take_message(self) -> None:
        """Messages are empty, or the text of an error."""
        if content := self.connection.recv_bytes():
            self._failure = f"failed: {content.decode()}"

    def end(self, seconds: float) -> None:
        """Kill the process unless it ends within some seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return
        self.process.kill()
        self.process.wait()


class FollowerProcesses:
    """The followers of a leader. They live until the first of them or the leader fails, or until
    `close`.

    Attributes:
        ranks: Number of ranks, with the leader.
        failure: Why the ranks have ended. None while they work.
        on_failure: Functions called with the failure, in any thread.
    """

    def __init__(
        self, ranks: int, arena: SharedArena, signs: SignsOfLife, *, devices: bool = False
    ) -> None:
        """Start the processes.

        Args:
            ranks: Number of ranks, with the leader.
            arena: Memory that they map.
            signs: Signs of life of all ranks, in the arena.
            devices: Whether each rank has a device, whose work the host does not wait for.
        """
        self.failure: EngineFailed | None = None
        self.on_failure: list[Callable[[EngineFailed], object]] = []
        self.ranks, self._signs, self._devices = ranks, signs, devices
        script = _DEVICE_SCRIPT if devices else _SCRIPT
        self._folder = TemporaryDirectory(prefix="ragcache-ranks-")
        self._lock = threading.Lock()
        self._pid = os.getpid()
        now = time.monotonic()
        signs.beats[:] = now + _STARTING
        self._followers = [
            _Follower(rank, ranks, arena, self._folder.name, script) for rank in range(1, ranks)
        ]
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._look, name="ragcache-ranks", daemon=True)
        self._watch.start()

    @property
    def folder(self) -> Path:
        """A folder that all ranks reach."""
        return Path(self._folder.name)

    def check(self) -> None:
        """Raise `EngineFailed` once the ranks have ended."""
        if self.failure is not None:
            raise EngineFailed(str(self.failure)) from self.failure.__cause__

    def sending(self) -> AbstractContextManager[None]:
        """Send a message within the block. An error ends all ranks."""
        return self._ending("a message could not be sent")

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to one follower."""
        with self.sending():
            self._followers[rank - 1].connection.send_bytes(message)

    def send_all(self, message: bytes) -> None:
        """Send a message to all followers."""
        with self.sending():
            for follower in self._followers:
                follower.connection.send_bytes(message)

    def wait_for(self, meeting: Callable[[], object]) -> None:
        """Run something that meets all ranks, and so may never end once one of them has.

        Raises:
            EngineFailed: A rank has failed, or the meeting has. All ranks end.
        """
        ended = run_in_daemon(meeting, "ragcache-meeting")
        with self._ending("the ranks could not meet"):
            while not wait([ended], _LOOKS).done:
                self.check()
            ended.result()

    def wait_until_ready(self) -> None:
        """Return when each follower has said that it has loaded its part. Raises
        `EngineFailed`."""
        for follower in self._followers:
            with self._ending(f"rank {follower.rank} did not start"):
                while not follower.connection.poll(_LOOKS):
                    self.check()
                follower.check_ready()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a pass of the leader. An error within ends all ranks, which are in step no more."""
        with self._ending("a pass of the leader failed"):
            yield

    def close(self) -> None:
        """End the followers. Does nothing in a forked process, whose parent has them."""
        if os.getpid() != self._pid:
            return
        self._end_all(EngineFailed("the ranks have ended, because the model was closed"), _ENDING)
        self._watch.join()
        self._folder.cleanup()

    @contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """Raise the ranks' failure in place of an error, which ends them."""
        self.check()
        try:
            yield
        except BaseException as error:
            # a process that ended is the better reason, and the watch is about to see it
            ended = self._first_failure() or self._soon_failed()
            self._fail(ended or f"{what}: {error!r}", error)
            if isinstance(error, Exception):
                self.check()
            raise

    def _soon_failed(self) -> str:
        if self._closed.wait(SETTLING):
            return ""
        return self._first_failure()

    def _look(self) -> None:
        """Watch the followers until they end."""
        looked = time.monotonic()
        while not self._closed.wait(_LOOKS):
            before, looked = looked, time.monotonic()
            if looked - before > 1.0:  # this process was halted, and perhaps all of them
                self._excuse(looked)
                continue
            reason = self._first_failure() or self._first_hanging(looked)
            if reason:
                self._fail(reason, None)

    def _excuse(self, now: float) -> None:
        """Let the times of all ranks begin now."""
        beats, waiting = self._signs.beats, self._signs.waiting[1:]
        np.maximum(beats, now, out=beats)
        np.maximum(waiting, now, out=waiting, where=waiting > 0)

    def _first_failure(self) -> str:
        for follower in self._followers:
            if reason := follower.failure():
                return f"rank {follower.rank} of {self.ranks} {reason}"
        return ""

    def _first_hanging(self, now: float) -> str:
        """Name a rank without a heartbeat, or one for which the leader waits for much longer than
        its own part took."""
        signs = self._signs
        for rank in range(1, self.ranks):
            if now - signs.beats[rank] > PATIENCE:
                return f"rank {rank} of {self.ranks} gives no sign of life"
        if self._devices:
            return self._first_late(now)
        began = signs.waiting[0]
        if began and now - began > max(PATIENCE, 3 * signs.worked[0]):
            for rank in range(1, self.ranks):
                if signs.meetings[rank] < signs.meetings[0]:
                    return f"rank {rank} of {self.ranks} hangs in a pass"
        return ""

    def _first_late(self, now: float) -> str:
        """Name a rank that launches work for much longer than the leader does. Graphs that it
        compiles have longer (`Compilations`)."""
        signs = self._signs
        patience = COMPILING if signs.waiting[0] else max(PATIENCE, 3 * signs.worked[0])
        for rank in range(1, self.ranks):
            began = signs.waiting[rank]
            if began and now - began > patience:
                return f"rank {rank} of {self.ranks} hangs in a pass"
        return ""

    def _fail(self, reason: str, cause: BaseException | None) -> None:
        failure = EngineFailed(
            f"tensor parallel has ended: {reason}. Close the folder, and open it again"
        )
        failure.__cause__ = cause
        if self._end_all(failure, 0.0):
            for call in self.on_failure:
                call(failure)

    def _end_all(self, failure: EngineFailed, seconds: float) -> bool:
        """End all followers. Returns whether they had not ended before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
            self._closed.set()
            for follower in self._followers:
                with suppress(OSError):
                    follower.connection.close()
            for follower in self._followers:
                follower.end(seconds)
        return True
