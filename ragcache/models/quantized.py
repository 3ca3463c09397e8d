"""Weights in 8 and 4 bits on a CPU, by torch's own products of packed weights.

`quantize_model` replaces the linear layers of a model by `PackedLinear`. A step of few rows, as
decoding takes, multiplies packed weights in bfloat16, which reads half to a quarter of the bytes. A
step of many rows multiplies a piece of the weights out at a time, in the dtype of the computation.
The number of rows from which the second is quicker is timed. `int8` has a scale per row; `int4` has
a scale and a zero for 32 numbers of a row, and the head in 8 bits. Embeddings, norms, activations
and states stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import xxhash
from huggingface_hub import cached_assets_path
from torch import Tensor, nn
from torch.nn import functional as F

from ragcache.errors import UnsupportedModel
from ragcache.machine import available_memory, quicker_rows
from ragcache.models.dtype import (
    AUTO,
    INT4,
    INT8,
    MEMORY_SHARE,
    Recall,
    dtype_name,
    measure_anew,
    timing_name,
    vocabulary_weights,
)
from ragcache.models.families import family_of
from ragcache.models.trial import SEEDS, TOLERANCE, tiny_config, tiny_model, trial_difference

logger = logging.getLogger(__name__)

PACKING = 1
"""Version of packed weights. Raise it if the same weights are packed in another way."""
KEPT_FROM = 2**26  # weights of a model from which its packed weights are kept on disk

GROUP = 32  # numbers of a row that share a scale in 4 bits
_BLOCK = 64  # rows of a weight that every kernel packs in whole blocks
_WORD = 16  # numbers of a row that the kernel for 8 bits reads at once
_PIECE = 2**22  # numbers of a weight that are multiplied out at once; they fit a cache
_SHARE = 0.5  # of the layers' weights, which must become small, or else nothing is gained
_SIDE = 2048  # size of the layer that is timed
_LEAST = 1e-30  # scale of a row of zeros
_ROWS = (4, 8, 16, 32, 64)


class PackedLinear(nn.Module):
    """A linear layer over packed weights.

    Attributes:
        few_rows: The most rows that are multiplied by packed weights.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        few_rows: int,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.few_rows = few_rows

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:  # noqa: ARG002
        return self  # numbers and scales keep their dtypes

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in]; returns [..., out] in its dtype."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        few = len(rows) <= self.few_rows
        out = self.multiply(rows.bfloat16()).to(hidden.dtype) if few else self._by_pieces(rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

    def _by_pieces(self, rows: Tensor) -> Tensor:
        """The product of many rows, [R, out], through one buffer for pieces of the weight."""
        size = max(1, _PIECE // self.in_features // _BLOCK) * _BLOCK
        size = min(size, self.out_features)
        out = rows.new_empty(len(rows), self.out_features)
        buffer = rows.new_empty(size * self.in_features)
        for begin in range(0, self.out_features, size):
            end = min(begin + size, self.out_features)
            piece = self.dequantize(begin, end, buffer[: (end - begin) * self.in_features])
            out[:, begin:end] = F.linear(rows, piece)
        return out

    def multiply(self, rows: Tensor) -> Tensor:
        """The product by packed weights. rows: [R, in] bfloat16; returns [R, out] bfloat16."""
        raise NotImplementedError

    def dequantize(self, begin: int, end: int, buffer: Tensor) -> Tensor:
        """Rows begin:end of the weight, [end - begin, in], over the memory of `buffer`."""
        raise NotImplementedError


class Int8Linear(PackedLinear):
    """weight: [out, in] int8; scales: [out] bfloat16."""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, few_rows: int = 0) -> Int8Linear:
        """Quantize a weight [out, in], to the nearest number of each row's scale."""
        rows, columns = weight.shape
        scales = torch.empty(rows, dtype=torch.bfloat16)
        numbers = torch.empty(rows, columns, dtype=torch.int8)
        for begin in range(0, rows, size := max(1, _PIECE // columns)):
            part = slice(begin, begin + size)
            piece = weight[part].float()
            scales[part] = (piece.abs().amax(1) / 127).clamp_(min=_LEAST)
            numbers[part] = (piece / scales[part, None].float()).round_().clamp_(-127, 127)
        return cls((rows, columns), numbers, scales, bias, few_rows)

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        return product

    def dequantize(self, begin: int, end: int, buffer: Tensor) -> Tensor:
        out = buffer.view(end - begin, self.in_features)
        scales = self.scales[begin:end, None].to(buffer.dtype)
        return torch.mul(self.weight[begin:end], scales, out=out)


class Int4Linear(PackedLinear):
    """weight: [out / B, in, B / 2] uint8, as the kernel of this processor packs it: rows j and
    j + B / 2 of a block of B in one byte; scales: [in / 32, out, 2] bfloat16, scales and zeros."""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, few_rows: int = 0) -> Int4Linear:
        """Quantize a weight [out, in] between the least and the largest number of each group."""
        groups = weight.float().view(len(weight), -1, GROUP)  # [out, in / 32, 32]
        least, most = groups.aminmax(dim=2)
        scale = ((most - least) / 15).clamp_(min=_LEAST).bfloat16()
        zero = (least + 8 * scale.float()).bfloat16()
        numbers = (groups - zero.float()[..., None]).div_(scale.float()[..., None])
        numbers = numbers.add_(8).round_().clamp_(0, 15).to(torch.int32).flatten(1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
        half = packed_block() // 2
        rows, columns = weight.shape
        return cls((rows, columns), packed.view(-1, columns, half), scales, bias, few_rows)

    def multiply(self, rows: Tensor) -> Tensor:
        packed = self.weight.view(self.out_features, -1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        product: Tensor = multiply(rows, packed, GROUP, self.scales)
        return product

    def dequantize(self, begin: int, end: int, buffer: Tensor) -> Tensor:
        half = self.weight.shape[2]
        packed = self.weight[begin // (2 * half) : end // (2 * half)].transpose(0, 1)
        out = buffer.view(self.in_features, end - begin)
        halves = out.view(self.in_features, -1, 2, half)
        halves[:, :, 0] = packed & 15
        halves[:, :, 1] = packed >> 4
        both = self.scales[:, None, begin:end].to(buffer.dtype).unbind(-1)
        scale, zero = (each.contiguous() for each in both)  # or no vectors are read: twice the time
        groups = out.view(-1, GROUP, end - begin)
        torch.addcmul(zero, groups.sub_(8), scale, out=groups)
        return out.t()


@cache
def packed_block() -> int:
    """Rows of a block of weights in 4 bits: 64 with AVX-512, 32 with AVX2, 0 for other kernels."""
    rows = torch.arange(_BLOCK, dtype=torch.int32)[:, None].expand(_BLOCK, GROUP) // 4
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.contiguous(), 1)
    return 8 * int(packed.flatten()[0] >> 4)


_KINDS: dict[str, type[Int8Linear | Int4Linear]] = {INT8: Int8Linear, INT4: Int4Linear}


@cache
def few_rows(quantization: str, dtype: torch.dtype) -> int:
    """The most rows for which packed weights are quicker than weights that are multiplied out, on
    this machine; 0 where they never are."""
    layer = _KINDS[quantization].pack(torch.ones(_SIDE, _SIDE))
    return quicker_rows(
        lambda rows: layer.multiply(rows.bfloat16()), layer._by_pieces, _SIDE, dtype, _ROWS
    )


def quantize_model(model: Any, quantization: str, dtype: torch.dtype) -> None:
    """Replace the linear layers of a model by packed ones, in place, one after another.

    Packed weights of a large model are kept in the cache folder, so that the next opening does not
    pack again.

    Args:
        model: A model of transformers on a CPU, whose family passed `check_family`.
        quantization: `int8` or `int4`.
        dtype: Dtype of the computation.
    """
    places = _places(model, quantization)
    limits = {kind: few_rows(kind, dtype) for kind in _KINDS}
    if sum(each.layer.weight.numel() for each in places) < KEPT_FROM:
        _pack(places, limits)
        return
    digest = _digest(places)
    kept = _read_packed(digest)
    _pack(places, limits, kept)
    if not kept:
        _keep_packed(places, digest)


def packed_folder() -> Path:
    """The folder of packed weights, beside the converted GGUF files. It may be deleted at any
    time."""
    return cached_assets_path("ragcache", namespace="models", subfolder="packed")


class _Place(NamedTuple):
    """A linear layer that is packed, and the class that packs it."""

    owner: nn.Module
    name: str
    kind: str

    @property
    def layer(self) -> Any:
        return getattr(self.owner, self.name)


def _places(model: Any, quantization: str) -> list[_Place]:
    head = model.get_output_embeddings()
    return [
        _Place(owner, name, quantization if each is not head and _divides(each) else INT8)
        for owner in model.modules()
        for name, each in owner.named_children()
        if _packs(each)
    ]


def _pack(
    places: Sequence[_Place], limits: Mapping[str, int], kept: Mapping[str, Tensor] | None = None
) -> None:
    """Replace each layer by a packed one. kept: weights that were packed before."""
    for number, place in enumerate(places):
        layer, kind = place.layer, _KINDS[place.kind]
        bias = None if layer.bias is None else layer.bias.detach()
        limit = limits[place.kind]
        if kept:
            shape = (layer.out_features, layer.in_features)
            packed: PackedLinear = kind(
                shape, kept[f"{number}.weight"], kept[f"{number}.scales"], bias, limit
            )
        else:
            packed = kind.pack(layer.weight.detach(), bias, limit)
        setattr(place.owner, place.name, packed)


def _digest(places: Sequence[_Place]) -> str:
    """Digest of the weights to pack, and of all that packed weights depend on."""
    digest = xxhash.xxh3_128(f"{PACKING}|{packed_block()}".encode())
    for place in places:
        weight = place.layer.weight.detach()
        digest.update(f"|{place.kind}|{tuple(weight.shape)}|{weight.dtype}|".encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read_packed(digest: str) -> dict[str, Tensor]:
    """Packed weights in the cache folder, mapped; none if there is no file, or one that is damaged.

    The format is torch's own, in which tensors begin at multiples of 64 bytes. The kernels load
    whole words from such addresses alone, and end the process at others.
    """
    try:
        file = packed_folder() / f"{digest}.pt"
        return torch.load(file, mmap=True, weights_only=True) if file.exists() else {}
    except (OSError, RuntimeError) as error:
        logger.warning("packed weights cannot be read, and are packed again: %s", error)
        return {}


def _keep_packed(places: Sequence[_Place], digest: str) -> None:
    """Write packed weights under another name first. Where that fails, nothing is kept."""
    tensors = {
        f"{number}.{name}": getattr(place.layer, name)
        for number, place in enumerate(places)
        for name in ("weight", "scales")
    }
    try:
        part = packed_folder() / f"{digest}.{os.getpid()}.part"
        try:
            torch.save(tensors, part)
            part.replace(part.with_name(f"{digest}.pt"))
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        logger.warning("packed weights are not kept, and the next opening packs again: %s", error)


def _packs(module: nn.Module) -> bool:
    """Whether a module is a linear layer of a width that the kernels read: they read whole words,
    beyond the end of others."""
    return type(module) is nn.Linear and module.in_features % _WORD == 0


def _divides(layer: nn.Linear) -> bool:
    """Whether the kernel for 4 bits packs a layer in whole blocks."""
    whole = layer.in_features % GROUP == 0 and layer.out_features % _BLOCK == 0
    return whole and packed_block() > 0


def choose_quantization(
    model: Any, quantization: str | None, dtype: torch.dtype, recall: Recall = measure_anew
) -> str | None:
    """The quantization that `auto` stands for: 8 bits, 4 where 8 do not fit the memory, none where
    packed weights are not quicker on this machine or the family is not served with them."""
    if quantization != AUTO:
        return quantization
    if getattr(model, "is_quantized", False):
        return None
    name = timing_name(f"{INT8}/{dtype_name(dtype)}")
    if not int(recall(name, lambda: str(few_rows(INT8, dtype)))):
        return None
    try:
        check_family(type(model), model.config)
    except UnsupportedModel:
        return None
    size = sum(each.numel() for each in model.parameters())
    return INT8 if size <= MEMORY_SHARE * available_memory() else INT4


def check_family(kind: type[Any], config: Any) -> None:
    """Check that a family can be served with packed weights, before weights are read.

    Tries a tiny random model (`ragcache.models.trial`). Raises `UnsupportedModel` where most
    weights are in no linear layer, or code reads weights past its layers.
    """
    family = family_of(config)
    family.check(config)
    with torch.device("meta"):
        _check_gain(kind._from_config(config))
    differences = []
    try:
        for seed in SEEDS:
            tiny = tiny_model(kind, tiny_config(config, family), seed)
            _pack(_places(tiny, INT8), dict.fromkeys(_KINDS, 0))
            differences.append(trial_difference(tiny))
            if differences[-1] <= TOLERANCE:
                return
    except Exception as error:  # code of models raises any type
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not served with quantized weights: their "
            f"code reads weights itself ({type(error).__name__}: {error}). Leave quantization out"
        ) from error
    raise UnsupportedModel(
        f"models of type {config.model_type!r} are not served with quantized weights: answers over "
        f"kept states would differ by {min(differences):.1%}. Leave quantization out"
    )


def _check_gain(model: Any) -> None:
    """Raises `UnsupportedModel` where most weights of the layers would stay as they are, as fused
    experts and the convolutions of GPT-2 do."""
    vocabulary = vocabulary_weights(model)
    small, large = 0, 0
    others: set[str] = set()
    for each in model.modules():
        own = [w for w in each.parameters(recurse=False) if w.dim() > 1 and id(w) not in vocabulary]
        size = sum(weight.numel() for weight in own)
        if _packs(each):
            small += size
        elif size:
            large += size
            others.add(type(each).__name__)
    if small < _SHARE * (small + large):
        raise UnsupportedModel(
            f"a {model.config.model_type} model keeps {large / (small + large):.0%} of its layers' "
            f"weights in {', '.join(sorted(others))}, which are not quantized; leave quantization "
            "out"
        )
