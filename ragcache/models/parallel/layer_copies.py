"""Copies of some heads of states between main memory and a GPU.

The heads of a rank are one run of bytes in every layer. PyTorch would gather them on the host
first; CUDA copies runs at a distance in one call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ANY_DIRECTION = 4  # cudaMemcpyDefault


def copy_layers(target: Tensor, source: Tensor) -> None:
    """Copy states [L, H, S, D] on the current stream, without waiting for it.

    Every layer of both tensors must be contiguous if they are on different devices.
    """
    if target.device == source.device or not target.numel():
        target.copy_(source, non_blocking=True)
        return
    if target.dtype != source.dtype or not (_packed(target) and _packed(source)):
        raise ValueError("states of different dtypes or strides cannot cross between devices")
    copy = _runtime_copy()
    if copy is None:
        for into, layer in zip(target, source, strict=True):
            into.copy_(layer, non_blocking=True)
        return
    width = target[0].numel() * target.itemsize
    pitches = (each.stride(0) * each.itemsize for each in (target, source))
    into_pitch, from_pitch = (max(width, each) for each in pitches)
    device = target.device if target.is_cuda else source.device
    stream = torch.cuda.current_stream(device).cuda_stream
    code = copy(
        *(target.data_ptr(), into_pitch, source.data_ptr(), from_pitch),
        *(width, len(target), _ANY_DIRECTION, stream),
    )
    if code:
        raise RuntimeError(f"CUDA cannot copy states (error {code})")


def _packed(states: Tensor) -> bool:
    return states[0].is_contiguous()


@cache
def _runtime_copy() -> Any:
    """`cudaMemcpy2DAsync` of the runtime that PyTorch has loaded, if it is found."""
    try:
        copy = ctypes.CDLL(_loaded_runtime()).cudaMemcpy2DAsync
    except (OSError, AttributeError):
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    copy.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    copy.restype = ctypes.c_int
    return copy


def _loaded_runtime() -> str:
    """File of the runtime in this process, or the name by which a loader may find it."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path:
            return path
    return f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
