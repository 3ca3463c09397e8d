"""The host tier: states in main memory, registered with CUDA if a GPU is present."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import StoreBudgetExceeded, StoreError
from ragcache.openmp import keeps_no_workers
from ragcache.states import Arrival, KVKey
from ragcache.states.quantization import (
    KVDtype,
    StoredStates,
    model_dtype,
    quantize,
    quantized_nbytes,
    rebuild,
    tensors_of,
    wait_for_arrival,
)
from ragcache.store.tiers.base import MemoryTier, check_budget
from ragcache.store.tiers.ranks import CopyTensor, RankCopies, copy_tensor
from ragcache.store.tiers.slabs import Extent, SlabPool, rounded
from ragcache.store.tiers.streams import downloading
from ragcache.tiers import TIERS

_PAGE, _LINE = 4096, 64  # bytes of a memory page and of a cache line
_MAPPERS = 4  # threads that map the pages of a slab

SLAB_BYTES: Final = 1 << 28
"""Size of a pinned slab. While CUDA registers memory, no thread launches anything."""

Reserve: TypeAlias = Callable[[int], NDArray[np.uint8]]


def _ordinary(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


class HostTier(MemoryTier):
    """States in main memory, one block per key, which the tier allocates and counts.

    A block counts as used, including alignment, until nothing refers to it: deleted states still
    occupy their memory while a request reads them. Pinned blocks are extents of slabs, ordinary
    memory that is registered with CUDA once. A registration takes 0.1 ms per MB, and CUDA's own
    allocator rounds up to powers of two.
    """

    name = "host"
    traits = TIERS["host"].traits

    def __init__(
        self,
        budget_bytes: int,
        *,
        kv_dtype: KVDtype = "model",
        pinned: bool | None = None,
        slab_bytes: int = SLAB_BYTES,
        reserve: Reserve | None = None,
        ranks: RankCopies | None = None,
    ) -> None:
        """Create an empty tier.

        Args:
            budget_bytes: Budget.
            kv_dtype: Storage format of the states.
            pinned: Whether to register memory with CUDA. Defaults to whether a GPU is present.
            slab_bytes: Size of a pinned slab.
            reserve: Allocates uint8 [N] that is not pinned. Defaults to numpy's memory.
            ranks: Copies on several devices, each of which has states of its own heads. Their
                memory takes the place of `reserve`.
        """
        super().__init__()
        self.budget_bytes: int | None = budget_bytes
        self.kv_dtype = kv_dtype
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self._ranks = ranks
        if ranks is not None:
            reserve = ranks.new_host_memory
        slab = partial(pinned_slab, reserve=reserve or _ordinary, ranks=ranks)
        self._pool = SlabPool(budget_bytes, slab, slab_bytes) if self.pinned else None
        self.traits = replace(self.traits, slabs=self.pinned)
        self._reserve = reserve or _ordinary
        self._blocks: dict[int, int] = {}  # address to bytes
        self._freed: deque[int] = deque()  # addresses, filled by finalizers at any time
        self._addresses: dict[Extent, int] = {}
        self._ended: deque[Extent] = deque()  # filled in the same way
        self._used = 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._used

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate uint8 [nbytes] to load states into, which `put` keeps without a copy.

        Raises:
            StoreBudgetExceeded: The budget has no room.
            StoreError: The operating system refuses to pin memory.
        """
        size = self._size(nbytes)
        with self._lock:
            self._settle()
            check_budget(self.name, self.budget_bytes, self._used, size)
            if self._pool is not None:
                return self._take_extent(self._pool, size)[:nbytes]
            block = self._reserve(size)
            begin = -block.ctypes.data % _LINE
            address = block.ctypes.data + begin
            self._settle()  # the address may be one that was freed just now
            self._blocks[address] = size
            self._used += size
        # not at exit: the process frees all memory then
        weakref.finalize(block, self._freed.append, address).atexit = False
        return torch.from_numpy(block[begin : begin + nbytes])

    def _take_extent(self, pool: SlabPool, nbytes: int) -> Tensor:
        extent = pool.take(nbytes)
        if extent is None:
            raise StoreBudgetExceeded(
                f"the host tier may hold {self.budget_bytes:,} bytes, of which {self._used:,} are "
                f"taken; {nbytes:,} more are not free in one piece. Raise host_bytes"
            )
        memory = pool.memory(extent, partial(self._ended.append, extent))
        self._blocks[memory.data_ptr()] = nbytes
        self._addresses[extent] = memory.data_ptr()
        self._used += nbytes
        return memory

    def size_of(self, states: StoredStates) -> int:
        nbytes = quantized_nbytes(states, self.kv_dtype)
        return self._size(nbytes * self._whole(states.keys)[1] // states.keys.shape[1])

    @keeps_no_workers
    def put(self, key: KVKey, states: StoredStates) -> int:
        """Store states. Keeps memory from `allocate` and copies other memory."""
        kept = quantize(states, self.kv_dtype)
        if not self.owns(kept):
            kept = self.begin_copy(kept)
            wait_for_arrival(kept)
            kept = replace(kept, arrival=None)
        with self._lock:
            self._states[key] = kept
        return self._size(kept.nbytes)

    def _size(self, nbytes: int) -> int:
        """Return the bytes of a block that holds `nbytes` at an aligned address."""
        if self._pool is not None:
            return rounded(max(1, nbytes))
        return -(-nbytes // _LINE) * _LINE + _LINE

    def owns(self, states: StoredStates) -> bool:
        """Return whether states fill a block from `allocate` or `begin_copy`."""
        addresses = {t.untyped_storage().data_ptr() for t in tensors_of(states).values()}
        if len(addresses) != 1 or states.keys.device.type != "cpu":
            return False
        with self._lock:
            return self._blocks.get(addresses.pop()) == self._size(states.nbytes)

    def begin_copy(self, states: StoredStates) -> StoredStates:
        """Copy states into the tier's memory without adding an entry.

        A copy from a GPU is queued on a stream of its own. `arrival` tells when it has ended.
        """
        ranks = self._ranks
        if ranks is not None and states.keys.shape[1] != self._whole(states.keys)[1]:
            with downloading(states) as download, ranks.copying("download") as (copy, number):
                copies = self._copy_to_block(states, copy)
            event = ranks.event(download.event, "download", number)
            arrival: Arrival | None = Arrival([event], sources=states)
        else:
            with downloading(states) as download:
                copies = self._copy_to_block(states, copy_tensor)
            arrival = download.arrival
        return rebuild(copies, states.start, model_dtype(states), arrival)

    def _copy_to_block(self, states: StoredStates, copy: CopyTensor) -> dict[str, Tensor]:
        """Copy tensors of states to a new block, with the heads of all ranks."""
        tensors = tensors_of(states)
        shapes = {name: self._whole(each) for name, each in tensors.items()}
        sizes = {name: shapes[name].numel() * each.itemsize for name, each in tensors.items()}
        block, end, copies = self.allocate(sum(sizes.values())), 0, {}
        for name, tensor in tensors.items():
            copies[name] = block[end : end + sizes[name]].view(tensor.dtype).view(shapes[name])
            copy(copies[name], tensor)
            end += sizes[name]
        return copies

    def _whole(self, tensor: Tensor) -> torch.Size:
        """The shape of a tensor of states with all heads."""
        ranks = self._ranks
        if ranks is None or tensor.dim() != 4 or tensor.shape[1] != ranks.heads:
            return tensor.shape
        return torch.Size((tensor.shape[0], ranks.whole_heads, *tensor.shape[2:]))

    def _settle(self) -> None:
        while self._freed:
            self._used -= self._blocks.pop(self._freed.popleft())
        while self._ended:
            extent = self._ended.popleft()
            self._used -= self._blocks.pop(self._addresses.pop(extent))
            assert self._pool is not None
            self._pool.give_back(extent)


def pinned_slab(
    nbytes: int, *, reserve: Reserve = _ordinary, ranks: RankCopies | None = None
) -> Tensor:
    """Allocate uint8 [nbytes], registered with CUDA while any tensor refers to it.

    Args:
        nbytes: Size of the slab.
        reserve: Allocates the memory.
        ranks: Ranks that map the memory, too.

    Raises:
        StoreError: The operating system refuses.
    """
    size = -(-nbytes // _PAGE) * _PAGE
    block = reserve(size + _PAGE)
    begin = -block.ctypes.data % _PAGE
    address = block.ctypes.data + begin
    map_pages(address, size)
    pin(address, size)
    weakref.finalize(block, unpin, address).atexit = False
    if ranks is not None:
        ranks.pin(address, size)
        weakref.finalize(block, ranks.unpin, address).atexit = False
    return torch.from_numpy(block[begin : begin + nbytes])


def map_pages(address: int, nbytes: int) -> None:
    """Write zeros to whole pages, which the system maps at their first write, in several threads.

    Otherwise the registration would map them, which is most of its time.
    """
    part = -(-nbytes // (_MAPPERS * _PAGE)) * _PAGE
    with ThreadPoolExecutor(_MAPPERS) as threads:
        for begin in range(0, nbytes, part):
            threads.submit(ctypes.memset, address + begin, 0, min(part, nbytes - begin))


def pin(address: int, nbytes: int) -> None:
    """Register whole pages with CUDA. Raises `StoreError` if the operating system refuses."""
    code = int(_runtime().cudaHostRegister(address, nbytes, 0)) if nbytes else 0
    if code:
        raise StoreError(
            f"cannot pin {nbytes:,} bytes of main memory (CUDA error {code}); lower host_bytes, "
            "raise the limit of locked memory (ulimit -l), or open the host tier unpinned"
        )


def unpin(address: int) -> None:
    """End a registration, after all copies from the pages."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
