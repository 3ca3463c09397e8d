"""The experts of a mixture on a GPU: products without waiting for the device, in compiled layers.

transformers' own products over sorted rows take a dozen small kernels around each of the two. With
few rows, a step reads weights and hardly computes; each product is then one kernel, and one more
sorts the rows. Many rows are multiplied by PyTorch's grouped product.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "ragcache"
FEW_PAIRS = 1024
"""Pairs of a row and an expert up to which one kernel computes a product."""


class _Step(threading.local):
    """The step that a thread launches."""

    live: Tensor | None = None


_step = _Step()


@contextmanager
def only_live_rows(count: Tensor) -> Iterator[None]:
    """Let products of few rows skip padding within the block: it would read weights of experts
    that no other row chooses.

    Args:
        count: int32 [1] on the device. Rows behind the first so many are padding.
    """
    _step.live = count
    try:
        yield
    finally:
        _step.live = None


def use_expert_kernels(model: nn.Module) -> None:
    """Let the experts of a model be computed by `compute_experts`, in place. Models whose experts
    do not go through transformers' interface stay as they are."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "is_transposed")]
    for module in modules:
        module.ragcache_gated = _is_silu_gated(module)
        module.config._experts_implementation = IMPLEMENTATION


def _is_silu_gated(module: Any) -> bool:
    """Tell whether the first half of a module's columns are gates, by transformers' own rule, with
    SiLU."""
    plain = type(module)._apply_gate.__module__ == ALL_EXPERTS_FUNCTIONS.__module__
    usual = plain and module.has_gate and not module.has_bias and module.is_concatenated
    return usual and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN["silu"])))


def compute_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a mixture's experts, for transformers' interface.

    Args:
        module: Holds the weights of all experts.
        hidden_states: [T, hidden size].
        top_k_index: [T, k], the experts of each row.
        top_k_weights: [T, k].

    Returns:
        [T, hidden size].
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    gated: bool = module.ragcache_gated
    found, order = to_experts(hidden_states, _weight(module, up), top_k_index, gated)
    if module.has_bias:
        found = found + getattr(module, f"{up}_bias")[top_k_index.flatten()[order]]
    if not gated:
        found = module._apply_gate(found) if module.has_gate else module.act_fn(found)
    found = from_experts(found, _weight(module, "down_proj"), top_k_index, order)
    if module.has_bias:
        found = found + module.down_proj_bias[top_k_index.flatten()]
    if getattr(module, "has_post_expert_norm", False):
        found = module.post_expert_norm(found)
    weighted = found.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    total: Tensor = weighted.sum(1)
    return total.to(hidden_states.dtype)


def _weight(module: Any, name: str) -> Tensor:
    """The weights of all experts, [E, in, out]."""
    weight: Tensor = getattr(module, name)
    return weight if module.is_transposed else weight.transpose(1, 2)


@torch.library.custom_op(
    "ragcache::to_experts", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def to_experts(rows: Tensor, weight: Tensor, experts: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """Products of rows by the weights of their experts. Does not wait for the device.

    Args:
        rows: [T, K].
        weight: [E, K, N].
        experts: [T, k]. A pair is a row with one of its experts.
        gated: Whether the first half of the columns are gates of the others, through SiLU.

    Returns:
        [T * k, N], or N / 2 if gated, and the pair of each of its rows.
    """
    rows, experts = rows.contiguous(), experts.contiguous()
    if _few(rows, experts):
        from ragcache.models.expert_kernels import multiply_few, sort_pairs

        live = _step.live
        order = sort_pairs(experts, len(weight), live)
        return multiply_few(rows, weight, experts, order, live=live, gated=gated), order
    chosen, order = experts.flatten().sort()
    found = _multiply_groups(rows[order // experts.shape[1]], weight, chosen)
    if gated:
        gate, values = found.chunk(2, -1)
        found = torch.nn.functional.silu(gate) * values
    return found, order


@to_experts.register_fake
def _shape_to(rows: Tensor, weight: Tensor, experts: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    pairs, width = experts.shape[0] * experts.shape[1], weight.shape[2] // (1 + gated)
    return rows.new_empty(pairs, width), experts.new_empty(pairs)


@torch.library.custom_op(
    "ragcache::from_experts", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def from_experts(rows: Tensor, weight: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """Products of the rows that `to_experts` made, [T * k, K], by the weights [E, K, N] of their
    experts: [T * k, N], pair by pair."""
    rows, experts = rows.contiguous(), experts.contiguous()
    if _few(rows, experts):
        from ragcache.models.expert_kernels import multiply_few

        return multiply_few(rows, weight, experts, order, live=_step.live, back=True)
    found = _multiply_groups(rows, weight, experts.flatten()[order])
    return torch.empty_like(found).index_copy_(0, order, found)


@from_experts.register_fake
def _shape_from(rows: Tensor, weight: Tensor, experts: Tensor, order: Tensor) -> Tensor:  # noqa: ARG001
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _few(rows: Tensor, experts: Tensor) -> bool:
    return rows.is_cuda and experts.numel() <= FEW_PAIRS


def _multiply_groups(rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Products of rows that are sorted by their experts `chosen`."""
    numbers = torch.arange(len(weight), device=rows.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    # public since PyTorch 2.10
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = multiply(rows, weight, offs=ends)
    return product
