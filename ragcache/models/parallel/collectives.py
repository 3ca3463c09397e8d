"""Sums and gathers over the ranks of a model, and the signs of life that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from ragcache.models.parallel.memory import MappedMemory

CONNECTING = timedelta(seconds=60)
"""Time in which all ranks must connect."""
LONGEST_MEETING = timedelta(days=1)
"""Time after which gloo gives up a sum. The leader's watch ends ranks long before."""
SETTLING = 1.0
"""Seconds in which the leader's watch finds the rank that has ended, once others have lost it."""


class RankLost(RuntimeError):
    """A sum, gather or broadcast failed, because another rank has ended."""


class Collectives(Protocol):
    """Joint computations of the ranks of a model, which all make the same calls in the same
    order."""

    rank: int
    ranks: int
    alone: bool
    """Whether calls meet nobody, as in a trial of compiled layers: a sum is the rank's own part."""

    def connect(self) -> None:
        """Meet the other ranks, before all other calls. Waits for them, also if one has ended.

        Raises:
            EngineFailed: A rank could not share memory with the others.
        """

    def begin_pass(self) -> None:
        """Note that a forward pass begins. Waits for nobody."""

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return the sum of every rank's part, which may be written in place. Equal bits on every
        rank."""

    def sum_products(
        self, hidden: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Return the sum of every rank's `linear(hidden, weight)`, as `sum_parts`, and of the
        residual, if there is one, which is the same on every rank."""

    def gather_columns(self, part: Tensor, width: int) -> Tensor:
        """Return [R, width] of every rank's columns, in order, to the leader.

        `part` is [R, ceil(width / ranks)], and may be shorter on the last ranks. Others than the
        leader get their part back.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """Copy a tensor of the leader to the tensors that the others give."""

    def release(self) -> None:
        """Let all calls that wait for a rank that has ended end as well. In any thread."""

    def close(self) -> None:
        """Free the memory that ranks share, once all others have ended."""


_registered: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_handles = count()


def register_collectives(collectives: Collectives) -> int:
    """Return a handle by which `sum_products` finds collectives. They live no longer for it."""
    handle = next(_handles)
    _registered[handle] = collectives
    return handle


@torch.library.custom_op("ragcache::sum_products", mutates_args=())
def sum_products(hidden: Tensor, weight: Tensor, handle: int) -> Tensor:
    """`Collectives.sum_products` as compiled layers and CUDA graphs see it: an opaque operator.

    hidden: [..., in_features / ranks]; weight: [out_features, in_features / ranks].
    """
    return _registered[handle].sum_products(hidden, weight)


@sum_products.register_fake
def _shape_of_sum(hidden: Tensor, weight: Tensor, _handle: int) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0])


@torch.library.custom_op("ragcache::sum_products_add", mutates_args=())
def sum_products_add(hidden: Tensor, weight: Tensor, residual: Tensor, handle: int) -> Tensor:
    """`residual + sum_products(hidden, weight, handle)`, for which compiled layers are rewritten.

    residual: [..., out_features].
    """
    return _registered[handle].sum_products(hidden, weight, residual)


@sum_products_add.register_fake
def _shape_of_both(_hidden: Tensor, _weight: Tensor, residual: Tensor, _handle: int) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


@torch.library.custom_op("ragcache::sum_parts", mutates_args=())
def sum_parts(part: Tensor, handle: int) -> Tensor:
    """`Collectives.sum_parts` as compiled layers and CUDA graphs see it. The part, [..., width], is
    not used afterwards."""
    total = _registered[handle].sum_parts(part)
    return total.clone() if total is part else total


@sum_parts.register_fake
def _shape_of_parts(part: Tensor, _handle: int) -> Tensor:
    return torch.empty_like(part)


class SignsOfLife:
    """Numbers of each rank in shared memory, by which the leader sees whether it works.

    Attributes:
        beats: [ranks] float64, time of the last heartbeat, by `time.monotonic`.
        meetings: [ranks] float64, how many sums, gathers and waits the rank has begun.
        waiting: [ranks] float64, time at which the rank began the one under way, or 0. A rank with
            a device writes the time at which it began its message, or last compiled a part of it,
            and a time to come while it compiles a graph.
        worked: [ranks] float64, seconds from the end of the one before, or from the beginning of
            the pass, to that time.
        uploaded: [ranks] float64, number of the last copies to its device that a rank has made.
        downloaded: [ranks] float64, the same of copies from its device.
        messages: [ranks] float64, how many messages the leader has written, and each follower has
            carried out.
        sleeping: [ranks] float64, 1 where a follower has to be woken for a message.
    """

    def __init__(self, memory: MappedMemory, ranks: int) -> None:
        self.beats, self.meetings, self.waiting, self.worked, *others = memory.head(8, ranks)
        self.uploaded, self.downloaded, self.messages, self.sleeping = others

    def beat(self, rank: int) -> None:
        """Record a heartbeat."""
        self.beats[rank] = time.monotonic()


class GlooCollectives:
    """Collectives of processes on one machine, over gloo's loopback connections."""

    def __init__(self, folder: Path, rank: int, ranks: int, signs: SignsOfLife) -> None:
        """Create the collectives of a rank.

        Args:
            folder: An empty folder that all ranks reach, for their addresses.
            rank: Number of this process.
            ranks: Number of processes.
            signs: Written at each call.
        """
        self.rank, self.ranks, self._signs, self._folder = rank, ranks, signs, folder
        self.alone = False

    def connect(self) -> None:
        """See `Collectives.connect`."""
        from torch import distributed

        c10d: Any = distributed  # whose stubs lack what is used here
        group = c10d.ProcessGroupGloo
        options = group._Options()
        options._devices = [group.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECTING
        store = c10d.FileStore(str(self._folder / "addresses"), self.ranks)
        self._group = group(store, self.rank, self.ranks, options)
        self._sum = c10d.AllreduceOptions()
        self._gather = c10d.GatherOptions()
        self._broadcast = c10d.BroadcastOptions()
        self._gather.rootRank = self._broadcast.rootRank = self._broadcast.rootTensor = 0
        for each in (self._sum, self._gather, self._broadcast):
            each.timeout = LONGEST_MEETING
        self._left = time.monotonic()

    def begin_pass(self) -> None:
        """See `Collectives.begin_pass`."""
        self._left = time.monotonic()

    def sum_parts(self, part: Tensor) -> Tensor:
        """See `Collectives.sum_parts`. Narrow types are summed in float32."""
        if self.alone:
            return part
        wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
        self._meet(lambda: self._group.allreduce([wide], self._sum))
        return wide.to(part.dtype)

    def sum_products(
        self, hidden: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """See `Collectives.sum_products`."""
        total = self.sum_parts(functional.linear(hidden, weight))
        return total if residual is None else residual + total

    def broadcast(self, tensor: Tensor) -> None:
        """See `Collectives.broadcast`."""
        self._meet(lambda: self._group.broadcast([tensor], self._broadcast))

    def gather_columns(self, part: Tensor, width: int) -> Tensor:
        """See `Collectives.gather_columns`."""
        if self.alone or not len(part):
            return part.new_empty(len(part), width)
        most = -(-width // self.ranks)
        content = functional.pad(part, (0, most - part.shape[1])).contiguous().view(torch.uint8)
        parts = [torch.empty_like(content) for _ in range(self.ranks)] if self.rank == 0 else []
        into = [parts] if parts else []
        self._meet(lambda: self._group.gather(into, [content], self._gather))
        if not parts:
            return part
        return torch.cat([each.view(part.dtype) for each in parts], 1)[:, :width]

    def release(self) -> None:
        """Does nothing: a call that waits for an ended rank fails by itself."""

    def close(self) -> None:
        """Does nothing: no memory is shared."""

    def _meet(self, begin: Callable[[], Any]) -> None:
        signs, rank, now = self._signs, self.rank, time.monotonic()
        signs.worked[rank], signs.waiting[rank] = now - self._left, now
        signs.meetings[rank] += 1
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        signs.waiting[rank], self._left = 0.0, time.monotonic()
