"""The attention backend: the seam between a forward pass and the hardware."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from ragcache.attention.cpu import CpuAttentionBackend
from ragcache.attention.metadata import AttentionMetadata
from ragcache.attention.reference import ReferenceAttentionBackend


class AttentionBackend(Protocol):
    """Computes attention from its metadata. The code above it is the same on every device."""

    def attend(
        self, metadata: AttentionMetadata, layer: int,
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of one layer over shared states, blocks and the step's own tokens.

        query: [Hq, T, D], rotated to the rows' positions; key, value: [Hkv, T, D], the step's own,
        already written where the metadata wants them; scale: of the scores; sinks: [Hq], the scores
        of one more key a head, whose value is zero. Returns [T, Hq, D].
        """


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels (`ragcache.attention.triton`) compute attention on this device."""
    if device.type != "cuda":
        return False
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


def backend_for(device: torch.device) -> AttentionBackend:
    """The fastest backend for this device."""
    if device.type == "cpu" and CpuAttentionBackend.available():
        return CpuAttentionBackend()
    return ReferenceAttentionBackend()
