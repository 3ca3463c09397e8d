"""Memory that all ranks of a model map.

Weights, states and the pool of blocks lie there once, with all heads. A tensor crosses between
ranks as its place in the memory, and each rank reads its own heads of it.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.extents import FreeExtents
from ragcache.machine import host_memory

Bytes = NDArray[np.uint8]

HEAD = mmap.PAGESIZE
"""Bytes at the beginning that no extent takes, for signs of life."""


class MappedMemory:
    """A file without a name that several processes map.

    Attributes:
        descriptor: The file, for processes that inherit it.
        nbytes: Size of the mapping. Pages exist once they are written.
        address: Address of the mapping in this process.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor, self.nbytes = descriptor, nbytes
        self.content = mmap.mmap(descriptor, nbytes)
        with suppress(OSError):  # the kernel may have no huge pages for such memory
            self.content.madvise(mmap.MADV_HUGEPAGE)
        self._all = torch.frombuffer(self.content, dtype=torch.uint8)
        self.address = self._all.data_ptr()

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the first byte of a tensor in this memory. None if the tensor lies elsewhere."""
        place = tensor.data_ptr() - self.address
        return place if tensor.numel() and 0 <= place < self.nbytes else None

    def tensor(
        self, place: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """Return a view of the memory from byte `place` on. Strides are in elements."""
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        content = self._all[place : place + (last + 1) * dtype.itemsize]
        return content.view(dtype).as_strided(tuple(shape), tuple(strides))

    def head(self, rows: int, columns: int) -> NDArray[np.float64]:
        """Return float64 [rows, columns] over the memory's beginning (`HEAD`)."""
        assert 8 * rows * columns <= HEAD
        return np.frombuffer(self.content, np.float64, rows * columns).reshape(rows, columns)


class SharedArena(MappedMemory):
    """The memory of the leader, which alone allocates. Thread-safe.

    The mapping is twice as large as the machine's memory, so that extents are easily found. Freed
    extents go back to the operating system.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        super().__init__(descriptor, nbytes)
        self._free = FreeExtents(nbytes)
        self._free.take(HEAD)
        self._ended = deque[tuple[int, int]]()  # filled by finalizers, in any thread
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def create(cls) -> SharedArena:
        """Create empty memory. Raises `ConfigurationError` where the system has none to share."""
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError(
                "tensor_parallel needs memory that processes share (memfd_create), which this "
                "system does not have; run it on Linux, or leave tensor_parallel out"
            )
        nbytes = _rounded(2 * host_memory()["total_bytes"])
        descriptor = os.memfd_create("ragcache")
        os.ftruncate(descriptor, nbytes)
        arena = cls(descriptor, nbytes)
        weakref.finalize(arena, os.close, descriptor)
        return arena

    def allocate(self, nbytes: int) -> Bytes:
        """Allocate uint8 [nbytes] of zeros. They are free again when no array or tensor refers to
        them. Raises `torch.OutOfMemoryError`."""
        size = _rounded(max(1, nbytes))
        with self._lock:
            while self._ended:
                self._give_back(*self._ended.popleft())
            begin = self._free.take(size)
        if begin is None:
            raise torch.OutOfMemoryError(f"the ranks' memory has no {nbytes:,} bytes in one piece")
        block = np.frombuffer(self.content, np.uint8, nbytes, begin)
        # not at exit: the process frees all memory then
        weakref.finalize(block, self._ended.append, (begin, size)).atexit = False
        return block

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous tensor. An empty one has no place in the memory."""
        size = torch.Size(shape)
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        block = self.allocate(size.numel() * dtype.itemsize)
        return torch.from_numpy(block).view(dtype).view(size)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the memory."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _give_back(self, begin: int, nbytes: int) -> None:
        if os.getpid() == self._pid:  # a forked process has the same pages, and frees none
            self.content.madvise(mmap.MADV_REMOVE, begin, nbytes)
            self._free.give_back(begin, nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
