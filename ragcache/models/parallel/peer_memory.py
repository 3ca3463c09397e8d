"""Memory that each rank has on its GPU, and that the GPUs of all other ranks reach.

CUDA's driver shares it. PyTorch has two ways of its own, and neither suits a leader that may load a
second model, with new followers (ADR 121). Its symmetric memory counts the calls of each process,
and waits for ever for a process with another count. Its shared storages count readers, and stay
allocated if the count is not exact at the end.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ragcache.errors import EngineFailed

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
        EngineFailed: The driver did not allocate, share or map the memory.
    """

    def __init__(self, nbytes: int, group: Any, device: torch.device) -> None:
        own = _allocate(nbytes, device)
        given: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(given, _export(own, device), group)
        self.addresses = [
            own if rank == group.rank() else _map(exported, device)
            for rank, exported in enumerate(given)
        ]
        memory = _Memory(own, nbytes)
        finalize(memory, _free, own, self.addresses, device).atexit = False
        self.tensor: Tensor = torch.as_tensor(memory, device=device).zero_()
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group)


class _Memory:
    """Memory of a GPU that PyTorch can make a tensor of."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _allocate(nbytes: int, device: torch.device) -> int:
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", device, ctypes.byref(address), ctypes.c_size_t(nbytes))
    return address.value


def _export(address: int, device: torch.device) -> bytes:
    handle = _Handle()
    _call("cuIpcGetMemHandle", device, ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def _map(exported: bytes, device: torch.device) -> int:
    address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(exported)
    _call("cuIpcOpenMemHandle_v2", device, ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    return address.value


def _free(own: int, addresses: list[int], device: torch.device) -> None:
    torch.cuda.synchronize(device)
    for each in addresses:
        name = "cuMemFree_v2" if each == own else "cuIpcCloseMemHandle"
        _call(name, device, ctypes.c_uint64(each))


def _call(name: str, device: torch.device, *arguments: Any) -> None:
    """Call the driver in the context of a device, which PyTorch has made."""
    with torch.cuda.device(device):
        status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise EngineFailed(f"memory that ranks share: {name} of CUDA's driver returned {status}")
