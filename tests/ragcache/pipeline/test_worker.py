"""The thread of ingestions: whose turn it is, and what may wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ragcache.errors import EngineClosed, QueueFull
from ragcache.pipeline.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(100)
    yield made
    made.halt()
    made.join()


class Runs:
    """Jobs that write down when they ran; the first waits until all are queued."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.ran = worker, list[int]()
        self.begun, self.go = threading.Event(), threading.Event()

    def put(self, job: int, namespace: str, nbytes: int = 1) -> None:
        with self.worker.place(namespace, nbytes) as place:
            self.worker.put(job, lambda: self._run(job), place)

    def _run(self, job: int) -> None:
        self.begun.set()
        assert self.go.wait(20)
        self.ran.append(job)
        if job < 0:
            raise ValueError("a job that fails")

    def finish(self, last: int) -> list[int]:
        self.go.set()
        self.worker.wait(last, 20)
        return self.ran


def test_namespaces_take_turns(worker: Worker) -> None:
    runs = Runs(worker)
    runs.put(0, "red")
    assert runs.begun.wait(20)
    for job in (1, 2, 3):
        runs.put(job, "red")
    runs.put(10, "blue")
    runs.put(11, "blue")
    runs.put(20, "green")
    assert runs.finish(3) == [0, 1, 10, 20, 2, 11, 3]


def test_bytes_are_counted_until_a_job_has_ended(worker: Worker) -> None:
    runs = Runs(worker)
    runs.put(1, "red", 500)  # alone
    assert runs.begun.wait(20)
    with pytest.raises(QueueFull, match="500 bytes"):
        runs.put(2, "red")
    runs.finish(1)
    for job in (3, 4):
        runs.put(job, "red", 50)
    runs.finish(4)
    runs.put(5, "red", 100)
    assert runs.finish(5) == [1, 3, 4, 5]


def test_a_place_that_no_job_took_is_free_again(worker: Worker) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="no"), worker.place("red", 100):
            raise ValueError("no")
    with worker.place("red", 100), pytest.raises(QueueFull), worker.place("red", 1):
        pass


def test_a_job_that_fails_ends_and_may_come_again(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(worker)
    for _ in range(2):
        runs.put(-1, "red", 100)
        runs.finish(-1)
    assert runs.ran == [-1, -1]
    assert "job -1 failed" in caplog.text


def test_nothing_begins_after_the_halt(worker: Worker) -> None:
    runs = Runs(worker)
    runs.put(1, "red")
    assert runs.begun.wait(20)
    runs.put(2, "red")
    worker.halt()
    runs.go.set()
    worker.join()
    worker.wait(2, 20)
    assert runs.ran == [1]
    with pytest.raises(EngineClosed), worker.place("red", 1):
        pass
