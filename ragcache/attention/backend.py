"""The seam between the design and the hardware: who computes a partial result."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ragcache.attention.cpu import FusedCpu
from ragcache.attention.partial import Partial, partial


class AttentionBackend(Protocol):
    """Computes what `ragcache.attention.partial.partial` defines."""

    def partial(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        """query: [Hq, T, D]; key, value: [Hkv, S, D]."""
        ...


class Reference:
    """The plain definition; any device, any dtype."""

    partial = staticmethod(partial)


def backend_for(device: torch.device) -> AttentionBackend:
    """The fastest backend that this device offers."""
    if device.type == "cpu" and FusedCpu.available():
        return FusedCpu()
    return Reference()
