"""Memory that is reserved in large slabs and handed out in extents.

A GPU allocation or a registration with CUDA per key would be slow, and an allocator rounds up and
fragments. Extents are allocated first fit, and free neighbors are merged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.extents import FreeExtents

SLAB_BYTES = 1 << 30
ALIGNMENT = 512  # bytes, as in torch's CUDA allocator


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in a slab."""

    slab: int
    """Number of the slab."""
    begin: int
    nbytes: int


class SlabPool:
    """Slabs within a budget, reserved on demand. Not thread-safe."""

    def __init__(
        self, budget_bytes: int, reserve: Callable[[int], Tensor], slab_bytes: int = SLAB_BYTES
    ) -> None:
        """Create a pool. `reserve` creates a slab, uint8 [N]; `take` passes on its errors."""
        self._left = budget_bytes // ALIGNMENT * ALIGNMENT
        self._reserve, self._slab_bytes = reserve, slab_bytes
        self._slabs: list[Tensor] = []
        self._free: list[FreeExtents] = []

    @property
    def largest(self) -> int:
        """Size of the largest extent that `take` could return."""
        return max([self._left, *(free.largest for free in self._free)])

    def take(self, nbytes: int) -> Extent | None:
        """Allocate an extent of at least `nbytes`. Without room, return None.

        A free extent must be contiguous. A slab is added if the budget allows.
        """
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
        """Reserve a slab for extents of about `nbytes`. Returns whether the budget allows it.

        A slab for large extents holds a whole number of them, because a remainder would hardly be
        used.
        """
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
        """Free an extent."""
        self._free[extent.slab].give_back(extent.begin, extent.nbytes)

    def memory(self, extent: Extent, end: Callable[[], object]) -> Tensor:
        """Return the bytes of an extent, uint8 [nbytes].

        `end` is called, in any thread, when neither this tensor nor a view of it is left.
        """
        part = self._slabs[extent.slab][extent.begin : extent.begin + extent.nbytes]
        handle = _DeviceMemory(part) if part.is_cuda else part.numpy()
        weakref.finalize(handle, end).atexit = False  # the process frees all memory
        if isinstance(handle, _DeviceMemory):
            return torch.as_tensor(handle, device=part.device)
        return torch.from_numpy(handle)


class _DeviceMemory:
    """A part of a slab on a GPU, whose tensor has a storage of its own.

    The storage refers to this object instead of the slab, so that its end can be observed.
    """

    def __init__(self, part: Tensor) -> None:
        self._part = part
        self.__cuda_array_interface__ = part.__cuda_array_interface__


def rounded(nbytes: int) -> int:
    """Round bytes up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
