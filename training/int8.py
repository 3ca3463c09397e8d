"""Weights as the reader's file keeps them: matrices in int8, with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = "_scale"  # a matrix `name` goes with `name_scale`


def quantize_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices [rows, columns] become int8 with float32 scales [rows]; the rest stays."""
    kept: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            kept[name] = weight
            continue
        matrix = weight.float()
        scale = (matrix.abs().amax(dim=1) / 127).clamp(min=1e-12)
        kept[name] = (matrix / scale[:, None]).round().to(torch.int8)
        kept[name + SCALE] = scale
    return kept
