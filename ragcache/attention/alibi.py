"""ALiBi: a bias of slope times distance, head by head (Press et al., 2022, §3).

A score is q·k*scale + slope*(key position - query position). Over a run whose keys stand at i = 0..
from its first key on, slope*i belongs to the run wherever it stands, and what is left,
slope*(first key's position - query position), is one constant for the whole run. Moving a run
therefore only shifts `lse`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.attention.partial import Partial


def run_bias(slopes: Tensor, key: Tensor) -> Tensor:
    """[Hkv, 1, G, S]: slope*i for a run's keys. slopes: [Hq]; key: [Hkv, S, D]."""
    steps = torch.arange(key.shape[1], dtype=torch.float32, device=key.device)
    return slopes.view(key.shape[0], 1, -1, 1) * steps


def starting_at(part: Partial, slopes: Tensor, distance: Tensor) -> Partial:
    """The partial result where the run's first key stands `distance` ([N]) from each row."""
    _, kv_heads, group = part.lse.shape
    shift = distance[:, None, None] * slopes.view(kv_heads, group)
    return Partial(part.out, part.lse + shift)


def square_bias(slopes: Tensor, positions: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, N, G, N] for new tokens at positions [N] that see each other."""
    distance = positions[None, :] - positions[:, None]  # [N, N], key less query
    return slopes.view(kv_heads, 1, -1, 1) * distance[:, None]


def page_bias(slopes: Tensor, distance: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, B, G, S] for rows whose keys stand at the distances [B, S]."""
    return slopes.view(kv_heads, 1, -1, 1) * distance[:, None]
