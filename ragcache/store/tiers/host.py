"""The host tier: states in main memory of its own, registered with CUDA where a GPU reads them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragcache.errors import StateMissing, StoreError
from ragcache.openmp import keeps_no_workers
from ragcache.states import KVKey
from ragcache.states.quantization import (
    KVDtype,
    StoredStates,
    model_dtype,
    quantize,
    quantized_nbytes,
    rebuild,
    tensors_of,
)
from ragcache.store.tiers.base import check_budget

_PAGE, _LINE = 4096, 64  # bytes: what is pinned as a whole, what a processor fetches


class HostTier:
    """States of every key in one block of memory, which the tier allocates and counts.

    A block is counted, with what alignment adds, until nothing refers to it any more: states that
    were deleted while a request reads them still take their room. Pinned blocks are ordinary memory
    registered with CUDA, because its own allocator rounds up to powers of two.
    """

    name = "host"
    persistent = False

    def __init__(
        self, budget_bytes: int, *, kv_dtype: KVDtype = "model", pinned: bool | None = None
    ) -> None:
        """pinned: None where a GPU is present."""
        self.budget_bytes: int | None = budget_bytes
        self.kv_dtype = kv_dtype
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self._align = _PAGE if self.pinned else _LINE
        self._states: dict[KVKey, StoredStates] = {}
        self._lock = threading.RLock()
        self._blocks: dict[int, int] = {}  # address to bytes
        self._freed: deque[int] = deque()  # addresses; filled by finalizers, at any moment
        self._used = 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._used

    def allocate(self, nbytes: int) -> Tensor:
        """Memory to load states into, uint8 [nbytes], which `put` then takes as it is. Raises
        `StoreBudgetExceeded`, or `StoreError` where the system refuses to pin."""
        size = self._size(nbytes)
        with self._lock:
            self._settle()
            check_budget(self.name, self.budget_bytes, self._used, size)
            block = np.empty(size, np.uint8)
            begin = -block.ctypes.data % self._align
            address = block.ctypes.data + begin
            self._settle()  # this may be the address of a block that was freed just now
            self._blocks[address] = size
            self._used += size
        if self.pinned:
            try:
                pin(address, size - self._align)
            except BaseException:
                self._freed.append(address)
                raise
        weakref.finalize(block, self._release, address).atexit = False  # the process takes all
        return torch.from_numpy(block[begin : begin + nbytes])

    def size_of(self, states: StoredStates) -> int:
        return self._size(quantized_nbytes(states, self.kv_dtype))

    @keeps_no_workers
    def put(self, key: KVKey, states: StoredStates) -> int:
        """As `Tier.put`. States in memory from `allocate` are kept as they are, others copied."""
        kept = quantize(states, self.kv_dtype)
        own = kept if self.owns(kept) else self._copy(kept)
        with self._lock:
            self._states[key] = own
        return self._size(own.nbytes)

    def get(self, key: KVKey) -> StoredStates:
        states = self._states.get(key)
        if states is None:
            raise StateMissing(f"the host tier does not hold {key}")
        return states

    def delete(self, key: KVKey) -> None:
        with self._lock:
            self._states.pop(key, None)

    def __contains__(self, key: KVKey) -> bool:
        return key in self._states

    def keys(self) -> Iterator[KVKey]:
        with self._lock:
            return iter(tuple(self._states))

    def _size(self, nbytes: int) -> int:
        """Bytes of a block that holds so many at an aligned address."""
        return -(-nbytes // self._align) * self._align + self._align

    def owns(self, states: StoredStates) -> bool:
        """Whether states fill a block that `allocate` gave."""
        addresses = {t.untyped_storage().data_ptr() for t in tensors_of(states).values()}
        if len(addresses) != 1 or states.keys.device.type != "cpu":
            return False
        with self._lock:
            return self._blocks.get(addresses.pop()) == self._size(states.nbytes)

    def _copy(self, states: StoredStates) -> StoredStates:
        block, end = self.allocate(states.nbytes), 0
        copies = {}
        for name, tensor in tensors_of(states).items():
            place = block[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor)
            end += tensor.nbytes
        return rebuild(copies, states.start, model_dtype(states))

    def _release(self, address: int) -> None:
        """Runs before the memory of a block goes, in whichever thread lets go of it last."""
        if self.pinned:
            unpin(address)
        self._freed.append(address)

    def _settle(self) -> None:
        while self._freed:
            self._used -= self._blocks.pop(self._freed.popleft())


def pin(address: int, nbytes: int) -> None:
    """Registers whole pages. Raises `StoreError` where the system refuses."""
    code = int(_runtime().cudaHostRegister(address, nbytes, 0)) if nbytes else 0
    if code:
        raise StoreError(
            f"cannot pin {nbytes:,} bytes of main memory (CUDA error {code}); lower host_bytes, "
            "raise the limit of locked memory (ulimit -l), or open the host tier unpinned"
        )


def unpin(address: int) -> None:
    """Ends a registration; copies from the pages must have ended."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
