"""Copies of some heads of states between main memory and a device.

The heads of a rank are one run of bytes in every layer. PyTorch would gather them on the host
first; CUDA copies runs at a distance in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Runs = NDArray[np.int64]
"""[n, 6]: address of the first layer's run in the target, bytes from a layer to the next there, the
same of the source, bytes of a run, and number of layers. Columns are named below."""

TARGET, TARGET_PITCH, SOURCE, SOURCE_PITCH, WIDTH, LAYERS = range(6)

_ANY_DIRECTION: Final = 4  # cudaMemcpyDefault


def copy_layers(target: Tensor, source: Tensor) -> None:
    """Copy states [L, H, S, D] on the current stream, without waiting for it.

    Every layer of both tensors must be contiguous if they are on different devices.
    """
    if target.device == source.device or not target.numel():
        target.copy_(source, non_blocking=True)
        return
    copy_runs(runs_of([(target, source)]), target.device if target.is_cuda else source.device)


def runs_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> Runs:
    """Describe copies of states [L, H, S, D], each to the first from the second tensor.

    The second dimension of one tensor may be longer, as that of all heads. Its first heads are then
    meant. Every layer must be contiguous.
    """
    found = np.empty((len(pairs), 6), np.int64)
    for row, (target, source) in zip(found, pairs, strict=True):
        width = min(target[:1].nbytes, source[:1].nbytes)
        if target.dtype != source.dtype or not (_packed(target) and _packed(source)):
            raise ValueError("states of different dtypes or strides cannot cross between devices")
        pitches = (each.stride(0) * each.itemsize for each in (target, source))
        target_pitch, source_pitch = (max(width, each) for each in pitches)
        row[:] = (
            *(target.data_ptr(), target_pitch, source.data_ptr(), source_pitch),
            *(width, len(target) if width else 0),
        )
    return found


def pieces_of(runs: Runs, ends: Sequence[int]) -> Iterator[Runs]:
    """Cut copies by layers. Piece n ends with layer `ends[n]`."""
    for begin, end in pairwise([0, *ends]):
        piece = runs.copy()
        piece[:, TARGET] += begin * piece[:, TARGET_PITCH]
        piece[:, SOURCE] += begin * piece[:, SOURCE_PITCH]
        piece[:, LAYERS] = np.clip(piece[:, LAYERS] - begin, 0, end - begin)
        yield piece


def copy_runs(runs: Runs, device: torch.device) -> None:
    """Copy runs of bytes on a device's current stream, without waiting for it. On a CPU the copies
    end on return."""
    if device.type != "cuda":
        for into, into_pitch, start, pitch, width, layers in runs.tolist():
            for layer in range(layers):
                ctypes.memmove(into + layer * into_pitch, start + layer * pitch, width)
        return
    copy, stream = _runtime_copy(), torch.cuda.current_stream(device).cuda_stream
    for into, into_pitch, start, pitch, width, layers in runs.tolist():
        if not layers:
            continue
        code = copy(into, into_pitch, start, pitch, width, layers, _ANY_DIRECTION, stream)
        if code:
            raise RuntimeError(f"CUDA cannot copy states (error {code})")


def _packed(states: Tensor) -> bool:
    return not states.numel() or states[0].is_contiguous()


@cache
def _runtime_copy() -> Any:
    """`cudaMemcpy2DAsync` of the runtime that PyTorch has loaded."""
    copy = ctypes.CDLL(_loaded_runtime()).cudaMemcpy2DAsync
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
