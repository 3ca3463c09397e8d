"""Memory that each rank has on its GPU, and that the GPUs of all other ranks reach.

CUDA's driver shares it. PyTorch has two ways of its own, and neither suits a leader that may load a
second model, with new followers (ADR 121). Its symmetric memory counts the calls of each process,
and waits for ever for a process with another count. Its shared storages count readers, and stay
allocated if the count is not exact at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from ragcache.errors import EngineFailed

T = TypeVar("T")

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """`CUipcMemHandle` of the driver."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class SharedMemory:
    """Zeroed memory on this rank's GPU, and the addresses of all ranks' memory.

    It is freed, and other ranks' memory unmapped, when nothing refers to the tensor.

    Args:
        nbytes: Bytes on each rank.
        group: Process group of the ranks, with NCCL for their devices.
        device: The GPU of this rank.

    Attributes:
        tensor: The memory of this rank, uint8 [nbytes].
        addresses: Address of each rank's memory, for the GPU of this rank.

    Raises:
        EngineFailed: The driver did not allocate, share or map the memory of a rank.
    """

    def __init__(self, nbytes: int, group: Any, device: torch.device) -> None:
        self._device = device
        self.addresses = list[int]()
        exported = gather_results(partial(self._allocate, nbytes), group)
        gather_results(partial(self._map, exported, group.rank()), group)

    def _allocate(self, nbytes: int) -> bytes:
        """Allocate the memory. Returns a handle, by which other ranks map it."""
        memory = _Memory(nbytes, self._device)
        self.tensor: Tensor = torch.as_tensor(memory, device=self._device).zero_()
        torch.cuda.synchronize(self._device)
        self._mapped = memory.mapped
        handle = _Handle()
        _call("cuIpcGetMemHandle", self._device, ctypes.byref(handle), memory.address)
        return bytes(handle)

    def _map(self, exported: Sequence[bytes], rank: int) -> None:
        for number, content in enumerate(exported):
            if number == rank:
                self.addresses.append(self.tensor.data_ptr())
                continue
            address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(content)
            into = ctypes.byref(address)
            _call("cuIpcOpenMemHandle_v2", self._device, into, handle, _LAZY_PEER_ACCESS)
            self._mapped.append(address.value)
            self.addresses.append(address.value)


class _Memory:
    """Memory of a GPU that PyTorch can make a tensor of, and the addresses of other ranks' memory
    that is mapped beside it. All of it is freed and unmapped with the object."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.address, self.mapped = ctypes.c_uint64(), list[int]()
        _call("cuMemAlloc_v2", device, ctypes.byref(self.address), ctypes.c_size_t(nbytes))
        # the process's end frees it as well
        finalize(self, _free, self.address, self.mapped, device).atexit = False
        self.__cuda_array_interface__ = {
            "data": (self.address.value, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def gather_results(make: Callable[[], T], group: Any) -> list[T]:
    """Return the results of all ranks, in the order of ranks.

    Args:
        make: Makes this rank's result, which can be pickled.
        group: Process group of the ranks.

    Raises:
        EngineFailed: A rank raised an error. All ranks raise this, and none waits for another.
    """
    result: T | None = None
    error = ""
    try:
        result = make()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, (result, error), group)
    for rank, (_, failure) in enumerate(found):
        if failure:
            raise EngineFailed(f"rank {rank} could not share memory with the others: {failure}")
    return [each for each, _ in found]


def _free(address: ctypes.c_uint64, mapped: list[int], device: torch.device) -> None:
    try:
        torch.cuda.synchronize(device)
    finally:
        for each in mapped:
            _call("cuIpcCloseMemHandle", device, ctypes.c_uint64(each))
        _call("cuMemFree_v2", device, address)


def _call(name: str, device: torch.device, *arguments: Any) -> None:
    """Call a function of the driver, in the device's context, which PyTorch has made."""
    driver, reason = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
    with torch.cuda.device(device):
        status = getattr(driver, name)(*arguments)
    if status:
        driver.cuGetErrorString(status, ctypes.byref(reason))
        said = (reason.value or b"an unknown error").decode()
        raise EngineFailed(f"{name} of CUDA's driver returned {status}, {said}")
