"""Weights in floating point of 8 bits on a GPU, by torch's scaled products.

A step of few rows takes about the time of reading the weights, of which fp8 halves the bytes. A
step of many rows multiplies in fp8, at about twice the rate of bfloat16. Each row of a weight has a
scale, and so has each row of activations, which is rounded to fp8 before a product. Embeddings, the
head, norms and states stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUMBERS: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(NUMBERS).max
LEAST: Final = 1e-30
"""Scale of a row of zeros."""
WORD: Final = 16
"""Both sizes of a weight are multiples of so many."""


class Fp8Linear(nn.Module):
    """A linear layer over weights in fp8."""

    weight: Tensor
    """[out, in], float8_e4m3fn."""
    scales: Tensor
    """[1, out], float32."""
    bias: Tensor | None
    """[out], in the dtype of the activations."""
    one: Tensor
    """The scale of a product whose result is scaled afterwards, float32."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        one = torch.ones((), device=weight.device)
        self.register_buffer("one", one, persistent=False)

    def part(self, rows: slice) -> Fp8Linear:
        """A layer with some rows of the weight."""
        bias = None if self.bias is None else self.bias[rows]
        return Fp8Linear(self.weight[rows], self.scales[:, rows], bias)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Fp8Linear:
        """Round a weight [out, in] to fp8, on its device."""
        numbers, scales = rounded(weight)
        return cls(numbers, scales.t().contiguous(), bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:  # noqa: ARG002
        """Move the layer to a device. Numbers and scales keep their dtypes."""
        for name, before in [*self.named_buffers(recurse=False)]:
            moved = fn(before)
            if name != "bias" and moved.dtype != before.dtype:
                moved = before.to(moved.device)
            setattr(self, name, moved.contiguous() if moved.is_cuda else moved)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in]; returns [..., out] in its dtype. On a CPU, which is for trials of
        families alone, the weight is restored and the activations are exact."""
        out = self.product(hidden.reshape(-1, self.in_features))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """The product without the bias. rows: [R, in]; returns [R, out] in their dtype."""
        return self.multiply(rows) if rows.is_cuda else F.linear(rows, self.restored(rows.dtype))

    def multiply(self, rows: Tensor) -> Tensor:
        """The product in fp8. rows: [R, in]; returns [R, out] in their dtype.

        The result is scaled afterwards, in a kernel that Inductor merges with the operations behind
        it. With few rows, cuBLASLt reads weights up to twice as fast as the product that PyTorch
        has for scales of rows.
        """
        numbers, scales = rounded(rows)
        out: Tensor = torch._scaled_mm(
            numbers,
            self.weight.t(),
            scale_a=self.one,
            scale_b=self.one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return (out.float() * scales * self.scales).to(rows.dtype)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The weight, [out, in]."""
        return (self.weight.float() * self.scales.t()).to(dtype)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [R, C] to fp8. Returns numbers, and scales [R, 1] in float32."""
    scales = (rows.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=LEAST)
    numbers = (rows.float() / scales).clamp(-LARGEST, LARGEST)  # a quotient may round up
    return numbers.to(NUMBERS), scales


def quantize_fp8(model: nn.Module, head: nn.Module | None, device: torch.device) -> int:
    """Replace the linear layers of a model by layers in fp8, in place, one after another.

    Args:
        model: The model, on any device.
        head: Its head, which stays.
        device: Device on which weights are rounded, and stay.

    Returns:
        How many layers are in fp8.
    """
    count = 0
    for owner in [*model.modules()]:
        for name, layer in [*owner.named_children()]:
            if layer is head or not isinstance(layer, nn.Linear) or not packs(layer):
                continue
            bias = None if layer.bias is None else layer.bias.detach().to(device)
            setattr(owner, name, Fp8Linear.pack(layer.weight.detach().to(device), bias))
            count += 1
    return count


def joined_fp8(layers: Sequence[Fp8Linear]) -> Fp8Linear:
    """One layer with the rows of all layers."""
    weight, scales = (
        torch.cat([each.weight.view(torch.uint8) for each in layers]).view(NUMBERS),
        torch.cat([each.scales for each in layers], 1),
    )
    biases = [each.bias for each in layers if each.bias is not None]
    return Fp8Linear(weight, scales, torch.cat(biases) if biases else None)


def packs(module: nn.Module) -> bool:
    """Whether a module is a linear layer of sizes that scaled products take."""
    if type(module) is not nn.Linear:
        return False
    return module.in_features % WORD == module.out_features % WORD == 0
