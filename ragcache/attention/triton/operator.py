"""The custom operator `ragcache::attend`: attention as compiled code and CUDA graphs see it.

A compiled layer must not depend on the contents of a step. It therefore calls one opaque operator,
which finds the live step by a handle, writes the layer's new states and attends. The layer is a
tensor and the handle a dynamic integer: one graph serves all layers of a model, and all steps.

This module does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class DeviceStep(Protocol):
    """Computes the attention of one runner's steps, over tables that it fills before each. Must be
    weakly referable (a dataclass with slots needs `weakref_slot=True`)."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes the layer's new states, and attends to all that the step's tables list.

        query: [1, Hq, T, D], rotated to the rows' positions; key, value: [1, Hkv, T, D], or value
        [1, 1, T, C], the end of a key that holds a latent; sinks: [Hq], the score of one more key
        per head, whose value is zero. Any strides, the last of them 1. Returns [1, T, Hq, D], as
        wide as the value, contiguous and new memory: what aliases an input is refused by PyTorch.
        May not wait for the device.
        """


class RecurrentStep(DeviceStep, Protocol):
    """Computes the recurrent layers, too, of a model that has some."""

    def convolve(
        self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool
    ) -> Tensor:
        """Convolves the rows of each request with the inputs before them.

        inputs: [1, channels, T]; weight: [channels, kernel]; bias: [channels]. Returns
        [1, T, channels], contiguous and new memory.
        """

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        step: Tensor,
        *,
        delta: bool,
        scale: float,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Continues the recurrent state of each request by its rows. See `RecurrentKernels.recur`.
        Returns float32 [1, T, H, dv], contiguous and new memory."""


@dataclass(frozen=True, slots=True)
class OperatorMetadata:
    """Replaces `AttentionMetadata` if a layer attends through the operator."""

    handle: int
    """Handle of the step, from `register_step`."""
    softcap: float | None = None
    """Bound of the scores in its attention."""

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Does nothing: the operator writes the states."""


_steps: WeakValueDictionary[int, DeviceStep] = WeakValueDictionary()
_handles = count(2)  # compiled code takes 0 and 1 for constants, any other number as it comes


def register_step(step: DeviceStep) -> int:
    """A handle by which the operator finds the step. The step lives no longer for it."""
    handle = next(_handles)
    _steps[handle] = step
    return handle


@torch.library.custom_op(
    "ragcache::attend", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    scale: float,
    handle: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """`DeviceStep.attend` of the step with this handle. layer: 0-dim int64 on the CPU."""
    return _steps[handle].attend(int(layer), query, key, value, scale, sinks)


@attend.register_fake
def _shape_attend(query: Tensor, _key: Tensor, value: Tensor, *_others: object) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1])


@torch.library.custom_op(
    "ragcache::convolve", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, layer: Tensor, handle: int
) -> Tensor:
    """`RecurrentStep.convolve` of the step with this handle. layer: 0-dim int64 on the CPU."""
    step = cast("RecurrentStep", _steps[handle])
    return step.convolve(int(layer), inputs, weight, bias, silu=silu)


@convolve.register_fake
def _shape_convolve(inputs: Tensor, *_others: object) -> Tensor:
    batch, channels, rows = inputs.shape
    return inputs.new_empty(batch, rows, channels)


@torch.library.custom_op(
    "ragcache::recur", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    delta: bool,
    scale: float,
    layer: Tensor,
    handle: int,
    rate: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """`RecurrentStep.recur` of the step with this handle. layer: 0-dim int64 on the CPU. rate and
    offset: the gates, or both None."""
    live, inputs = cast("RecurrentStep", _steps[handle]), (query, key, value, decay, step)
    gates = None if rate is None or offset is None else (rate, offset)
    return live.recur(int(layer), *inputs, delta=delta, scale=scale, gates=gates)


@recur.register_fake
def _shape_recur(query: Tensor, key: Tensor, value: Tensor, *_others: object) -> Tensor:  # noqa: ARG001
    return torch.empty(value.shape, dtype=torch.float32, device=value.device)


@torch.library.custom_op(
    "ragcache::normalize_gated", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def normalize_gated(rows: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows [1, T, H, dv] with a mean square of one, times `weight` [dv] and the SiLU of
    `gate` [1, T, H, dv], whose dtype the result has."""
    if gate.is_cuda:
        from ragcache.attention.triton import recurrent_launch

        return recurrent_launch.normalize_gated(rows, gate, weight, eps)
    even = rows.float() * torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + eps)
    return (even * weight.float() * torch.nn.functional.silu(gate.float())).to(gate.dtype)


@normalize_gated.register_fake
def _shape_normalized(rows: Tensor, gate: Tensor, *_others: object) -> Tensor:
    return torch.empty(rows.shape, dtype=gate.dtype, device=gate.device)
