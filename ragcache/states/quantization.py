"""States in eight bits: half the bytes to store and to transfer.

Keys are scaled per head and channel, because their outliers are in fixed channels. Values have no
such outliers and are scaled per head and token (KIVI, Liu et al., 2024, §3). Relative error |x -
x'| / |x| of int8 on the embedded reader's states of the example handbook:

    keys    per channel 0.55 %    per token 0.67 %    per head 1.02 %
    values  per channel 0.72 %    per token 0.59 %    per head 1.01 %
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.openmp import keeps_no_workers
from ragcache.states.kv import Arrival, KVStates, check_divisible
from ragcache.states.recurrent import RECURRENT_NAMES, RecurrentStates

KVDtype = Literal["model", "int8"]
"""Storage format of states in a tier: the model's dtype, or int8 with scales."""

KV_DTYPES: tuple[str, ...] = get_args(KVDtype)
_LARGEST = 127.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantizedStates:
    """Quantized keys and values of a run of tokens. An element is its number times its scale."""

    keys: Tensor
    """int8 [L, Hkv, S, D]."""
    values: Tensor
    """int8 [L, Hkv, S, D]."""
    key_scales: Tensor
    """float32 [L, Hkv, 1, D]."""
    value_scales: Tensor
    """float32 [L, Hkv, S, 1]."""
    start: int
    """Position of the first token."""
    dtype: torch.dtype
    """Dtype before quantization."""
    arrival: Arrival | None = field(default=None, kw_only=True)
    """As in `KVStates`."""
    recurrent: RecurrentStates | None = field(default=None, kw_only=True)
    """As in `KVStates`. Not quantized."""

    @property
    def length(self) -> int:
        """Number of tokens (S)."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in tensors_of(self).values())

    def part(self, begin: int, end: int, start: int) -> QuantizedStates:
        """Return a view of tokens begin:end with the same scales. See `KVStates.part`."""
        check_divisible(self.recurrent)
        keys, values = self.keys[:, :, begin:end], self.values[:, :, begin:end]
        scales = self.value_scales[:, :, begin:end]
        return replace(self, keys=keys, values=values, value_scales=scales, start=start)

    @keeps_no_workers
    def restore(self, dtype: torch.dtype | None = None) -> KVStates:
        """Return the states in `dtype`, by default their dtype before quantization.

        They stay on their device. The error of an element is at most half of its scale, plus the
        rounding of `dtype`.
        """
        wait_for_arrival(self)
        dtype = dtype or self.dtype
        keys = self.keys.float().mul_(self.key_scales).to(dtype)
        values = self.values.float().mul_(self.value_scales).to(dtype)
        return KVStates(keys, values, self.start, recurrent=self.recurrent)

    def readable(self) -> StoredStates:
        """Return the states as attention on their device reads them: restored, except on a GPU."""
        return self if self.keys.is_cuda else self.restore()


StoredStates = KVStates | QuantizedStates
"""States as a tier stores them: in the model's dtype or quantized."""


@keeps_no_workers
def quantize(states: StoredStates, kv_dtype: KVDtype) -> StoredStates:
    """Convert states to a storage format. Returns the same object if nothing changes.

    Converting int8 states to `model` restores their dtype, but not the lost bits. States with
    values that are not finite cannot be scaled and keep the model's dtype. Raises
    `ConfigurationError` for an unknown `kv_dtype`.
    """
    check_kv_dtype(kv_dtype)
    if kv_dtype_of(states) == kv_dtype:
        return states
    wait_for_arrival(states)
    plain = states.restore()
    if kv_dtype == "model":
        return plain
    keys, key_scales = _scaled(plain.keys, 2)
    values, value_scales = _scaled(plain.values, 3)
    if not (key_scales.isfinite().all() and value_scales.isfinite().all()):
        return plain
    return QuantizedStates(
        keys,
        values,
        key_scales,
        value_scales,
        plain.start,
        plain.keys.dtype,
        recurrent=plain.recurrent,
    )


def quantized_nbytes(states: StoredStates, kv_dtype: KVDtype) -> int:
    """Return the size in bytes that finite states have after `quantize`, from their shapes."""
    if kv_dtype_of(states) == kv_dtype:
        return states.nbytes
    layers, heads, tokens, size = states.keys.shape
    elements = states.keys.numel() + states.values.numel()
    recurrent = 0 if states.recurrent is None else states.recurrent.nbytes
    if kv_dtype == "model":
        return elements * model_dtype(states).itemsize + recurrent
    scales = layers * heads * (tokens + size)
    return elements + scales * torch.float32.itemsize + recurrent


def wait_for_arrival(states: StoredStates) -> None:
    """Block the calling thread until states have arrived."""
    if states.arrival is not None:
        states.arrival.synchronize()


def kv_dtype_of(states: StoredStates) -> KVDtype:
    """Return the storage format of states."""
    return "model" if isinstance(states, KVStates) else "int8"


def model_dtype(states: StoredStates) -> torch.dtype:
    """Return the dtype in which the model computed states."""
    return states.dtype if isinstance(states, QuantizedStates) else states.keys.dtype


def check_kv_dtype(kv_dtype: str) -> KVDtype:
    """Return a valid `kv_dtype`. Raises `ConfigurationError` for an unknown one."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigurationError(f"unknown kv_dtype {kv_dtype!r}; kinds: {', '.join(KV_DTYPES)}")
    return cast("KVDtype", kv_dtype)


def tensors_of(states: StoredStates) -> dict[str, Tensor]:
    """Return the tensors of states by name, in storage order.

    Tensors with wider elements go first, so that all tensors are aligned.
    """
    tensors = {"keys": states.keys, "values": states.values}
    if isinstance(states, QuantizedStates):
        tensors |= {"key_scales": states.key_scales, "value_scales": states.value_scales}
    if states.recurrent is not None:
        tensors |= states.recurrent.tensors()
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def rebuild(
    tensors: Mapping[str, Tensor], start: int, dtype: torch.dtype, arrival: Arrival | None = None
) -> StoredStates:
    """Create states from their tensors, the inverse of `tensors_of`.

    Raises `KeyError` if a tensor is missing.
    """
    keys, values = tensors["keys"], tensors["values"]
    recurrent = None
    if "last" in tensors:
        recurrent = RecurrentStates(**{name: tensors[name] for name in RECURRENT_NAMES})
    if "key_scales" not in tensors:
        return KVStates(keys, values, start, arrival=arrival, recurrent=recurrent)
    return QuantizedStates(
        keys,
        values,
        tensors["key_scales"],
        tensors["value_scales"],
        start,
        dtype,
        arrival=arrival,
        recurrent=recurrent,
    )


def _scaled(states: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Quantize [L, Hkv, S, D]. Returns int8 numbers, and scales in which `axis` has size one.

    A run without tokens has no scales.
    """
    exact = states.float()
    largest = exact.abs().amax(axis, keepdim=True) if exact.numel() else exact.sum(axis, True)
    scales = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (exact / scales).round()  # at most _LARGEST, except for rounding
    return numbers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales
