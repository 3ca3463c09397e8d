"""Encoding modules to states, in portions beside the requests that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.handle import RequestChannel
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.engine.request import Segment
from ragcache.models import LanguageModel
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """Tokens to encode from position `start`, after `root` (the preamble) if given.

    Without a root this is Prompt Cache's independent encoding (§3.3); with one, the attention
    sink and the instructions are where the model expects them. `position_ids` ascend from
    `start`; None where they have no gaps.
    """

    token_ids: Sequence[int]
    start: int = 0
    root: Segment | None = None
    position_ids: Sequence[int] | None = None

    @property
    def positions(self) -> Sequence[int]:
        if self.position_ids is not None:
            return self.position_ids
        return range(self.start, self.start + len(self.token_ids))


class Encoding:
    """An encode job under way, computed in portions of any size."""

    def __init__(self, model: LanguageModel, job: EncodeJob) -> None:
        self.job = job
        self.kv = ContiguousKV.allocate(model, len(job.token_ids))

    @property
    def pending(self) -> int:
        return len(self.job.token_ids) - self.kv.length

    def next_chunk(self, count: int) -> ScheduledChunk:
        begin = self.kv.length
        here = slice(begin, begin + count)
        root = () if self.job.root is None else (self.job.root,)
        tokens, positions = self.job.token_ids[here], self.job.positions[here]
        return ScheduledChunk(root, self.kv, tokens, positions, wants_logits=False)

    def computed(self, count: int) -> None:
        begin = self.kv.length
        self.kv.advance(self.job.positions[begin : begin + count])

    def states(self) -> KVStates:
        assert self.pending == 0
        return self.kv.as_states(self.job.start)


StatesChannel = RequestChannel[KVStates, None]


@dataclass(slots=True, eq=False)
class _EncodeTask:
    """The jobs of one call. Their states are handed over in order."""

    jobs: deque[EncodeJob]
    channel: StatesChannel
    running: deque[Encoding] = field(default_factory=deque)


class EncodeQueue:
    """Jobs of callers that wait for states, first come first served, in portions."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._tasks: deque[_EncodeTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def add_jobs(self, jobs: list[EncodeJob], channel: StatesChannel) -> None:
        self._tasks.append(_EncodeTask(deque(jobs), channel))

    def portions(self, budget: int) -> Iterator[tuple[Encoding, int]]:
        """The next encodings with the number of tokens to compute, within the budget."""
        if budget <= 0:
            return
        for task in self._tasks:
            for encoding in chain(tuple(task.running), self._begin(task)):
                count = min(encoding.pending, budget)
                if count:
                    budget -= count
                    yield encoding, count
                if not budget:
                    return

    def hand_over(self) -> None:
        """Gives callers the states that are complete, as those of an empty job are at once."""
        for task in list(self._tasks):
            while task.running and not task.running[0].pending:
                task.channel.put(task.running.popleft().states())
            if not task.jobs and not task.running:
                self._tasks.remove(task)
                task.channel.finish(None)

    def drop_cancelled(self) -> None:
        """Removes jobs whose caller has cancelled."""
        self._tasks = deque(task for task in self._tasks if not task.channel.cancelled)

    def fail_all(self, error: BaseException) -> None:
        """Ends all jobs with `error`."""
        for task in self._tasks:
            task.channel.fail(error)
        self._tasks.clear()

    def _begin(self, task: _EncodeTask) -> Iterator[Encoding]:
        while task.jobs:
            task.running.append(Encoding(self.model, task.jobs.popleft()))
            yield task.running[-1]
