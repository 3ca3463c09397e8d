"""States in eight bits, for the tiers below the GPU: half of the bytes to keep and to move.

Keys are scaled per head and channel, values per head and token, as KIVI (Liu et al., 2024, §3)
found for keys, whose outliers are in fixed channels, and values, which have none. Measured on the
embedded reader's states of the example handbook, as |x - x'| / |x| of int8:

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
from ragcache.states.kv import Arrival, KVStates

KVDtype = Literal["model", "int8"]
"""How a tier keeps states: as the model computed them, or in eight bits with scales."""

KV_DTYPES: tuple[str, ...] = get_args(KVDtype)
_LARGEST = 127.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantizedStates:
    """Quantized keys and values of a run of tokens.

    keys, values: [L, Hkv, S, D], int8. key_scales: [L, Hkv, 1, D] and
    value_scales: [L, Hkv, S, 1], float32; an element is its number times its scale. dtype: that of
    the states before. arrival: as in `KVStates`.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    start: int
    dtype: torch.dtype
    arrival: Arrival | None = field(default=None, kw_only=True)

    @property
    def length(self) -> int:
        """S, in tokens."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all four tensors."""
        return sum(tensor.nbytes for tensor in tensors_of(self).values())

    def part(self, begin: int, end: int, start: int) -> QuantizedStates:
        """Tokens begin:end as states of their own, encoded from position `start` on. A view, with
        the same scales."""
        keys, values = self.keys[:, :, begin:end], self.values[:, :, begin:end]
        scales = self.value_scales[:, :, begin:end]
        return replace(self, keys=keys, values=values, value_scales=scales, start=start)

    def layer(self, number: int) -> QuantizedStates:
        """One layer alone. A view."""
        here = slice(number, number + 1)
        return replace(
            self, keys=self.keys[here], values=self.values[here],
            key_scales=self.key_scales[here], value_scales=self.value_scales[here],
        )  # fmt: skip

    @keeps_no_workers
    def restore(self, dtype: torch.dtype | None = None) -> KVStates:
        """States in `dtype`, by default the one that they had before, on the same device.

        Against the states that were quantized an element is wrong by at most half of its scale, and
        by the rounding of `dtype`.
        """
        wait_for_arrival(self)
        dtype = dtype or self.dtype
        keys = self.keys.float().mul_(self.key_scales).to(dtype)
        values = self.values.float().mul_(self.value_scales).to(dtype)
        return KVStates(keys, values, self.start)


StoredStates = KVStates | QuantizedStates
"""What a tier holds."""


@keeps_no_workers
def quantize(states: StoredStates, kv_dtype: KVDtype) -> StoredStates:
    """States as a tier of this `kv_dtype` keeps them; the same object where they are so already.

    States that were quantized are restored first: `model` brings them back in their own dtype, but
    not the bits that were lost. States that are not finite have no scale and stay as the model
    computed them. Raises `ConfigurationError` for an unknown `kv_dtype`.
    """
    check_kv_dtype(kv_dtype)
    if kv_dtype_of(states) == kv_dtype:
        return states
    wait_for_arrival(states)
    plain = restored(states)
    if kv_dtype == "model":
        return plain
    keys, key_scales = _scaled(plain.keys, 2)
    values, value_scales = _scaled(plain.values, 3)
    if not (key_scales.isfinite().all() and value_scales.isfinite().all()):
        return plain
    return QuantizedStates(keys, values, key_scales, value_scales, plain.start, plain.keys.dtype)


def quantized_nbytes(states: StoredStates, kv_dtype: KVDtype) -> int:
    """The bytes that `quantize` would return, from shapes alone (for finite states)."""
    if kv_dtype_of(states) == kv_dtype:
        return states.nbytes
    layers, heads, tokens, size = states.keys.shape
    elements = states.keys.numel() + states.values.numel()
    if kv_dtype == "model":
        return elements * model_dtype(states).itemsize
    scales = layers * heads * (tokens + size)
    return elements + scales * torch.float32.itemsize


def restored(states: StoredStates) -> KVStates:
    """States that attention can read: these themselves unless they are quantized."""
    return states.restore() if isinstance(states, QuantizedStates) else states


def readable(states: StoredStates) -> StoredStates:
    """States that the attention of their device can read: a GPU's reads int8 where it is."""
    return states if states.keys.is_cuda else restored(states)


def wait_for_arrival(states: StoredStates) -> None:
    """Waits in the calling thread until states are there, before it reads them itself."""
    if states.arrival is not None:
        states.arrival.synchronize()


def kv_dtype_of(states: StoredStates) -> KVDtype:
    """How states are kept."""
    return "model" if isinstance(states, KVStates) else "int8"


def model_dtype(states: StoredStates) -> torch.dtype:
    """The dtype in which the model computed states."""
    return states.dtype if isinstance(states, QuantizedStates) else states.keys.dtype


def check_kv_dtype(kv_dtype: str) -> KVDtype:
    """Raises `ConfigurationError` for an unknown kind."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigurationError(f"unknown kv_dtype {kv_dtype!r}; kinds: {', '.join(KV_DTYPES)}")
    return cast("KVDtype", kv_dtype)


def tensors_of(states: StoredStates) -> dict[str, Tensor]:
    """Everything that states consist of, by name, in the order in which tiers lay it out: the
    widest elements first, so that all are aligned."""
    plain = {"keys": states.keys, "values": states.values}
    if isinstance(states, KVStates):
        return plain
    return {"key_scales": states.key_scales, "value_scales": states.value_scales, **plain}


def rebuild(
    tensors: Mapping[str, Tensor], start: int, dtype: torch.dtype, arrival: Arrival | None = None
) -> StoredStates:
    """The inverse of `tensors_of`. Raises `KeyError` where one is missing."""
    keys, values = tensors["keys"], tensors["values"]
    if len(tensors) == 2:
        return KVStates(keys, values, start, arrival=arrival)
    key_scales, value_scales = tensors["key_scales"], tensors["value_scales"]
    return QuantizedStates(keys, values, key_scales, value_scales, start, dtype, arrival=arrival)


def _scaled(states: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Numbers [L, Hkv, S, D] and scales with `axis` of size one. A run without tokens has none."""
    exact = states.float()
    largest = exact.abs().amax(axis, keepdim=True) if exact.numel() else exact.sum(axis, True)
    scales = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (exact / scales).round()  # at most _LARGEST, but for rounding
    return numbers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales
