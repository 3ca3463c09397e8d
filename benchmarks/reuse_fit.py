"""A linear correction of primed states, fitted to the states that prompts give them."""

from __future__ import annotations

import torch
from plain_model import Cache, PlainModel
from torch import Tensor
from torch.nn import functional

SKIPPED = 16
"""Tokens at the front of modules that count for nothing, since `primed:16` computes them."""


class StateFit:
    """Ridge regression of deviations on states, for each layer and head, of keys and of values.

    Keys are compared at position 0.
    """

    def __init__(self, model: PlainModel) -> None:
        self.model = model
        shape = model.shape
        size = 2, shape.layers, shape.kv_heads, shape.head + 1
        double = {"dtype": torch.float64, "device": model.device}
        self.moments = torch.zeros(*size, shape.head + 1, **double)  # type: ignore[call-overload]
        self.products = torch.zeros(*size, shape.head, **double)  # type: ignore[call-overload]

    def add(self, kept: Cache, exact: Cache) -> None:
        """Take the states [L, Hkv, S, D] of a module, from position 0 on, and the exact ones."""
        for at, (one, other) in enumerate(zip(self._flat(kept), self._flat(exact), strict=True)):
            x = _with_constant(one)[..., SKIPPED:, :].double()
            y = (other - one)[..., SKIPPED:, :].double()
            self.moments[at] += x.transpose(-1, -2) @ x
            self.products[at] += x.transpose(-1, -2) @ y

    def weights(self, linear: bool, ridge: float = 0.01) -> Tensor:
        """Return corrections [2, L, Hkv, D + 1, D], or constants alone."""
        if not linear:
            found = torch.zeros_like(self.products)
            count = self.moments[..., -1:, -1:]
            found[..., -1:, :] = self.products[..., -1:, :] / count
            return found.float()
        mean = self.moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        mean = mean.clamp(min=1e-6)
        unit = torch.eye(self.moments.shape[-1], dtype=torch.float64, device=mean.device)
        solved: Tensor = torch.linalg.solve(self.moments + ridge * mean * unit, self.products)
        return solved.float()

    def corrected(self, states: Cache, weights: Tensor) -> Cache:
        keys, values = (
            each + _with_constant(each) @ own
            for each, own in zip(self._flat(states), weights, strict=True)
        )
        return Cache(self.model.rotated(keys, 0), values)

    def _flat(self, states: Cache) -> tuple[Tensor, Tensor]:
        return self.model.unrotated(states.keys, 0), states.values


def _with_constant(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 1), value=1.0)
