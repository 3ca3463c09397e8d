"""Weights in 8 and 4 bits on a CPU, by torch's own products of packed weights.

`quantize_model` replaces the linear layers of a model by `PackedLinear`. A step of few rows, as
decoding takes, multiplies packed weights in bfloat16, which reads half to a quarter of the bytes. A
step of many rows multiplies a piece of the weights out at a time, in the dtype of the computation.
The number of rows from which the second is quicker is timed. `int8` has a scale per row; `int4` has
a scale and a zero for 32 numbers of a row, and the head in 8 bits. `auto` takes 4 bits for a layer
if they hold it no worse than 8, as where a GGUF file stored it in 4 bits. Layers over the same
input are packed as one. Embeddings, norms, activations and states stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
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
    FP8,
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
from ragcache.models.fp8 import quantize_fp8
from ragcache.models.projections import linear_groups, replace_linears
from ragcache.models.trial import SEEDS, TOLERANCE, tiny_config, tiny_model, trial_difference

logger = logging.getLogger(__name__)

PACKING = 2
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
_STEPS = (15, 14, 13, 12)  # of a group from its least to its largest number, most likely first
_PARTS = ("weight", "scales")  # tensors of a packed layer
_SAMPLE = 128  # rows of a weight that choose its bits


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
        """Quantize a weight [out, in], group by group (`four_bits`)."""
        rows, columns = weight.shape
        packed, grids = [], []
        size = max(1, _PIECE // columns // _BLOCK) * _BLOCK
        for piece in torch.split(weight, size):
            numbers, grid = four_bits(piece)
            whole = numbers.to(torch.int32).flatten(1)
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1))
            grids.append(grid.transpose(0, 1))
        half = packed_block() // 2
        joined = torch.cat(packed).view(-1, columns, half)
        return cls((rows, columns), joined, torch.cat(grids, 1), bias, few_rows)

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


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a weight [out, in] in 4 bits, by the grid with the least error of each group.

    Weights that were stored in 4 bits lie on such a grid, of which a group may leave out the first
    or last steps. The grid from the least to the largest number is then found by its steps.

    Returns:
        Whole numbers 0 to 15, float32 [out, in / 32, 32], and scales and zeros, bfloat16
            [out, in / 32, 2]: a weight is (number - 8) * scale + zero.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2)
    kept: tuple[Tensor, Tensor] | None = None
    errors = torch.empty_like(least)
    for steps in _STEPS:
        scale = ((most - least) / steps).clamp_(min=_LEAST).bfloat16()
        zero = (least + 8 * scale.float()).bfloat16()
        grid = torch.stack([scale, zero], -1)
        numbers = (groups - zero.float()[..., None]).div_(scale.float()[..., None])
        numbers.add_(8).round_().clamp_(0, 15)
        error = (on_grid(numbers, grid) - groups).square_().sum(2)
        if kept is None:
            kept, errors = (numbers, grid), error
        else:
            better = error < errors
            kept[0][better], kept[1][better] = numbers[better], grid[better]
            errors = torch.minimum(errors, error)
    assert kept is not None
    return kept


def on_grid(numbers: Tensor, grid: Tensor) -> Tensor:
    """The weights of numbers in 4 bits, float32 [out, in / 32, 32] (`four_bits`)."""
    scale, zero = grid.float()[..., None].unbind(-2)
    return torch.addcmul(zero, numbers - 8, scale)


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
        quantization: `int8`, `int4`, or `auto`: 4 bits for layers that they hold no worse than 8.
        dtype: Dtype of the computation.
    """
    places = _places(model, quantization)
    limits = {kind: few_rows(kind, dtype) for kind in _KINDS}
    if sum(layer.weight.numel() for each in places for layer in each.layers) < KEPT_FROM:
        _pack(places, limits)
        return
    digest = _digest(places)
    kept = _read_packed(digest, len(places))
    packed = _pack(places, limits, kept)
    if not kept:
        _keep_packed(packed, digest)


def packed_folder() -> Path:
    """The folder of packed weights, beside the converted GGUF files. It may be deleted at any
    time."""
    return cached_assets_path("ragcache", namespace="models", subfolder="packed")


class _Place(NamedTuple):
    """Linear layers over the same input that are packed as one, and the class that packs them."""

    owner: nn.Module
    names: tuple[str, ...]
    kind: str

    @property
    def layers(self) -> list[Any]:
        return [getattr(self.owner, name) for name in self.names]


def _places(model: Any, quantization: str) -> list[_Place]:
    head = model.get_output_embeddings()
    places = []
    for owner in model.modules():
        for names in linear_groups(owner, _packs):
            layers = [getattr(owner, name) for name in names]
            kind = _kind(layers, quantization, is_head=layers[0] is head)
            places.append(_Place(owner, names, kind))
    return places


def _kind(layers: Sequence[nn.Linear], quantization: str, *, is_head: bool) -> str:
    """The kind that packs layers as one."""
    if quantization == INT8 or not _divides(layers):
        return INT8
    if quantization == INT4:
        return INT8 if is_head else INT4
    return INT4 if _held_in_four(layers) else INT8


def _held_in_four(layers: Sequence[nn.Linear]) -> bool:
    """Whether 4 bits hold some rows of layers no worse than 8 bits do."""
    step = max(1, sum(layer.out_features for layer in layers) // _SAMPLE)
    sample = torch.cat([layer.weight.detach()[::step] for layer in layers]).float()
    eight = Int8Linear.pack(sample).dequantize(0, len(sample), torch.empty_like(sample))
    four = on_grid(*four_bits(sample)).view_as(sample)
    return bool((four - sample).norm() <= (eight - sample).norm())


def _pack(
    places: Sequence[_Place], limits: Mapping[str, int], kept: Mapping[str, Tensor] | None = None
) -> list[PackedLinear]:
    """Replace the layers of each place by a packed one, and return these. kept: weights that were
    packed before."""
    packed: list[PackedLinear] = []
    for number, place in enumerate(places):
        layers, kind, limit = place.layers, _KINDS[place.kind], limits[place.kind]
        widths, first = [each.out_features for each in layers], layers[0]
        bias = None if first.bias is None else torch.cat([each.bias.detach() for each in layers])
        if kept:
            numbers, scales = kept[f"{number}.weight"], kept[f"{number}.scales"]
            one: PackedLinear = kind((sum(widths), first.in_features), numbers, scales, bias, limit)
        else:
            weights = [each.weight.detach() for each in layers]
            one = kind.pack(torch.cat(weights) if len(weights) > 1 else weights[0], bias, limit)
        if len(layers) > 1:
            replace_linears(place.owner, place.names, one, widths)
        else:
            setattr(place.owner, place.names[0], one)
        packed.append(one)
    return packed


def _digest(places: Sequence[_Place]) -> str:
    """Digest of the weights to pack, and of all that packed weights depend on."""
    digest = xxhash.xxh3_128(f"{PACKING}|{packed_block()}".encode())
    for place in places:
        digest.update(f"|{place.kind}".encode())
        for layer in place.layers:
            weight = layer.weight.detach()
            digest.update(f"|{tuple(weight.shape)}|{weight.dtype}|".encode())
            digest.update(weight.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read_packed(digest: str, layers: int) -> dict[str, Tensor]:
    """Packed weights of so many layers in the cache folder, mapped; none if there is no file, or
    one that is damaged.

    The format is torch's own, in which tensors begin at multiples of 64 bytes. The kernels load
    whole words from such addresses alone, and end the process at others.
    """
    try:
        file = packed_folder() / f"{digest}.pt"
        if not file.exists():
            return {}
        kept: dict[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
        if kept.keys() != {f"{n}.{part}" for n in range(layers) for part in _PARTS}:
            raise RuntimeError("the file holds the weights of other layers")
    except (OSError, RuntimeError, UnpicklingError) as error:
        logger.warning("packed weights cannot be read, and are packed again: %s", error)
        return {}
    return kept


def _keep_packed(packed: Sequence[PackedLinear], digest: str) -> None:
    """Write packed weights under another name first. Where that fails, nothing is kept."""
    tensors = {
        f"{number}.{name}": getattr(layer, name)
        for number, layer in enumerate(packed)
        for name in _PARTS
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


def _divides(layers: Sequence[nn.Linear]) -> bool:
    """Whether the kernel for 4 bits packs layers as one in whole blocks."""
    rows = sum(each.out_features for each in layers)
    whole = layers[0].in_features % GROUP == 0 and rows % _BLOCK == 0
    return whole and packed_block() > 0


def choose_quantization(
    model: Any, quantization: str | None, dtype: torch.dtype, recall: Recall = measure_anew
) -> str | None:
    """The quantization that `auto` stands for: itself, 4 bits where 8 do not fit the memory, none
    where packed weights are not quicker on this machine or the family is not served with them."""
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
    return AUTO if size <= MEMORY_SHARE * available_memory() else INT4


def check_family(kind: type[Any], config: Any, quantization: str = INT8) -> None:
    """Check that a family can be served with quantized weights, before weights are read.

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
            if quantization == FP8:
                quantize_fp8(tiny, tiny.get_output_embeddings(), tiny.device)
            else:
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
