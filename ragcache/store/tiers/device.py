"""The device tier: states in GPU memory, under a budget of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ragcache.errors import StateMissing, StoreFull
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import (
    KVDtype,
    StoredStates,
    model_dtype,
    quantized_nbytes,
    rebuild,
    restored,
    tensors_of,
)
from ragcache.store.tiers.base import check_budget

_BLOCK = 512  # bytes: what CUDA's caching allocator of torch rounds every tensor up to


class DeviceTier:
    """States on one device. Copies run on a stream of their own, beside what computes there on the
    default stream.

    A `put` returns when its copy has ended, so that a thread that moves states waits for it and the
    thread that computes does not. With `device="cpu"` it is a second host tier, for tests.
    """

    name = "device"
    persistent = False
    kv_dtype: KVDtype = "model"  # attention reads these

    def __init__(self, budget_bytes: int, device: torch.device | str) -> None:
        self.budget_bytes: int | None = budget_bytes
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._states: dict[KVKey, KVStates] = {}
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used_bytes(self) -> int:
        return self._used

    def size_of(self, states: StoredStates) -> int:
        return 2 * -(-quantized_nbytes(states, "model") // 2 // _BLOCK) * _BLOCK

    def put(self, key: KVKey, states: StoredStates) -> int:
        nbytes = self.size_of(states)
        with self._lock:
            check_budget(self.name, self.budget_bytes, self._used, nbytes)
            self._used += nbytes
        try:
            with self._copying(states.keys.is_cuda):
                placed = {name: self._place(t) for name, t in tensors_of(states).items()}
                here = restored(rebuild(placed, states.start, model_dtype(states)))
                self._finish(here)
        except BaseException as error:
            with self._lock:
                self._used -= nbytes
            if isinstance(error, torch.OutOfMemoryError):
                raise StoreFull(
                    f"{self.device} has no room for {nbytes:,} bytes of states, though the budget "
                    "has; lower device_bytes"
                ) from error
            raise
        with self._lock:
            self._drop(key)
            self._states[key] = here
        return nbytes

    def get(self, key: KVKey) -> KVStates:
        states = self._states.get(key)
        if states is None:
            raise StateMissing(f"the device tier does not hold {key}")
        return states

    def delete(self, key: KVKey) -> None:
        with self._lock:
            self._drop(key)

    def __contains__(self, key: KVKey) -> bool:
        return key in self._states

    def keys(self) -> Iterator[KVKey]:
        with self._lock:
            return iter(tuple(self._states))

    def _drop(self, key: KVKey) -> None:
        states = self._states.pop(key, None)
        if states is not None:
            self._used -= self.size_of(states)

    def _copying(self, computed_here: bool) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if computed_here:
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
        return torch.cuda.stream(self._stream)

    def _place(self, tensor: Tensor) -> Tensor:
        """A compact copy on the device, perhaps still under way."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return copy.copy_(tensor, non_blocking=True)

    def _finish(self, states: KVStates) -> None:
        if self._stream is None:
            return
        for tensor in tensors_of(states).values():
            # Freed memory goes to the next copy, which must wait for what computes with it now.
            tensor.record_stream(torch.cuda.default_stream(self.device))
        self._stream.synchronize()
