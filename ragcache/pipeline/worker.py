"""The one thread that runs ingestions: what waits for it, in turn of the namespaces."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ragcache.errors import EngineClosed, QueueFull

logger = logging.getLogger(__name__)

WAITING = 256  # jobs, those that run among them
_LOOK_SECONDS = 0.5  # between two looks at a job of another process


@dataclass(slots=True, eq=False)
class Place:
    """Room in the queue for one job. nbytes: of its documents, which are in memory until it has
    ended. taken: whether a job has it."""

    namespace: str
    nbytes: int
    taken: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    job: int
    run: Callable[[], None]
    place: Place
    ended: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs jobs one after another, of each namespace in the order in which they came, the
    namespaces in turn: who sends many keeps nobody waiting for more than one of them. The thread
    begins with the first job. Thread-safe."""

    def __init__(self, budget: int) -> None:
        """budget: of the documents that wait or are being ingested, in bytes. One job alone may
        take more."""
        self.stopping = False
        self._budget = budget
        self._places: list[Place] = []
        self._turns: dict[str, deque[_Task]] = {}
        self._open: dict[int, _Task] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def place(self, namespace: str, nbytes: int) -> Iterator[Place]:
        """A place in the queue, which is given back after the block unless `put` took it. Raises
        `QueueFull` or `EngineClosed`."""
        place = Place(namespace, nbytes)
        with self._changed:
            self.check()
            self._check_room(nbytes)
            self._places.append(place)
        try:
            yield place
        finally:
            if not place.taken:
                self._give_back(place)

    def put(self, job: int, run: Callable[[], None], place: Place) -> None:
        """Queues a job. When the folder is closed before it begins, the end of the session
        interrupts it."""
        with self._changed:
            if self.stopping:
                return
            place.taken = True
            task = _Task(job, run, place)
            self._open[job] = task
            self._turns.setdefault(place.namespace, deque()).append(task)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="ragcache-ingestion", daemon=True
                )
                self._thread.start()

    def wait(self, job: int, seconds: float | None) -> None:
        """Waits for the end of a job; for one that is not here, a moment at most."""
        task = self._open.get(job)
        if task is not None:
            task.ended.wait(seconds)
        else:
            time.sleep(_LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS))

    def check(self) -> None:
        """Raises `EngineClosed` once the thread is to stop."""
        if self.stopping:
            raise EngineClosed("the folder was closed before the ingestion ended")

    def halt(self) -> None:
        """Begins nothing more; what runs stops when it looks."""
        with self._changed:
            self.stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Waits for the thread, and lets those go who wait for jobs."""
        if self._thread is not None:
            self._thread.join()
        for task in self._open.values():
            task.ended.set()

    def _check_room(self, nbytes: int) -> None:
        if len(self._places) >= WAITING:
            raise QueueFull(f"{WAITING} ingestions wait already; try again later")
        taken = sum(place.nbytes for place in self._places)
        if self._places and taken + nbytes > self._budget:
            raise QueueFull(
                f"documents of {taken:,} bytes wait to be ingested, and with {nbytes:,} more they "
                f"would exceed the {self._budget:,} that may; try again later"
            )

    def _give_back(self, place: Place) -> None:
        with self._changed:
            self._places.remove(place)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            except Exception:
                logger.exception("job %s failed", task.job)
            finally:
                self._end(task)

    def _next(self) -> _Task | None:
        """Waits for the job whose turn it is; None once the thread is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopping or self._turns)
            if self.stopping:
                return None
            namespace, waiting = next(iter(self._turns.items()))
            task = waiting.popleft()
            del self._turns[namespace]
            if waiting:
                self._turns[namespace] = waiting  # behind all others
            return task

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._places.remove(task.place)
            if self._open.get(task.job) is task:  # one that failed may be queued again by now
                del self._open[task.job]
        task.ended.set()
