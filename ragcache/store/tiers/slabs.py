"""Memory that is reserved in large slabs and handed out in extents.

Neither a GPU's allocator nor a registration with CUDA is needed once a key: both take their time,
and an allocator rounds and fragments. Extents are taken first fit; free neighbors become one.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
ALIGNMENT = 512  # bytes: what CUDA's own allocator of torch aligns tensors to


class FreeExtents:
    """The free extents begin:end of a run of bytes, in order; no two of them touch."""

    def __init__(self, total: int) -> None:
        self._begins: list[int] = [0] if total else []
        self._ends: dict[int, int] = {0: total} if total else {}

    @property
    def largest(self) -> int:
        """The length of the longest one."""
        return max((end - begin for begin, end in self._ends.items()), default=0)

    def take(self, nbytes: int) -> int | None:
        """The begin of the first `nbytes` free bytes, which are taken; None where there are none
        in one piece."""
        for number, begin in enumerate(self._begins):
            end = self._ends[begin]
            if end - begin < nbytes:
                continue
            del self._begins[number], self._ends[begin]
            self._add(begin + nbytes, end)
            return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Frees an extent that was taken."""
        end = begin + nbytes
        after = bisect_left(self._begins, begin)
        assert after == len(self._begins) or end <= self._begins[after], "bytes are freed twice"
        if after:
            before = self._begins[after - 1]
            assert self._ends[before] <= begin, "bytes are freed twice"
            if self._ends[before] == begin:
                del self._begins[after - 1], self._ends[before]
                begin = before
        if end in self._ends:
            following, end = end, self._ends[end]
            self._begins.remove(following)
            del self._ends[following]
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        if begin < end:
            insort(self._begins, begin)
            self._ends[begin] = end


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a slab, by the slab's number."""

    slab: int
    begin: int
    nbytes: int


class SlabPool:
    """Slabs under a budget, reserved when they are needed. Not thread-safe."""

    def __init__(
        self, budget_bytes: int, reserve: Callable[[int], Tensor], slab_bytes: int = SLAB_BYTES
    ) -> None:
        """reserve: makes a slab, uint8 [N]; what it raises, `take` raises."""
        self._left = budget_bytes // ALIGNMENT * ALIGNMENT
        self._reserve, self._slab_bytes = reserve, slab_bytes
        self._slabs: list[Tensor] = []
        self._free: list[FreeExtents] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def largest(self) -> int:
        """The bytes of the largest extent that `take` would give."""
        return max([self._left, *(free.largest for free in self._free)])

    def take(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes`, at least one, rounded up; None where no slab has it in one piece
        and the budget has no more slabs."""
        nbytes = rounded(max(1, nbytes))
        for number, free in enumerate(self._free):
            begin = free.take(nbytes)
            if begin is not None:
                return Extent(number, begin, nbytes)
        if not self.grow(nbytes):
            return None
        begin = self._free[-1].take(nbytes)
        assert begin is not None
        return Extent(len(self._free) - 1, begin, nbytes)

    def grow(self, nbytes: int) -> bool:
        """Reserves one more slab, for extents of about `nbytes`, if the budget has that many. A
        slab holds a whole number of large extents: the rest of it would hardly ever be used."""
        size = self._slab_bytes
        if nbytes > size // 8:
            size = -(-size // nbytes) * nbytes
        size = min(self._left, rounded(size))
        if not 0 < nbytes <= size:
            return False
        self._slabs.append(self._reserve(size))
        self._free.append(FreeExtents(size))
        self._left -= size
        return True

    def give_back(self, extent: Extent) -> None:
        """Frees an extent."""
        self._free[extent.slab].give_back(extent.begin, extent.nbytes)

    def memory(self, extent: Extent, end: Callable[[], object]) -> Tensor:
        """An extent's bytes, uint8 [nbytes]. end: called when neither this tensor nor any view of
        it is left, in whichever thread that happens."""
        part = self._slabs[extent.slab][extent.begin : extent.begin + extent.nbytes]
        handle = _DeviceMemory(part) if part.is_cuda else part.numpy()
        weakref.finalize(handle, end).atexit = False  # the process takes all
        if isinstance(handle, _DeviceMemory):
            return torch.as_tensor(handle, device=part.device)
        return torch.from_numpy(handle)


class _DeviceMemory:
    """A part of a slab on a GPU, whose tensor has a storage of its own: it keeps this object, not
    the slab, so that the end of the last view can be seen."""

    def __init__(self, part: Tensor) -> None:
        self._part = part
        self.__cuda_array_interface__ = part.__cuda_array_interface__


def rounded(nbytes: int) -> int:
    """Bytes up to the next boundary."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
