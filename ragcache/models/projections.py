"""Merged projections: linear layers over the same input become one product.

A decoder layer multiplies one input by the weights of queries, keys and values, and another by the
weights of gate and up. With few rows, reading the weights dominates a product, and a small matrix
occupies neither a GPU nor all cores; one merged product does. Each of these linear layers is
replaced by one that returns its columns of the product. The model's own code stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.models.fp8 import Fp8Linear, joined_fp8
from ragcache.models.model import CausalLM

Linear = nn.Linear | Fp8Linear

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of linear layers that a module calls with the same input."""


class MergedLinear(nn.Module):
    """So many linear layers over the same input, multiplied at once. Keeps the last input with its
    product until every layer has its columns, in any order: Falcon-H1 asks for up before gate.
    Threads may call it at once: they see the whole tuple or none.
    """

    def __init__(self, linear: nn.Module, layers: int) -> None:
        super().__init__()
        self.linear, self.layers = linear, layers
        self.kept: tuple[Tensor, Tensor, int] | None = None
        """The input, the product, and how many layers have not asked for it yet."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The product, [..., all columns]; computed where the input is another than before."""
        kept = self.kept
        if kept is None or kept[0] is not hidden:
            kept = hidden, self.linear(hidden), self.layers
        _, product, left = kept
        self.kept = (hidden, product, left - 1) if left > 1 else None
        return product


class ProjectionSlice(nn.Module):
    """Columns begin:end of a `MergedLinear`, in place of a linear layer."""

    merged: MergedLinear

    def __init__(self, merged: MergedLinear, begin: int, end: int) -> None:
        super().__init__()
        object.__setattr__(self, "merged", merged)  # not registered: its weights count once
        self.begin, self.end = begin, end

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.merged(hidden)
        return product[..., self.begin : self.end]


def merge_projections(language: CausalLM) -> int:
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
            if parts := plain_linears(owner, names):
                _merge(owner, names, parts)
                merged += 1
    return merged


def linear_groups(
    owner: nn.Module, packs: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, ...]]:
    """Names of the linear layers of a module that `packs` accepts, layers over the same input
    together."""
    single = [name for name, each in owner.named_children() if packs(each)]
    for names in GROUPS:
        if set(names) <= set(single) and plain_linears(owner, names):
            yield names
            single = [name for name in single if name not in names]
    yield from ((name,) for name in single)


def plain_linears(owner: nn.Module, names: tuple[str, ...]) -> list[Linear]:
    """The owner's layers of these names, where all are plain, without hooks, and fit each other."""
    found: list[Any] = [getattr(owner, name, None) for name in names]
    parts = [p for p in found if type(p) in (nn.Linear, Fp8Linear) and not _is_hooked(p)]
    kinds = {(p.in_features, p.bias is None, p.weight.dtype, p.weight.device) for p in parts}
    return parts if len(parts) == len(names) and len(kinds) == 1 else []


def _is_hooked(layer: nn.Module) -> bool:
    """Whether calling a layer may do more than its class does, as where weights are offloaded."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _merge(owner: nn.Module, names: tuple[str, ...], parts: list[Linear]) -> None:
    """Replace the owner's linear layers. The memory of their weights is freed."""
    linear, widths = joined_linear(parts), [part.out_features for part in parts]
    parts.clear()
    replace_linears(owner, names, linear, widths)
    if linear.weight.device.type == "cuda":
        # freed weights lie in segments too small for the next merged one
        torch.cuda.empty_cache()


def joined_linear(parts: list[Linear]) -> Linear:
    """One linear layer with the rows of all parts, which are of one kind."""
    first = parts[0]
    if isinstance(first, Fp8Linear):
        return joined_fp8([each for each in parts if isinstance(each, Fp8Linear)])
    with torch.device("meta"):
        linear = nn.Linear(first.in_features, 1, bias=first.bias is not None)
    linear.out_features = sum(part.out_features for part in parts)
    weight = torch.cat([part.weight.detach() for part in parts])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if first.bias is not None:
        bias = torch.cat([part.bias.detach() for part in parts if part.bias is not None])
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def replace_linears(
    owner: nn.Module, names: tuple[str, ...], linear: nn.Module, widths: list[int]
) -> None:
    """Replace the owner's layers of these names, as wide as `widths`, by one that has the rows of
    all of them."""
    merged = MergedLinear(linear, len(names))
    owner.add_module("merged_" + "_".join(names), merged)
    begin = 0
    for name, width in zip(names, widths, strict=True):
        setattr(owner, name, ProjectionSlice(merged, begin, begin + width))
        begin += width
