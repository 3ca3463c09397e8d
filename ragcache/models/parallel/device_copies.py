"""Copies of states between the tiers of several ranks: each rank copies its own heads.

The leader's tiers choose the copies. A follower copies the same places, on streams of its own:
uploads follow all work that it has queued before, and a step waits for the uploads that it reads,
layer by layer. So nothing depends on how far a follower lags behind.

Copies between main memory and devices cross as numbers (`Crossings`), of which a rank reads its
addresses without looking at a tensor: a step waits for the last of them to be queued.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import EngineFailed
from ragcache.machine import new_event, new_stream
from ragcache.models.parallel.collectives import SignsOfLife
from ragcache.models.parallel.device_memory import FollowerRegions
from ragcache.models.parallel.layer_copies import (
    SOURCE,
    TARGET,
    Runs,
    copy_runs,
    pieces_of,
    runs_of,
)
from ragcache.models.parallel.memory import HEAD, MappedMemory
from ragcache.states import Arrival
from ragcache.states.kv import CopyEvent

Way = Literal["compute", "upload", "download"]
CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies the second tensor to the first."""
_NAP = 50e-6  # seconds between two looks at a follower's copies


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """Copies of states between the memory of all ranks and each rank's own heads on its device."""

    runs: Runs
    """The leader's copies. Addresses in main memory are places in the memory of all ranks, of the
    first of all heads."""
    head_bytes: NDArray[np.int64]
    """[n], bytes of a head in main memory. 0 where each rank has all heads."""
    up: bool
    """Whether the copies go to the devices."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]], address: int, *, up: bool) -> Crossings:
        """Describe copies, each to the first from the second tensor.

        Args:
            pairs: Tensors [L, H, S, D], of all heads in the memory of all ranks and of the leader's
                heads on its device.
            address: Address of the memory of all ranks.
            up: Whether the copies go to the devices.
        """
        runs = runs_of(pairs)
        runs[:, SOURCE if up else TARGET] -= address
        heads = [(each[1 - up].shape[1], each[up]) for each in pairs]
        sizes = [
            each.stride(1) * each.itemsize if each.shape[1] > own else 0 for own, each in heads
        ]
        return cls(runs, np.array(sizes, np.int64), up)

    def addressed(
        self, address: int, first_head: int, move: Callable[[NDArray[np.int64]], None]
    ) -> Runs:
        """Return the copies of a rank.

        Args:
            address: Address of the memory of all ranks.
            first_head: The rank's first key head.
            move: Puts addresses of the rank's device in place of the leader's.
        """
        here, there = (SOURCE, TARGET) if self.up else (TARGET, SOURCE)
        runs = self.runs.copy()
        runs[:, here] += address + first_head * self.head_bytes
        move(runs[:, there])
        return runs


@dataclass(frozen=True, slots=True)
class TierCopies:
    """Message: copies of states."""

    way: Way
    number: int
    pairs: Sequence[tuple[Tensor, Tensor]]
    """Copies on the devices, each to the first from the second tensor."""
    crossings: Crossings
    """Copies between main memory and the devices."""
    ends: Sequence[int] = ()
    """Layers with which pieces of an upload end, for which steps wait one by one."""

    def run(self, follower: Any) -> None:
        """Copy the heads of a follower."""
        follower.copies.run(self, follower.regions)


@dataclass(frozen=True, slots=True)
class PinMemory:
    """Message: register a part of the ranks' memory with CUDA."""

    place: int
    nbytes: int

    def run(self, follower: Any) -> None:
        """Register the follower's mapping."""
        follower.copies.pin(self.place, self.nbytes)


@dataclass(frozen=True, slots=True)
class UnpinMemory:
    """Message: end the registration of a part of the ranks' memory."""

    place: int

    def run(self, follower: Any) -> None:
        """End the registration of the follower's mapping."""
        follower.copies.unpin(self.place)


class RankedEvent:
    """The end of a copy on all ranks (`CopyEvent`). Streams of the leader wait for its own part.

    Args:
        event: End of the leader's part. None if it has ended.
        done: [ranks], numbers of the last copies that ranks have made.
        number: Number of the copy.
        failure: Returns why the ranks have ended.
    """

    def __init__(
        self,
        event: CopyEvent | None,
        done: NDArray[np.float64],
        number: int,
        failure: Callable[[], EngineFailed | None],
    ) -> None:
        self._event, self._done, self._number, self._failure = event, done, number, failure

    def query(self) -> bool:
        """Return whether all ranks have copied."""
        ours = self._event is None or self._event.query()
        return ours and bool(self._done[1:].min() >= self._number)

    def wait(self, stream: Any) -> None:
        """Make a stream of the leader wait for the leader's part."""
        if self._event is not None:
            self._event.wait(stream)

    def synchronize(self) -> None:
        """Return when all ranks have copied. Raises `EngineFailed` once a rank has failed."""
        if self._event is not None:
            self._event.synchronize()
        while self._done[1:].min() < self._number:
            if (failure := self._failure()) is not None:
                raise EngineFailed(str(failure))
            time.sleep(_NAP)


class LeaderCopies:
    """The leader's copies (`DeviceParallelLM.copies`). Tiers call it while they hold no other lock
    than their own.

    Args:
        model: The leader's model.
        signs: Signs of life, in which followers count their copies.
    """

    def __init__(self, model: Any, signs: SignsOfLife) -> None:
        self._model, self._channel, self._signs = model, model.channel, signs
        self._numbers = 0
        self._arrivals: WeakKeyDictionary[Arrival, int] = WeakKeyDictionary()
        self._staged = deque[tuple[int, Tensor]]()
        self._late = deque[tuple[int, CopyEvent]]()  # uploads, and the ends of the leader's parts

    @property
    def heads(self) -> int:
        """Key heads of a rank's states."""
        return int(self._model.num_kv_heads)

    @property
    def whole_heads(self) -> int:
        """Key heads of the states of all ranks."""
        return int(self._model.sizes.num_kv_heads)

    def new_memory(self, nbytes: int) -> Tensor:
        """Allocate zeros, uint8 [nbytes], on the devices of all ranks."""
        regions = self._channel.regions
        memory: Tensor = regions.empty((nbytes,), torch.uint8, zeros=True)
        return memory

    def new_host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate main memory that all ranks map, uint8 [nbytes]."""
        found: NDArray[np.uint8] = self._channel.arena.allocate(nbytes)
        return found

    def pin(self, address: int, nbytes: int) -> None:
        """Register the other mappings of some of the memory with CUDA."""
        self._channel.send(PinMemory(address - self._channel.arena.address, nbytes))

    def unpin(self, address: int) -> None:
        """End the registrations of the other mappings, in a finalizer."""
        self._channel.ended.append(UnpinMemory(address - self._channel.arena.address))

    @contextmanager
    def copying(self, way: Way) -> Iterator[tuple[CopyTensor, int]]:
        """Yield a function that copies states on every rank, and the number of these copies.

        This rank queues its copies at the end of the block, each on the stream that was current
        when it was asked for.

        Args:
            way: Which streams copy.
        """
        pairs, streams = list[tuple[Tensor, Tensor]](), list[Any]()

        def copy(target: Tensor, source: Tensor) -> None:
            pairs.append((target, self._mapped(source)))
            streams.append(self._stream())

        with self._channel.launching():
            self._numbers += 1
            yield copy, self._numbers
            crosses = [self._crosses(pair) for pair in pairs]
            crossing = Crossings.of(
                list(compress(pairs, crosses)), self._address, up=way != "download"
            )
            others = [pair for pair, each in zip(pairs, crosses, strict=True) if not each]
            # the others begin while this rank queues its own copies
            self._channel.send(TierCopies(way, self._numbers, others, crossing))
            for (target, source), stream in zip(pairs, streams, strict=True):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._model.copy_heads(target, source)

    def upload(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        ends: Sequence[int],
        record: Callable[[], CopyEvent],
    ) -> tuple[list[CopyEvent], int]:
        """See `RankCopies.upload`."""
        with self._channel.launching():
            self._numbers += 1
            mapped = [(target, self._mapped(source)) for target, source in pairs]
            crossings = Crossings.of(mapped, self._address, up=True)
            self._channel.send(TierCopies("upload", self._numbers, (), crossings, ends))
            events = list[CopyEvent]()
            for piece in pieces_of(self._own(crossings), ends):
                copy_runs(piece, self._model.device)
                events.append(record())
            return events, self._numbers

    @property
    def _address(self) -> int:
        return int(self._channel.arena.address)

    def _own(self, crossings: Crossings) -> Runs:
        """The leader's part of copies."""
        return crossings.addressed(self._address, self._model.key_heads.start, lambda _: None)

    def _crosses(self, pair: tuple[Tensor, Tensor]) -> bool:
        """Whether a copy is between main memory and the devices."""
        return any(self._channel.arena.place_of(each) is not None for each in pair)

    def _stream(self) -> Any:
        """The current stream of this thread. None on a CPU."""
        device = self._model.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _mapped(self, source: Tensor) -> Tensor:
        """Return the same states in memory that all ranks map. A copy lives until it is read."""
        while self._staged and self._signs.uploaded[1:].min() >= self._staged[0][0]:
            self._staged.popleft()
        arena = self._channel.arena
        if source.is_cuda or arena.place_of(source) is not None:
            return source
        if self._channel.regions.place_of(source) is not None:
            return source
        self._staged.append((self._numbers, arena.copy(source)))
        return self._staged[-1][1]

    def event(self, event: CopyEvent | None, way: Way, number: int) -> CopyEvent:
        """Return the end of numbered copies on all ranks."""
        done = self._signs.downloaded if way == "download" else self._signs.uploaded
        return RankedEvent(event, done, number, lambda: self._model.failure)

    def note_arrival(self, arrival: Arrival, number: int, event: CopyEvent) -> None:
        """Remember which upload an arrival is of. `event`: end of the leader's part."""
        with self._channel.lock:
            self._arrivals[arrival] = number
            self._late.append((number, event))

    def waits(self, arrivals: Sequence[Arrival]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the uploads that a step waits for, and others that have not arrived."""
        while self._late and self._late[0][1].query():
            self._late.popleft()
        if not arrivals and not self._late:
            return (), ()
        waits = tuple(self._arrivals[each] for each in arrivals if each in self._arrivals)
        others = (number for number, event in self._late if not event.query())
        return waits, tuple(number for number in others if number not in waits)


class FollowedCopies:
    """A follower's copies.

    Args:
        model: The rank's model.
        stream: The stream of its steps. None on a CPU.
        memory: The memory of all ranks.
        signs: Signs of life, in which it counts.
        rank: Number of the rank.
    """

    def __init__(
        self,
        model: Any,
        stream: torch.cuda.Stream | None,
        memory: MappedMemory,
        signs: SignsOfLife,
        rank: int,
    ) -> None:
        self._model, self._stream, self._memory = model, stream, memory
        self._uploads: dict[int, Arrival] = {}  # that have not ended, by number
        self._done = {"upload": signs.uploaded, "download": signs.downloaded}
        self._rank = rank
        if stream is not None:
            self.pin(0, HEAD)
            self._streams = {"compute": stream, "upload": new_stream(stream.device)}
            self._streams["download"] = new_stream(stream.device)
            self._counts = {
                way: torch.zeros(1, dtype=torch.float64, device=stream.device) for way in self._done
            }
            self._slots = {
                way: torch.from_numpy(done)[rank : rank + 1] for way, done in self._done.items()
            }

    def pin(self, place: int, nbytes: int) -> None:
        """Register memory with CUDA."""
        if self._stream is not None:
            _check(torch.cuda.cudart().cudaHostRegister(self._memory.address + place, nbytes, 0))  # type: ignore[no-untyped-call]

    def unpin(self, place: int) -> None:
        """End a registration."""
        if self._stream is not None:
            for stream in self._streams.values():
                stream.synchronize()
            _check(torch.cuda.cudart().cudaHostUnregister(self._memory.address + place))  # type: ignore[no-untyped-call]

    def run(self, copies: TierCopies, regions: FollowerRegions) -> None:
        """Queue copies of the leader."""
        device, first = self._model.device, self._model.key_heads.start
        with self._on(copies.way):
            for target, source in copies.pairs:
                self._model.copy_heads(target, source)
            runs = copies.crossings.addressed(self._memory.address, first, regions.move)
            events = list[CopyEvent]()
            for piece in pieces_of(runs, copies.ends) if copies.ends else (runs,):
                copy_runs(piece, device)
                if copies.way == "upload":
                    event = new_event()
                    event.record()
                    events.append(event)
            if events:
                self._uploads[copies.number] = Arrival(events, copies.ends)
            self._count(copies)

    def arrivals(self, waits: Sequence[int], others: Sequence[int]) -> tuple[Arrival, ...]:
        """Return the arrivals for which a step waits by layer. The stream of the steps waits for
        all uploads that have arrived at the leader.

        Args:
            waits: Uploads that the step reads and the leader waits for.
            others: Uploads that have not arrived at the leader either.
        """
        found = []
        for number, arrival in list(self._uploads.items()):
            if arrival.ready():
                del self._uploads[number]
            elif number in waits:
                found.append(arrival)
            elif number not in others:
                arrival.wait(self._stream)
        return tuple(found)

    def _on(self, way: Way) -> AbstractContextManager[Any]:
        """Queue work on the stream of a way, behind all that it may depend on."""
        if self._stream is None:
            return nullcontext()
        stream = self._streams[way]
        if way != "compute":
            stream.wait_stream(self._stream)
        if way == "upload":  # extents may have been read
            stream.wait_stream(self._streams["download"])
        else:  # states that are read, or extents that were written before
            for arrival in self._uploads.values():
                arrival.wait(stream)
        return torch.cuda.stream(stream)

    def _count(self, copies: TierCopies) -> None:
        """Count the copies when the device has made them."""
        if copies.way == "compute":
            return
        if self._stream is None:
            self._done[copies.way][self._rank] = copies.number
            return
        count = self._counts[copies.way].fill_(copies.number)
        self._slots[copies.way].copy_(count, non_blocking=True)


def _check(code: Any) -> None:
    if int(code):
        raise RuntimeError(f"CUDA cannot register main memory (error {int(code)})")
