"""Ranks of a model as threads of the test's process, with the messages and memory of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.nn import functional

from ragcache.errors import EngineFailed
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.parallel.follower import follow
from ragcache.models.parallel.leader import ParallelLM
from ragcache.models.parallel.memory import MappedMemory, SharedArena
from ragcache.models.parallel.messages import MessageWriter, read_message
from ragcache.models.parallel.passes import RankModel
from ragcache.models.parallel.plans import attach
from ragcache.models.parallel.shards import split_parts


class Meeting:
    """A place at which the threads of all ranks wait for each other, and leave their parts."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.parts: list[Tensor] = [torch.empty(0)] * ranks
        self.sums, self.before_passes = 0, list[int]()


class ThreadCollectives:
    """Collectives of one thread."""

    alone = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.ranks, self._meeting = rank, meeting.barrier.parties, meeting

    def begin_pass(self) -> None:
        if self.rank == 0:
            self._meeting.before_passes.append(self._meeting.sums)

    def sum_parts(self, part: Tensor) -> Tensor:
        self._meeting.sums += self.rank == 0
        return torch.stack(self._exchanged(part)).sum(0)

    def sum_products(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.sum_parts(functional.linear(hidden, weight))

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchanged(tensor.clone())[0])

    def gather_columns(self, part: Tensor, width: int) -> Tensor:
        parts = self._exchanged(part)
        assert sum(each.shape[1] for each in parts) == width
        return torch.cat(parts, 1) if self.rank == 0 else part

    def wait_for_all(self) -> None:
        self._meeting.barrier.wait()

    def _exchanged(self, part: Tensor) -> list[Tensor]:
        self._meeting.parts[self.rank] = part
        self._meeting.barrier.wait()
        parts = list(self._meeting.parts)
        self._meeting.barrier.wait()
        return parts


class _Closed(Exception):
    """The leader has closed the model."""


class ThreadFollowers:
    """The followers of a leader, as threads."""

    def __init__(self, ranks: int) -> None:
        self.failure: EngineFailed | None = None
        self.on_failure: list[Callable[[EngineFailed], object]] = []
        self.meeting = Meeting(ranks)
        self.queues = [SimpleQueue[bytes | None]() for _ in range(1, ranks)]
        self.threads: list[threading.Thread] = []
        self.errors: list[Exception] = []

    def start(self, rank: int, first: bytes, arena: SharedArena) -> None:
        """Start a rank with its part of the model, which a message holds."""
        memory = MappedMemory(arena.descriptor, arena.nbytes)  # a mapping of its own

        def receive() -> bytes:
            message = self.queues[rank - 1].get()
            if message is None:
                raise _Closed
            return message

        def run() -> None:
            try:
                shard, key_heads, logits_width = read_message(first, memory)
                collectives = ThreadCollectives(rank, self.meeting)
                attach(shard, collectives)
                part = RankModel(wrap_causal(shard), key_heads, logits_width, collectives)
                follow(part, memory, receive)
            except _Closed:
                return
            except Exception as error:
                self.errors.append(error)
                self.meeting.barrier.abort()

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def send_all(self, message: bytes) -> None:
        assert not self.errors, self.errors
        for queue in self.queues:
            queue.put(message)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors
        odd = [number for number in self.meeting.before_passes if number % 2]
        assert not odd, "sums of GPUs alternate between two slots, also in graphs"


def split_in_threads(whole: CausalLM, ranks: int) -> ParallelLM:
    """Split a model over threads. Close it to end them."""
    arena, followers = SharedArena.create(), ThreadFollowers(ranks)
    writer = MessageWriter(arena)
    models, heads = split_parts(whole, ranks, arena)
    for rank in range(1, ranks):
        message = models[rank], heads[rank], whole.logits_width
        followers.start(rank, writer.dumps(message), arena)
    collectives = ThreadCollectives(0, followers.meeting)
    attach(models[0], collectives)
    leader = RankModel(wrap_causal(models[0]), heads[0], whole.logits_width, collectives)
    return ParallelLM(whole, leader, models, writer, followers)
