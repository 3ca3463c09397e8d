"""Weights in floating point of 8 bits on a GPU, by torch's scaled products.

A step of few rows takes about the time of reading the weights, of which fp8 halves the bytes. A
step of many rows multiplies in fp8, at about twice the rate of bfloat16. Each row of a weight has a
scale, and so has each row of activations, which is rounded to fp8 before a product. Layers over the
same input are one product. Embeddings, the head, norms and states stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragcache.models.projections import linear_groups, replace_linears

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
            setattr(self, name, moved)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in]; returns [..., out] in its dtype. On a CPU, which is for trials of
        families alone, the weight is restored and the activations are exact."""
        rows = hidden.reshape(-1, self.in_features)
        out = self.multiply(rows) if hidden.is_cuda else F.linear(rows, self.restored(rows.dtype))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

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
        How many products a pass has in fp8.
    """
    count = 0
    for owner in [*model.modules()]:
        for names in linear_groups(owner, packs):
            layers = [getattr(owner, name) for name in names]
            if layers[0] is head:
                continue
            widths = [each.out_features for each in layers]
            weight = torch.cat([each.weight.detach().to(device) for each in layers])
            biases = [each.bias.detach().to(device) for each in layers if each.bias is not None]
            layers.clear()
            one = Fp8Linear.pack(weight, torch.cat(biases) if biases else None)
            if len(names) > 1:
                replace_linears(owner, names, one, widths)
            else:
                setattr(owner, names[0], one)
            count += 1
    return count


def packs(module: nn.Module) -> bool:
    """Whether a module is a linear layer of sizes that scaled products take."""
    if type(module) is not nn.Linear:
        return False
    return module.in_features % WORD == module.out_features % WORD == 0
