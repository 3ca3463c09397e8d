"""Relocation of rotary keys by turning the query.

Keys carry their rotation at the position where they were encoded. Moving a segment by `delta`
multiplies its keys by R(delta), and q·R(delta)k = (R(-delta)q)·k: the query turns back, the shared
keys stay untouched. Rotations compose by adding angles (RoFormer eq. 16), so this is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """cos and sin of the angles by which rows turn: [T or 1, R/2], R the rotated width, or any
    shape that broadcasts over the rows."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, delta: Tensor, inverse_frequency: Tensor) -> Rotation:
        """R(delta). delta: [T or 1], in positions; inverse_frequency: [R/2], radians a position."""
        angle = delta.to(torch.float32)[:, None] * inverse_frequency.to(torch.float32)
        return cls(angle.cos(), angle.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the rows of x: [..., D] by `rotation`, halves paired (GPT-NeoX layout).

    Returns the shape of x, contiguous. Dimensions beyond the rotated width pass through. Computed
    in float32, or wider if x is.
    """
    cos, sin = rotation.cos, rotation.sin
    half = cos.shape[-1]
    exact = torch.promote_types(x.dtype, torch.float32)
    left, right = x[..., :half].to(exact), x[..., half : 2 * half].to(exact)
    turned = x.new_empty(x.shape)
    turned[..., :half] = torch.addcmul(left * cos, right, sin, value=-1)
    turned[..., half : 2 * half] = torch.addcmul(right * cos, left, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned
