"""The CPU backend: PyTorch's fused attention kernel, which also returns the log-sum-exp.

The operator is an internal one of PyTorch (docs/adr/0005): it is what
`scaled_dot_product_attention` runs on a CPU, minus the wrapper that throws `lse` away. Where a
build lacks it, `backend_for` falls back to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.attention.partial import Partial, fold


class FusedCpu:
    """Fused attention in float32, bfloat16, float16 or float64, with float32 accumulation."""

    @staticmethod
    def available() -> bool:
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")

    def partial(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        heads, rows, dim = query.shape
        kv_heads, length, _ = key.shape
        if causal:
            # A causal mask needs whole query heads. The heads of a group become heads of one
            # batch row, and the keys are broadcast over them by a stride of zero: no copy.
            shape = (kv_heads, heads // kv_heads, length, dim)
            q = query.reshape(kv_heads, -1, rows, dim)
            k, v = key[:, None].expand(shape), value[:, None].expand(shape)
        else:
            q, k, v = fold(query, kv_heads)[None], key[None], value[None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return Partial(out.reshape(heads, rows, dim), lse.reshape(heads, rows))
