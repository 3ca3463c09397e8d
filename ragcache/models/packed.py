"""Linear layers over packed weights, for a CPU.

A step of few rows, as decoding takes, multiplies packed weights by activations in 8 bits. A step of
many rows multiplies a piece of the weights out at a time, in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragcache.errors import ConfigurationError
from ragcache.machine import quicker_rows
from ragcache.models.native import GROUP, TILE, Kernels, Packed, load_kernels

_PIECE = 2**22  # numbers of a weight that are multiplied out at once; they fit a cache
_SIDE = 2048  # size of the layer that is timed
_ROWS = (4, 8, 16, 32, 64, 128)
_DTYPES = (torch.float32, torch.bfloat16)  # of activations that the kernels read


class PackedLinear(nn.Module):
    """A linear layer over a packed weight (`ragcache.models.native.Packed`).

    Attributes:
        few_rows: The most rows that are multiplied by the packed weight.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None, few_rows: int) -> None:
        super().__init__()
        self.bits, self.out_features, self.in_features = packed[:3]
        self.register_buffer("weight", packed.numbers)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("bias", bias)
        self.packed, self.few_rows = packed, few_rows

    @classmethod
    def pack(
        cls, weight: Tensor, bits: int, bias: Tensor | None = None, few_rows: int = 0
    ) -> PackedLinear:
        """Pack a weight [out, in]. `in` is a multiple of 32."""
        return cls(required_kernels().pack(weight, bits)[0], bias, few_rows)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:  # noqa: ARG002
        return self  # numbers and scales keep their dtypes

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in]; returns [..., out] in its dtype."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        out = self.multiply(rows) if len(rows) <= self.few_rows else self.multiply_out(rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """The product by the packed weight. rows: [R, in]; returns [R, out] in their dtype."""
        kernels = required_kernels()
        if rows.dtype in _DTYPES:
            return kernels.product(rows, self.packed)
        return kernels.product(rows.float(), self.packed).to(rows.dtype)

    def multiply_out(self, rows: Tensor) -> Tensor:
        """The product of many rows, [R, out], through one buffer for pieces of the weight."""
        kernels, tiles = required_kernels(), -(-self.out_features // TILE)
        size = min(max(1, _PIECE // self.in_features // TILE), tiles)
        out = rows.new_empty(len(rows), self.out_features)
        dtype = rows.dtype if rows.dtype in _DTYPES else torch.float32
        buffer = torch.empty(size * TILE, self.in_features, dtype=dtype)
        for begin in range(0, tiles, size):
            end = min(begin + size, tiles)
            kernels.unpack(self.packed, begin, end, buffer)
            first, last = begin * TILE, min(end * TILE, self.out_features)
            piece = buffer[: last - first].to(rows.dtype)
            out[:, first:last] = F.linear(rows, piece)
        return out


def required_kernels() -> Kernels:
    """The compiled kernels. Raises `ConfigurationError` where there are none."""
    kernels = load_kernels()
    if kernels is None:
        raise ConfigurationError(
            "weights in 8 and 4 bits are multiplied by code that a C compiler makes for this "
            "processor, and none does; install gcc or clang, or leave quantization out"
        )
    return kernels


def packs(module: nn.Module) -> bool:
    """Whether a module is a linear layer of whole groups of inputs."""
    return type(module) is nn.Linear and module.in_features % GROUP == 0


@cache
def few_rows(bits: int, dtype: torch.dtype) -> int:
    """The most rows for which packed weights are quicker than weights that are multiplied out, on
    this machine; 0 where they never are, or no compiler makes the kernels."""
    if load_kernels() is None:
        return 0
    layer = PackedLinear.pack(torch.ones(_SIDE, _SIDE), bits)
    return quicker_rows(layer.multiply, layer.multiply_out, _SIDE, dtype, _ROWS)
