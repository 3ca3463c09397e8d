"""Attention of long new texts among themselves, by cuDNN.

The new tokens of a long chunk see each other causally: a square of scores, whose products bound the
time, unlike the reading of states. cuDNN computes a square in less than half the time of the
kernels here. Kernels read documents and earlier tokens for the same rows, and both partial results
are added.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragcache.attention.triton.plan import HeadLayout

logger = logging.getLogger(__name__)

FEWEST_ROWS: Final = 1024
"""New tokens of a chunk from which they are a square."""

ROUNDED: Final = 1024
"""Squares are padded to multiples of so many rows: cuDNN prepares each size for 30 to 40 ms."""


def attend_square(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of rows to the rows up to their own.

    Args:
        query: [Hq, T, D], rotated, on a GPU in 16 bits.
        key: [Hkv, T, D].
        value: [Hkv, T, D].
        scale: Of the scores.

    Returns:
        Weighted values [T, Hq, D], and natural logarithms of the denominators [T, Hq], float32.
        Both are contiguous.
    """
    heads, rows, _ = query.shape
    if not query.is_cuda:
        return _by_definition(query, key, value, scale)
    q, k, v = (_by_rows(each) for each in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    lse = lse.reshape(heads, -1)[:, :rows]
    return out[0, :, :rows].transpose(0, 1).contiguous(), lse.T.contiguous()


def _by_rows(states: Tensor) -> Tensor:
    """States [H, T, D] as [1, H, padded T, D] in memory [T, H, D], in which queries and keys mostly
    are: cuDNN prepares each layout for itself, and results have that of the queries."""
    rows, more = states.transpose(0, 1), -states.shape[1] % ROUNDED
    rows = pad(rows, (0, 0, 0, 0, 0, more)) if more else rows.contiguous()
    return rows.transpose(0, 1)[None]


def _by_definition(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    group, rows = len(query) // len(key), query.shape[1]
    keys, values = (each.float().repeat_interleave(group, 0) for each in (key, value))
    scores = scale * query.float() @ keys.transpose(1, 2)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores.masked_fill_(hidden, -torch.inf)
    out = (scores.softmax(-1) @ values).to(query.dtype)
    return out.transpose(0, 1).contiguous(), scores.logsumexp(-1).T.contiguous()


def prepare_squares(
    heads: HeadLayout, dtype: torch.dtype, device: torch.device, most_rows: int = ROUNDED
) -> bool:
    """Let cuDNN prepare all sizes up to `most_rows`. Returns whether it computes such squares."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        for rows in range(ROUNDED, max(most_rows, ROUNDED) + 1, ROUNDED):
            size = heads.num_kv_heads, rows, heads.head_dim
            keys = torch.zeros(size, dtype=dtype, device=device)
            attend_square(keys.repeat_interleave(heads.group, 0), keys, keys, 1.0)
    except RuntimeError as error:  # an older GPU, or a size of heads that cuDNN does not know
        logger.info("long new texts attend by the kernels alone: %s", error)
        return False
    return True
