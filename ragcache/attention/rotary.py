"""Relocation of rotary keys by turning the query.

Keys carry their rotation at the position where they were encoded. Moving a segment by `delta`
multiplies its keys by R(delta), and q·R(delta)k = (R(-delta)q)·k: the query turns back, the shared
keys stay untouched. Rotations compose by adding angles (RoFormer eq. 16), so this is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """cos and sin of the angles by which query rows turn: [T or 1, R/2], R the rotated width, or
    [N, 1, T or 1, R/2] for N ways of turning the same rows."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, delta: Tensor, inverse_frequency: Tensor) -> Rotation:
        """R(delta). delta: [T or 1], in positions; inverse_frequency: [R/2], radians a position."""
        angle = delta.to(torch.float32)[:, None] * inverse_frequency.to(torch.float32)
        return cls(angle.cos(), angle.sin())

    @classmethod
    def stack(cls, rotations: Sequence[Rotation]) -> Rotation:
        """N rotations of equally many rows as one of the form [N, 1, T or 1, R/2]."""
        cos = torch.stack([rotation.cos for rotation in rotations])
        sin = torch.stack([rotation.sin for rotation in rotations])
        return cls(cos[:, None], sin[:, None])


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the rows of x: [H, T, D] by `rotation`, halves paired (GPT-NeoX layout).

    Returns [H, T, D], or [N, H, T, D] for N rotations. Dimensions beyond the rotated width pass
    through. Computed in float32, or wider if x is.
    """
    cos, sin = rotation.cos, rotation.sin
    half = cos.shape[-1]
    exact = torch.promote_types(x.dtype, torch.float32)
    left, right = x[..., :half].to(exact), x[..., half : 2 * half].to(exact)
    turned = x.new_empty(*cos.shape[:-3], *x.shape)
    turned[..., :half] = torch.addcmul(left * cos, right, sin, value=-1)
    turned[..., half : 2 * half] = torch.addcmul(right * cos, left, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned
