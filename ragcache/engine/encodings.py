"""The queue of what is encoded beside the requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from ragcache.engine.encoder import EncodeJob, Encoding
from ragcache.engine.handle import Channel
from ragcache.models import LanguageModel
from ragcache.states import KVStates

States = Channel[KVStates, None]


@dataclass(slots=True, eq=False)
class _Task:
    """Jobs that one caller waits for together. Their states are handed over in order."""

    jobs: deque[EncodeJob]
    channel: States
    under_way: deque[Encoding] = field(default_factory=deque)


class Encodings:
    """Jobs of callers that wait for states, first come first served, in portions."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._tasks: deque[_Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, jobs: list[EncodeJob], channel: States) -> None:
        self._tasks.append(_Task(deque(jobs), channel))

    def portions(self, budget: int) -> Iterator[tuple[Encoding, int]]:
        """What is encoded next and how many of its tokens, as far as the budget goes."""
        if budget <= 0:
            return
        for task in self._tasks:
            for encoding in chain(tuple(task.under_way), self._begin(task)):
                count = min(encoding.pending, budget)
                if count:
                    budget -= count
                    yield encoding, count
                if not budget:
                    return

    def hand_over(self) -> None:
        """Gives callers the states that are complete; a job without tokens is so at once."""
        for task in list(self._tasks):
            while task.under_way and not task.under_way[0].pending:
                task.channel.put(task.under_way.popleft().states())
            if not task.jobs and not task.under_way:
                self._tasks.remove(task)
                task.channel.finish(None)

    def drop_cancelled(self) -> None:
        """Lets go of jobs whose caller went away."""
        self._tasks = deque(task for task in self._tasks if not task.channel.cancelled)

    def fail_all(self, error: BaseException) -> None:
        """Ends all jobs with `error`."""
        for task in self._tasks:
            task.channel.fail(error)
        self._tasks.clear()

    def _begin(self, task: _Task) -> Iterator[Encoding]:
        while task.jobs:
            task.under_way.append(Encoding(self.model, task.jobs.popleft()))
            yield task.under_way[-1]
