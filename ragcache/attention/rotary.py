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
    shape that broadcasts over the rows.

    interleaved: dimensions 2i and 2i+1 turn together (GPT-J layout), not i and i + R/2 (GPT-NeoX).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @classmethod
    def by(cls, delta: Tensor, inverse_frequency: Tensor, *, interleaved: bool = False) -> Rotation:
        """R(delta). delta: [T or 1], in positions; inverse_frequency: [R/2], radians a position."""
        angle = delta.to(torch.float32)[:, None] * inverse_frequency.to(torch.float32)
        return cls(angle.cos(), angle.sin(), interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the rows of x: [..., D] by `rotation`.

    Returns the shape of x, contiguous. Dimensions beyond the rotated width pass through. Computed
    in float32, or wider if x is.
    """
    cos, sin = rotation.cos, rotation.sin
    half = cos.shape[-1]
    if rotation.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    exact = torch.promote_types(x.dtype, torch.float32)
    left, right = x[..., first].to(exact), x[..., second].to(exact)
    turned = x.new_empty(x.shape)
    turned[..., first] = torch.addcmul(left * cos, right, sin, value=-1)
    turned[..., second] = torch.addcmul(right * cos, left, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned
