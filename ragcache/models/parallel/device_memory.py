"""Regions of device memory that every rank has: the same bytes of states, each of its own heads.

The leader allocates a region, and the followers allocate another of the same size. A tensor or an
address in a region crosses between ranks as its place there.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Send = Callable[[Any], None]


class Place(NamedTuple):
    """The first byte of a tensor in a region."""

    region: int
    offset: int


@dataclass(frozen=True, slots=True)
class NewRegion:
    """Message: the leader has allocated a region."""

    number: int
    address: int
    nbytes: int
    zeros: bool

    def run(self, follower: Any) -> None:
        """Allocate the region of a follower."""
        follower.regions.add(self)


@dataclass(frozen=True, slots=True)
class EndedRegions:
    """Message: nothing of the leader refers to some regions any longer."""

    numbers: tuple[int, ...]

    def run(self, follower: Any) -> None:
        """Free the regions of a follower."""
        follower.regions.remove(self.numbers)


class LeaderRegions:
    """The regions of the leader. Thread-safe.

    Args:
        device: Device of the regions.
        send: Sends a message to all followers.
        lock: Held while a region is allocated and the message is sent.
    """

    def __init__(self, device: torch.device, send: Send, lock: Any) -> None:
        self.device, self._send, self._lock = device, send, lock
        self._begins: list[int] = []
        self._regions: list[tuple[int, int]] = []  # number and bytes
        self._last = 0
        self._ended = deque[tuple[int, int]]()  # filled by finalizers, in any thread

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, zeros: bool = False) -> Tensor:
        """Allocate a tensor on every rank. Only an empty one has no region.

        Args:
            shape: Shape of the tensor.
            dtype: Its dtype.
            zeros: Whether to fill it with zeros.
        """
        size = torch.Size(shape)
        nbytes = size.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(size, dtype=dtype, device=self.device)
        make = torch.zeros if zeros else torch.empty
        with self._lock:
            memory = make(nbytes, dtype=torch.uint8, device=self.device)
            self.settle()  # the address may be one that has ended
            self._last += 1
            address = memory.data_ptr()
            at = bisect_right(self._begins, address)
            self._begins.insert(at, address)
            self._regions.insert(at, (self._last, nbytes))
            observed = observe_end(memory, self._end_of(self._last, address))
            self._send(NewRegion(self._last, address, nbytes, zeros))
        return observed.view(dtype).view(size)

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return the place of a tensor. None if the tensor lies in no region."""
        address = tensor.data_ptr()
        with self._lock:
            at = bisect_right(self._begins, address) - 1
            if at < 0 or not tensor.numel():
                return None
            number, nbytes = self._regions[at]
            offset = address - self._begins[at]
        return Place(number, offset) if offset < nbytes else None

    def settle(self) -> None:
        """Tell the followers which regions have ended. Call it before a message is sent."""
        ended = []
        with self._lock:
            while self._ended:
                number, address = self._ended.popleft()
                at = bisect_right(self._begins, address) - 1
                assert self._regions[at][0] == number
                del self._begins[at], self._regions[at]
                ended.append(number)
            if ended:
                self._send(EndedRegions(tuple(ended)))

    def _end_of(self, number: int, address: int) -> Callable[[], object]:
        ended = self._ended  # without a reference to this object

        def end() -> None:
            ended.append((number, address))

        return end


class FollowerRegions:
    """The regions of a follower. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._regions: dict[int, Tensor] = {}
        self._theirs: dict[int, int] = {}  # addresses of the leader
        self._begins: NDArray[np.int64] | None = None
        self._moves: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, region: NewRegion) -> None:
        """Allocate a region."""
        make = torch.zeros if region.zeros else torch.empty
        self._regions[region.number] = make(region.nbytes, dtype=torch.uint8, device=self.device)
        self._theirs[region.number] = region.address
        self._begins = None

    def remove(self, numbers: Sequence[int]) -> None:
        """Free regions."""
        for number in numbers:
            del self._regions[number], self._theirs[number]
        self._begins = None

    def tensor(
        self, place: Place, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """Return a view of a region. Strides are in elements."""
        number, offset = place
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        content = self._regions[number][offset : offset + (last + 1) * dtype.itemsize]
        return content.view(dtype).as_strided(tuple(shape), tuple(strides))

    def move(self, addresses: NDArray[np.int64]) -> None:
        """Put this rank's addresses in place of the leader's. Zeros stay."""
        if self._begins is None:
            order = sorted(self._theirs, key=self._theirs.__getitem__)
            self._begins = np.array([self._theirs[each] for each in order], np.int64)
            own = np.array([self._regions[each].data_ptr() for each in order], np.int64)
            self._moves = np.concatenate([[0], own - self._begins])
        at = np.searchsorted(self._begins, addresses, side="right")
        addresses += self._moves[at]


class _Handle:
    """Memory on a GPU, whose tensor has a storage that refers to this object."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = memory.__cuda_array_interface__


def observe_end(memory: Tensor, end: Callable[[], object]) -> Tensor:
    """Return the same memory as a tensor. `end` is called, in any thread, when neither the tensor
    nor a view of it is left."""
    handle = _Handle(memory) if memory.is_cuda else memory.numpy()
    weakref.finalize(handle, end).atexit = False  # the process frees all memory
    if isinstance(handle, _Handle):
        return torch.as_tensor(handle, device=memory.device)
    return torch.from_numpy(handle)
