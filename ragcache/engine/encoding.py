"""Encoding modules to states, in portions between the steps of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakSet

import torch

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.handle import RequestChannel, Waiter
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.engine.recurrent import EncodedKV
from ragcache.engine.request import Segment, check_composes, check_tokens
from ragcache.errors import EncodingOutOfMemory
from ragcache.machine import new_event
from ragcache.models import CausalLM
from ragcache.states import Arrival, KVStates


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """A module to encode.

    Without a root this is Prompt Cache's independent encoding (§3.3). With one, the attention sink
    and the instructions are where the model expects them.
    """

    token_ids: Sequence[int]
    """Tokens of the module."""
    start: int = 0
    """Position of the first token."""
    root: Segment | None = None
    """Preamble that the tokens attend to. None encodes them independently."""
    position_ids: Sequence[int] | None = None
    """Ascending positions from `start` on. Defaults to consecutive ones."""

    @property
    def positions(self) -> Sequence[int]:
        """Position of each token."""
        if self.position_ids is not None:
            return self.position_ids
        return range(self.start, self.start + len(self.token_ids))

    def computed_bytes(self, model: CausalLM) -> int:
        """Memory of the states while they are computed."""
        return len(self.token_ids) * model.computed_bytes_per_token + model.map_bytes


def check_job(job: EncodeJob, model: CausalLM) -> None:
    """Raise `InvalidRequest`, `PromptTooLong` or `UnsupportedModel` for a job that the model cannot
    compute."""
    check_composes(model)
    check_tokens(job.token_ids, job.positions, vocabulary=model.vocabulary, window=model.window)


class Encoding:
    """A job in progress, computed in portions of any size."""

    def __init__(self, model: CausalLM, job: EncodeJob) -> None:
        self.job = job
        kind = EncodedKV if model.recurrent_bytes else ContiguousKV
        self.kv = kind.allocate(model, len(job.token_ids))
        root = None if job.root is None else job.root.states.recurrent
        if isinstance(self.kv, EncodedKV) and root is not None:
            self.kv.root = (root,)
        self.nbytes = job.computed_bytes(model)
        self._steps = 0  # under way

    @property
    def pending(self) -> int:
        """Number of tokens for which no step has been launched."""
        return len(self.job.token_ids) - self.kv.length

    @property
    def complete(self) -> bool:
        """Whether all states have been computed."""
        return not self.pending and not self._steps

    def next_chunk(self, count: int) -> ScheduledChunk:
        """The next `count` tokens, as a chunk of a step."""
        begin = self.kv.length
        here = slice(begin, begin + count)
        root = () if self.job.root is None else (self.job.root,)
        tokens, positions = self.job.token_ids[here], self.job.positions[here]
        return ScheduledChunk(root, self.kv, tokens, positions, wants_logits=False)

    def launched(self, count: int) -> None:
        """Record that a step with the next `count` tokens was launched."""
        begin = self.kv.length
        self.kv.advance(self.job.positions[begin : begin + count])
        self._steps += 1

    def computed(self) -> None:
        """Record that the oldest launched step has been computed."""
        self._steps -= 1

    def states(self) -> KVStates:
        assert self.complete
        return self.kv.as_states(self.job.start)


_TAKEN = KVStates(torch.empty(0), torch.empty(0), 0)


class StatesChannel(RequestChannel[KVStates, None]):
    """Hands each module's states to its caller once.

    An iteration takes the states, so that their memory ends with the caller. The channel wakes the
    engine when a caller takes states or starts to wait.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._untaken = 0

    @property
    def untaken_bytes(self) -> int:
        """Bytes of finished states that the caller has not taken."""
        return 0 if self.cancelled else self._untaken

    def put(self, event: KVStates) -> None:
        with self._lock:
            self._untaken += event.nbytes
        super().put(event)

    def event(self, number: int) -> KVStates:
        with self._lock:
            states, self._events[number] = self._events[number], _TAKEN
            assert states is not _TAKEN, "encoded states are handed over once"
            self._untaken -= states.nbytes
        self._wake()
        return states

    def add_waiter(self, waiter: Waiter) -> None:
        super().add_waiter(waiter)
        self._wake()


@dataclass(slots=True, eq=False)
class _EncodeTask:
    """The jobs of one call. Their states are handed over in order."""

    jobs: deque[EncodeJob]
    channel: StatesChannel
    running: deque[Encoding] = field(default_factory=deque)
    short: bool = False
    """Whether the device ran out of memory for the next job, which then waits until it would be
    alone."""


class EncodeQueue:
    """Queue of modules to encode, first come, first served.

    A job starts when its states fit into the memory budget, together with the jobs in progress and
    the finished states that callers have not taken, or when nothing else is held. One job of a
    waiting caller starts in any case, so that no caller waits for another to take its states.
    """

    def __init__(self, model: CausalLM, budget_bytes: int) -> None:
        self.model, self.budget_bytes = model, budget_bytes
        self._tasks: deque[_EncodeTask] = deque()
        self._channels: WeakSet[StatesChannel] = WeakSet()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def held_bytes(self) -> int:
        """Bytes of jobs in progress and of finished states that no caller has taken."""
        rooms = sum(each.nbytes for task in self._tasks for each in task.running)
        return rooms + sum(channel.untaken_bytes for channel in self._channels)

    @property
    def is_stalled(self) -> bool:
        """Whether progress depends on a caller: to take states, to wait or to cancel."""
        return bool(self._tasks) and not any(
            task.running or not task.jobs or self._may_begin(task) for task in self._tasks
        )

    def add_jobs(self, jobs: list[EncodeJob], channel: StatesChannel) -> None:
        self._tasks.append(_EncodeTask(deque(jobs), channel))
        self._channels.add(channel)

    def portions(self, budget: int) -> Iterator[tuple[Encoding, int]]:
        """Yield the next encodings and the tokens that each computes, within a token budget."""
        if budget <= 0:
            return
        for task in tuple(self._tasks):
            for encoding in chain(tuple(task.running), self._begin(task)):
                count = min(encoding.pending, budget)
                if count:
                    budget -= count
                    yield encoding, count
                if not budget:
                    return

    def hand_over(self) -> None:
        """Hand completed states to their callers."""
        for task in list(self._tasks):
            while task.running and task.running[0].complete:
                task.channel.put(with_arrival(task.running.popleft().states()))
            if not task.jobs and not task.running:
                self._tasks.remove(task)
                task.channel.finish(None)

    def drop_cancelled(self) -> None:
        """Remove the jobs of canceled calls."""
        self._tasks = deque(task for task in self._tasks if not task.channel.cancelled)

    def fail_all(self, error: BaseException) -> None:
        """Fail all jobs with `error`."""
        for task in self._tasks:
            task.channel.fail(error)
        self._tasks.clear()

    def _begin(self, task: _EncodeTask) -> Iterator[Encoding]:
        while task.jobs and self._may_begin(task):
            try:
                encoding = Encoding(self.model, task.jobs[0])
            except torch.OutOfMemoryError as error:
                self._run_short(task, error)
                return
            task.jobs.popleft()
            task.short = False
            task.running.append(encoding)
            yield encoding

    def _may_begin(self, task: _EncodeTask) -> bool:
        held = self.held_bytes
        if not held:
            return True
        if task.short:
            return False
        fits = held + task.jobs[0].computed_bytes(self.model) <= self.budget_bytes
        return fits or (not task.running and task.channel.waiter_count > 0)

    def _run_short(self, task: _EncodeTask, error: torch.OutOfMemoryError) -> None:
        """Make a job wait for all others. Fails its call if there is no other."""
        if self.held_bytes:
            task.short = True
            return
        tokens = len(task.jobs[0].token_ids)
        nbytes = task.jobs[0].computed_bytes(self.model)
        failure = EncodingOutOfMemory(
            f"{self.model.device} has no room for the states of {tokens:,} tokens, which take "
            f"{nbytes:,} bytes; give a smaller module_tokens, or "
            "leave more of the device free with lower device_bytes and private_bytes"
        )
        failure.__cause__ = error
        self._tasks.remove(task)
        task.channel.fail(failure)


def with_arrival(states: KVStates) -> KVStates:
    """Attach an event that marks the end of the states' computation on a GPU."""
    if not states.keys.is_cuda:
        return states
    device = states.keys.device
    with torch.cuda.device(device):
        event = new_event()
        stream = torch.cuda.current_stream(device)
        event.record(stream)
    return replace(states, arrival=Arrival([event], stream=stream))
