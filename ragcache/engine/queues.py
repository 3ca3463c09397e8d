"""The queues of an engine: requests that wait and run, and modules that wait to be encoded."""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakSet

import torch

from ragcache.engine.config import EngineStats
from ragcache.engine.constraint import PROCESS_ENDS
from ragcache.engine.encoding import EncodeJob, Encoding, StatesChannel, with_arrival
from ragcache.engine.handle import RequestChannel
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.request import ComputedTokens, Request, RequestOutput, TokenDelta
from ragcache.engine.sequence import Sequence, SequenceGroup
from ragcache.errors import DeadlineExceeded, EncodingOutOfMemory, UnusableLogits
from ragcache.models import CausalLM
from ragcache.states import KVStates

logger = logging.getLogger(__name__)

AnswerChannel = RequestChannel[TokenDelta, RequestOutput]


class RequestQueue:
    """Sequences that wait or run: how they enter, make room for others, and leave.

    A sequence that runs has blocks. Both lists are sorted by seniority, oldest first.

    Args:
        kv_manager: Blocks of the sequences.
        stats: Counters of the engine.
        most_running: Maximum number of running sequences.
        states_dtype: Dtype of states that callers keep (`Request.keep`).

    Attributes:
        waiting: Sequences that wait.
        running: Sequences that run.
        max_running: Maximum number of running sequences at present.
    """

    def __init__(
        self,
        kv_manager: KVCacheManager,
        stats: EngineStats,
        most_running: int,
        states_dtype: torch.dtype,
    ) -> None:
        self._kv_manager, self._stats = kv_manager, stats
        self._most_running, self._states_dtype = most_running, states_dtype
        self._last_number = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.max_running = most_running

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.running, self.waiting)

    def add_request(self, request: Request, channel: AnswerChannel, submitted_at: float) -> None:
        """Add the first sequence of a request."""
        group = SequenceGroup(request, channel, submitted_at)
        self._enqueue(self._new_sequence(group, 0))

    def admit_sequences(self, numbers: Collection[int], now: float) -> list[Sequence]:
        """Move waiting sequences with these numbers to the running ones, and return them."""
        if not numbers:
            return []
        entering = set(numbers)
        admitted = [each for each in self.waiting if each.number in entering]
        self.waiting = [each for each in self.waiting if each.number not in entering]
        for sequence in admitted:
            insort(self.running, sequence, key=_order)
        for sequence in admitted:
            found = self._kv_manager.admit_sequence(sequence)
            group = sequence.group
            group.channel.started = True
            if not group.admitted_at:
                group.admitted_at = now
                group.shared_tokens = found
                self._stats.admitted += 1
                self._stats.queued += now - group.submitted_at
            self._stats.shared_tokens += found
        return admitted

    def fork_sequence(self, leader: Sequence) -> None:
        """Add the other answers of a request whose prompt has just been computed. They run at once
        while there is room, and wait otherwise."""
        leader.forks = False
        for index in range(1, leader.request.n):
            sequence = self._new_sequence(leader.group, index)
            free = len(self.running) < self._most_running
            if free and self._kv_manager.fork_sequence(leader, sequence):
                insort(self.running, sequence, key=_order)
            else:
                self._enqueue(sequence)

    def preempt_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence, which then waits again."""
        self.running.remove(sequence)
        self._kv_manager.release_sequence(sequence)
        self._enqueue(sequence)
        self._stats.preempted += 1

    def admit_no_more(self) -> None:
        """Admit no more sequences until one of the running ones ends or is dropped."""
        self.max_running = len(self.running)

    def retire_sequences(self, accepted: list[Sequence]) -> None:
        """Remove finished sequences from the running ones, and free their blocks.

        Does nothing if none of the sequences `accepted` has finished.
        """
        if not [sequence for sequence in accepted if sequence.finished]:  # as in most steps
            return
        for sequence in self.running:
            if sequence.finished:
                self.keep_states(sequence)
                self._kv_manager.release_sequence(sequence)
        self.running = [each for each in self.running if not each.finished]
        self.max_running = self._most_running

    def keep_states(self, sequence: Sequence) -> None:
        """Offer the states of a finished answer to its caller, once."""
        keep = sequence.request.keep
        if keep is None or sequence.kept or sequence.private is None:
            return
        sequence.kept = True
        computed = min(sequence.computed, len(sequence.tokens))

        def read(begin: int, end: int) -> KVStates:
            copy = self._kv_manager.copy_states(sequence, begin, end, self._states_dtype)
            return with_arrival(copy)

        try:
            keep(ComputedTokens(sequence.tokens[:computed], sequence.positions[:computed], read))
        except PROCESS_ENDS:
            raise
        except BaseException:  # the answer is right without it
            logger.exception("the states of an answer are not kept")

    def drop_gone(self, now: float) -> None:
        """Remove canceled requests; fail requests that are past their deadline."""
        gone = [
            sequence.group
            for sequence in self
            if sequence.group.channel.cancelled or now >= sequence.group.expires_at
        ]
        for group in gone:
            if group.channel.cancelled:
                self._drop(group)
            else:
                started = any(sequence.group is group for sequence in self.running)
                self.fail_request(group, _too_late(group, started=started))

    def fail_request(self, group: SequenceGroup, error: BaseException) -> None:
        """Remove the sequences of a request, and tell its caller why."""
        if isinstance(error, UnusableLogits):
            for sequence in self.running:
                if sequence.group is group:
                    self._kv_manager.disown_blocks(sequence)
        self._drop(group)
        group.channel.fail(error)

    def fail_all(self, error: BaseException) -> None:
        """Tell the callers of all requests why they failed. Frees nothing, and so cannot fail."""
        for sequence in self:
            sequence.group.channel.fail(error)

    def clear(self) -> None:
        """Remove all sequences and free their blocks."""
        for sequence in self:
            sequence.finished = True
            self._kv_manager.release_sequence(sequence)
        self.running, self.waiting = [], []
        self.max_running = self._most_running

    def _drop(self, group: SequenceGroup) -> None:
        for sequence in self:
            if sequence.group is group:
                sequence.finished = True
                self._kv_manager.release_sequence(sequence)
        running = [each for each in self.running if each.group is not group]
        if len(running) < len(self.running):  # a request that only waited held no memory
            self.max_running = self._most_running
        self.running = running
        self.waiting = [each for each in self.waiting if each.group is not group]

    def _new_sequence(self, group: SequenceGroup, index: int) -> Sequence:
        self._last_number += 1
        return Sequence(group, index, self._last_number)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)


def _order(sequence: Sequence) -> tuple[float, int]:
    return (sequence.group.seniority, sequence.number)


def _too_late(group: SequenceGroup, *, started: bool) -> DeadlineExceeded:
    where = "while it ran" if started else "while it waited in the queue"
    return DeadlineExceeded(
        f"the request's {group.request.timeout} s were over {where}; give it more time, or fewer "
        "requests to the engine"
    )


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
