"""Worker processes: reuse, limits of time and memory, and their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ragcache.processes import WorkerFailed, WorkerOutOfMemory, WorkerPool, WorkerTimeout

SCRIPT = """
import os
from ragcache.processes import serve

def handle(payload):
    return eval(payload)

serve(handle)
"""
PID = b"str(os.getpid()).encode()"


class Calls:
    """Calls of a pool with limits that only a defect reaches."""

    def __init__(self) -> None:
        self.pool = WorkerPool(SCRIPT, 1)

    def __call__(self, payload: bytes, seconds: float = 60, memory: int = 2**30) -> bytes:
        return self.pool.call(payload, seconds=seconds, memory=memory)

    def waiting(self, seconds: float) -> bytes:
        """A call that waits, without any work, for a second."""
        payload = b"__import__('time').sleep(1) or b'slept'"
        return self.pool.call(payload, seconds=0.5, memory=2**30, wall_seconds=seconds)


@pytest.fixture
def call() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.pool.close()


def test_one_worker_serves_call_after_call(call: Calls) -> None:
    assert call(PID) == call(PID) != str(os.getpid()).encode()
    assert call(b"print('a library prints') or bytes(2**20)") == bytes(2**20)


@pytest.mark.parametrize(
    ("work", "seconds", "error", "message"),
    [
        (b"[0 for _ in iter(int, 1)]", 0.2, WorkerTimeout, "more than 0.2 s"),
        (b"bytes(2**30)", 60, WorkerOutOfMemory, "more than 1,073,741,824 bytes of memory"),
        (b"os.kill(os.getpid(), 11)", 60, WorkerFailed, "ended with signal 11"),
        (b"os._exit(3)", 60, WorkerFailed, "ended with exit status 3"),
    ],
)
def test_a_call_ends_at_its_limit(
    work: bytes, seconds: float, error: type[WorkerFailed], message: str, call: Calls
) -> None:
    before = call(PID)
    with pytest.raises(error, match=message):
        call(work, seconds)
    assert call(PID) != before


@pytest.mark.slow
def test_time_without_work_counts_by_the_clock_only(call: Calls) -> None:
    assert call.waiting(60) == b"slept"
    with pytest.raises(WorkerTimeout, match=r"more than 0\.3 s"):
        call.waiting(0.3)


def test_a_worker_that_took_much_memory_ends(call: Calls) -> None:
    before = call(PID)
    call(b"b'x' * (2**28 + 2**20) and b''")
    assert call(PID) != before


def test_an_idle_worker_that_was_killed_is_replaced(call: Calls) -> None:
    os.kill(int(call(PID)), signal.SIGKILL)
    os.waitid(os.P_PID, call.pool._idle[0].process.pid, os.WEXITED | os.WNOWAIT)
    assert call(PID)


def test_a_forked_child_has_workers_of_its_own(call: Calls) -> None:
    before = call(PID)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if call(PID) != before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert call(PID) == before
