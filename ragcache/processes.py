"""Work in processes of their own, each call with limits of time and memory.

A thread cannot be ended, and its memory cannot be limited. `WorkerPool` therefore passes work on
untrusted input to worker processes, which the kernel ends at a limit. A worker serves one call
after the other, so that only the first call pays for its start.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CALL = struct.Struct("!ddQQ")  # two limits of seconds, bytes of memory, length of the payload
_REPLY = struct.Struct("!?Q")  # whether the worker ends now, length of the reply
WAITING = 10
"""Most seconds of a call for each second of processor time that it may take."""

_HAS_TIMERS = sys.platform != "win32"
_OUT_OF_MEMORY = 77  # exit status
_NEAR = 0.75  # share of the limit of memory
_KEPT_BYTES = 2**28  # of memory; a worker that has taken more ends after its call


class WorkerFailed(Exception):
    """A worker process ended before it replied."""


class WorkerTimeout(WorkerFailed):
    """A call took longer than its limit of time."""


class WorkerOutOfMemory(WorkerFailed):
    """A call took more memory than its limit."""


class WorkerPool:
    """Worker processes for one kind of work. Thread-safe."""

    def __init__(self, script: str, size: int) -> None:
        """Describe the pool. Starts no process.

        Args:
            script: Python source that each worker runs. It calls `serve`.
            size: Most calls that run at the same time. Further calls wait for their turn.
        """
        self._script, self._size = script, size
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # a pipe has one writer
        atexit.register(self.close)

    def _forget(self) -> None:
        self._turns, self._idle = threading.Semaphore(self._size), list[_Worker]()

    def call(
        self, payload: bytes, *, seconds: float, memory: int, wall_seconds: float = math.inf
    ) -> bytes:
        """Pass work to a worker, and return its reply.

        Args:
            payload: The argument of the worker's `handle`.
            seconds: Most seconds of processor time of the work, which other processes do not use
                up.
            memory: Most bytes of the worker's address space.
            wall_seconds: Most seconds of the work, at most `WAITING` times `seconds`. Waiting for
                a turn does not count.

        Raises:
            WorkerTimeout: The work took longer.
            WorkerOutOfMemory: The work took more memory.
            WorkerFailed: The process ended for another reason.
        """
        with self._turns:
            worker = self._take()
            try:
                wall = min(wall_seconds, WAITING * seconds)
                reply, ends = worker.call(payload, seconds, wall, memory)
            except BaseException:
                worker.kill()
                raise
            if ends:
                worker.kill()
            else:
                self._idle.append(worker)
            return reply

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.kill()
        return _Worker(self._script)

    def close(self) -> None:
        """End the idle workers. A later call starts another one."""
        while self._idle:
            self._idle.pop().kill()


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._was_late = False

    def call(
        self, payload: bytes, seconds: float, wall_seconds: float, memory: int
    ) -> tuple[bytes, bool]:
        """Return the reply, and whether the worker has ended after it. Raises `WorkerFailed`."""
        source, sink = self.process.stdin, self.process.stdout
        assert source is not None
        assert sink is not None
        timer = None if _HAS_TIMERS else self._end_after(wall_seconds)
        try:
            source.write(_CALL.pack(seconds, wall_seconds, memory, len(payload)))
            source.write(payload)
            source.flush()
            head = sink.read(_REPLY.size)
        except OSError:  # a broken pipe, which Windows calls an invalid argument
            head = b""
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()  # a timer that ends the process now does so before the reply is used
        if len(head) == _REPLY.size:
            ends, length = _REPLY.unpack(head)
            reply = sink.read(length)
            if len(reply) == length:
                return reply, ends or self._was_late
        raise self._failure(seconds, wall_seconds, memory)

    def _end_after(self, seconds: float) -> threading.Timer:
        """End the process after some seconds, where it cannot end itself."""

        def end() -> None:
            self._was_late = True
            self.process.kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        return timer

    def _failure(self, seconds: float, wall_seconds: float, memory: int) -> WorkerFailed:
        status = self.process.wait()
        clocks = {"SIGPROF": seconds, "SIGALRM": wall_seconds}
        ended_by = {-getattr(signal, name, 0): limit for name, limit in clocks.items()}
        limit = wall_seconds if self._was_late else ended_by.get(status) if status < 0 else None
        if limit is not None:
            return WorkerTimeout(f"it takes more than {limit:g} s")
        if status == _OUT_OF_MEMORY:
            return WorkerOutOfMemory(f"it takes more than {memory:,} bytes of memory")
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        return WorkerFailed(f"the process that handled it ended with {ended}")

    def kill(self) -> None:
        """End the process, and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # a payload was not written, and its pipe is broken
                if pipe is not None:
                    pipe.close()


def has_run_out_of_memory() -> bool:
    """Whether this worker has come near its limit, so that an odd error is for lack of memory.

    C libraries report a failed allocation as any error. Always False on macOS and Windows, where
    memory has no limit.
    """
    if sys.platform != "linux":
        return False
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit != resource.RLIM_INFINITY and _peak("VmPeak") > limit * _NEAR


def _peak(name: str) -> int:
    """Return a peak of this process's memory, in bytes. 0 where Linux's `/proc` is missing.

    `getrusage` would count the parent's memory, too.
    """
    try:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
    except OSError:
        return 0


def serve(handle: Callable[[bytes], bytes]) -> None:
    """Serve the calls of the parent until it closes the pipe. Runs in a worker process.

    The process ends in the middle of a call at the call's limit of time or memory, even if the
    parent has died. On macOS and Windows its memory has no limit. On Windows the parent ends it,
    at the limit of `wall_seconds` alone.

    Args:
        handle: Returns the reply to a payload. It catches all errors but `MemoryError`.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    while len(head := source.read(_CALL.size)) == _CALL.size:
        seconds, wall_seconds, memory, length = _CALL.unpack(head)
        payload = source.read(length)
        _limit_memory(memory)
        _limit_time(seconds, wall_seconds)
        try:
            reply = handle(payload)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        _limit_time(0, 0)
        ends = _peak("VmHWM") > _KEPT_BYTES
        sink.write(_REPLY.pack(ends, len(reply)))
        sink.write(reply)
        sink.flush()
        if ends:
            return


def _limit_memory(nbytes: int) -> None:
    if sys.platform == "linux":  # macOS refuses to lower the limit, and Windows has none
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))


def _limit_time(seconds: float, wall_seconds: float) -> None:
    """End this process after a time. 0 is no limit."""
    if _HAS_TIMERS:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
