"""Merged projections: linear layers over the same input as one product.

A decoder layer multiplies one input by the weights of queries, keys and values, and another by
those of gate and up. With few rows a product costs what reading its weights costs, and a small
matrix does not occupy a GPU; one product of all does. The model's own code stays: each linear layer
is replaced by one that hands out its columns of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragcache.models.model import LanguageModel

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that a module calls with the same input."""


class MergedLinear(nn.Module):
    """Linear layers over the same input, multiplied at once. Keeps the last input with its product
    until the last of them was handed out. Threads may call it at once: they see both or neither.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([part.weight.detach() for part in parts])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """The product, [..., all columns]; computed where the input is another than before."""
        kept = self.kept
        if kept is None or kept[0] is not hidden:
            self.kept = kept = hidden, F.linear(hidden, self.weight, self.bias)
        return kept[1]


class ProjectionSlice(nn.Module):
    """Columns begin:end of a `MergedLinear`, in place of a linear layer."""

    merged: MergedLinear

    def __init__(self, merged: MergedLinear, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "merged", merged)  # not registered: its weights count once
        self.begin, self.end, self.last = begin, end, last

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.merged(hidden)
        if self.last:
            self.merged.kept = None
        return product[..., self.begin : self.end]


def merge_projections(language: LanguageModel) -> int:
    """Merges the projections of a model, in place. Memory for one merged weight is needed beyond
    the model. A second call changes nothing.

    The fingerprint is taken first, because it names the parameters that end here.

    Returns: How many groups were merged.
    """
    assert language.fingerprint
    merged = 0
    first = tuple(names[0] for names in GROUPS)
    # owners alone: a list of all modules would keep all weights until its end
    owners = [m for m in language.model.modules() if any(hasattr(m, name) for name in first)]
    for owner in owners:
        for names in GROUPS:
            if parts := _plain_linears(owner, names):
                _merge(owner, names, parts)
                merged += 1
    return merged


def _plain_linears(owner: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The owner's layers of these names, where all are plain, without hooks, and fit each other."""
    found = [getattr(owner, name, None) for name in names]
    parts = [p for p in found if type(p) is nn.Linear and not _is_hooked(p)]
    parts = [p for p in parts if type(p.weight) is nn.Parameter]  # a quantized one is not joined
    kinds = {(p.in_features, p.bias is None, p.weight.dtype, p.weight.device) for p in parts}
    return parts if len(parts) == len(names) and len(kinds) == 1 else []


def _is_hooked(layer: nn.Module) -> bool:
    """Whether calling a layer may do more than its class does, as where weights are offloaded."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _merge(owner: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    """Replaces the owner's linear layers. The memory of their weights is freed."""
    merged = MergedLinear(parts)
    owner.add_module("merged_" + "_".join(names), merged)
    widths = [part.out_features for part in parts]
    device = merged.weight.device
    begin = 0
    for name, width in zip(names, widths, strict=True):
        setattr(owner, name, ProjectionSlice(merged, begin, begin + width, last=name == names[-1]))
        begin += width
    parts.clear()
    if device.type == "cuda":
        # freed weights lie in segments too small for the next merged one
        torch.cuda.empty_cache()
