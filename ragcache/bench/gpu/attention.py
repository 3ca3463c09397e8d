"""Attention alone: the kernels of one decoding step over several layers, as a CUDA graph."""

from __future__ import annotations

from typing import Any

from ragcache.bench.gpu.table import GpuWorkload
from ragcache.bench.harness import LlamaShape


def bench_attention(shape: LlamaShape, load: GpuWorkload, device: str) -> dict[str, Any]:
    """Microseconds a layer, by rows and shared tokens."""
    del shape, load
    if device == "cpu":
        return {"skipped": "the kernels need a CUDA device"}
    raise NotImplementedError
