"""The seam between a step and the hardware: who computes a plan."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ragcache.attention.cpu import CpuAttentionBackend
from ragcache.attention.metadata import AttentionMetadata
from ragcache.attention.reference import ReferenceAttentionBackend


class AttentionBackend(Protocol):
    """Computes a plan. What stands above it does not change with the hardware."""

    def attend(
        self,
        plan: AttentionMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """query: [Hq, T, D], rotated to the rows' positions; key, value: [Hkv, T, D], the step's
        own, which stand where the plan writes them already. Returns [T, Hq, D]."""
        ...


def backend_for(device: torch.device) -> AttentionBackend:
    """The fastest backend that this device offers."""
    if device.type == "cpu" and CpuAttentionBackend.available():
        return CpuAttentionBackend()
    return ReferenceAttentionBackend()
