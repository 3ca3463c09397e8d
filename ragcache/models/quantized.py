"""Weights in 8 and 4 bits on a CPU: which layers are packed, and the files of packed weights.

`quantize_model` replaces the linear layers of a model by `PackedLinear`
(`ragcache.models.packed`). Both widths have a scale for 32 numbers of a row; `int4` has a zero for
them too, and the head in 8 bits. `auto` takes 4 bits for a layer if they hold it nearly exactly, as
where a GGUF file stored it in 4 bits. Layers over the same input are packed as one. Embeddings,
norms, activations and states stay as they are.

`load_quantized` keeps the packed model of a checkpoint in a file, maps it, and reads the checkpoint
no more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import xxhash
from huggingface_hub import cached_assets_path
from torch import Tensor, nn

from ragcache.errors import UnsupportedModel
from ragcache.machine import available_memory
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
from ragcache.models.model import content_digests, content_name
from ragcache.models.native import GROUP, TILE, Packed
from ragcache.models.packed import PackedLinear, few_rows, packs, required_kernels
from ragcache.models.projections import linear_groups, replace_linears

logger = logging.getLogger(__name__)

PACKING = 5
"""Version of packed weights. Raise it if the same weights are packed in another way."""
KEPT_FROM = 2**26  # weights of a model from which its packed weights are kept on disk

_SHARE = 0.5  # of the layers' weights, which must become small, or else nothing is gained
_NEAR = 0.01  # error of a layer in 4 bits, relative to its weights, of which `auto` takes no notice
_SAMPLE = 128  # rows of a weight that choose its bits
_REST = "rest."  # before the names of tensors of a file that are not packed
_DIGESTS = "digests"  # name of the digests of all tensors of a packed model in its file

Kept = Mapping[str, Any]
"""A packed model: `N.weight` and `N.scales` of its N-th place, `rest.NAME` of other tensors, and
the digests of them all by their names in the model."""


def quantize_model(model: Any, quantization: str, kept: Kept | None = None) -> list[PackedLinear]:
    """Replace the linear layers of a model by packed ones, in place, one after another.

    All steps multiply weights out, until `use_packed_products` is called.

    Args:
        model: A model of transformers on a CPU, whose family passed `check_family`.
        quantization: `int8`, `int4`, or `auto`: 4 bits for layers that they hold nearly exactly.
        kept: Weights that were packed before, of which the layers' own are not read.

    Returns:
        The packed layers, in the order of the model's own.

    Raises:
        KeyError, RuntimeError: The kept weights are another model's.
    """
    head, packed = model.get_output_embeddings(), []
    for number, place in enumerate(_places(model)):
        layers = place.layers
        widths, first = [each.out_features for each in layers], layers[0]
        bias = None if first.bias is None else torch.cat([each.bias.detach() for each in layers])
        if kept is None:
            bits = _bits(layers, quantization, is_head=first is head)
            weights = [each.weight.detach() for each in layers]
            whole = torch.cat(weights) if len(weights) > 1 else weights[0]
            one = PackedLinear.pack(whole, bits, bias)
        else:
            one = PackedLinear(_kept(kept, number, sum(widths), first.in_features), bias, 0)
        if len(layers) > 1:
            replace_linears(place.owner, place.names, one, widths)
        else:
            setattr(place.owner, place.names[0], one)
        packed.append(one)
    return packed


def _kept(kept: Kept, number: int, outputs: int, inputs: int) -> Packed:
    """The packed weight of a place. Raises `KeyError` or `RuntimeError` for another size."""
    numbers, scales = kept[f"{number}.weight"], kept[f"{number}.scales"]
    bits = 4 if scales.shape[2] == 2 else 8
    if numbers.shape != (-(-outputs // TILE), inputs // GROUP, TILE * GROUP * bits // 8):
        raise RuntimeError("the file holds weights of other sizes")
    return Packed(bits, outputs, inputs, numbers, scales)


def use_packed_products(model: Any, dtype: torch.dtype, recall: Recall = measure_anew) -> None:
    """Let steps of few rows in a dtype multiply packed weights, where this is quicker here."""
    layers = packed_layers(model)
    limits = {bits: _few_rows(bits, dtype, recall) for bits in {each.bits for each in layers}}
    for each in layers:
        each.few_rows = limits[each.bits]


def _few_rows(bits: int, dtype: torch.dtype, recall: Recall) -> int:
    """The timed number of rows, kept for later processes."""
    name = timing_name(f"packed{bits}/{dtype_name(dtype)}")
    return int(recall(name, lambda: str(few_rows(bits, dtype))))


def packed_layers(model: Any) -> list[PackedLinear]:
    return [each for each in model.modules() if isinstance(each, PackedLinear)]


def load_quantized(
    folder: Path,
    quantization: str,
    load: Callable[[], Any],
    fill: Callable[[Mapping[str, Tensor]], Any],
) -> Any:
    """A model with packed weights.

    The first call reads the checkpoint, packs it, and keeps the packed model of a large one in the
    cache folder. Later calls map the file: nothing of the checkpoint but its sizes and times is
    read.

    Args:
        folder: Folder of the checkpoint.
        quantization: As for `quantize_model`.
        load: Reads the checkpoint.
        fill: Makes a model of the tensors that are not packed. Other weights are replaced later.
    """
    file = packed_folder() / f"{_identity(folder, quantization)}.pt"
    if (kept := _read_packed(file)) is not None:
        try:
            return _restore(fill, quantization, kept)
        except (KeyError, RuntimeError) as error:
            logger.warning("packed weights cannot be read, and are packed again: %s", error)
    model = load()
    large = sum(each.numel() for each in model.parameters()) >= KEPT_FROM
    rest = _without_layers(model)
    packed = quantize_model(model, quantization)
    if (
        large
        and _keep_packed(model, packed, rest, file)
        and (kept := _read_packed(file)) is not None
    ):
        del model, packed, rest
        return _restore(fill, quantization, kept)
    return model


def packed_folder() -> Path:
    """The folder of packed weights, beside the converted GGUF files. It may be deleted at any
    time."""
    return cached_assets_path("ragcache", namespace="models", subfolder="packed")


class _Place(NamedTuple):
    """Linear layers over the same input that are packed as one."""

    owner: nn.Module
    names: tuple[str, ...]

    @property
    def layers(self) -> list[Any]:
        return [getattr(self.owner, name) for name in self.names]


def _places(model: Any) -> list[_Place]:
    owners = list(model.modules())
    return [_Place(owner, names) for owner in owners for names in linear_groups(owner, packs)]


def _bits(layers: Sequence[nn.Linear], quantization: str, *, is_head: bool) -> int:
    """The bits that layers are packed in as one."""
    if quantization == INT8:
        return 8
    if quantization == INT4:
        return 8 if is_head else 4
    step = max(1, sum(layer.out_features for layer in layers) // _SAMPLE)
    sample = torch.cat([layer.weight.detach()[::step] for layer in layers]).float()
    _, error = required_kernels().pack(sample, 4)
    return 4 if error <= _NEAR**2 * float(sample.square().sum()) else 8


def _identity(folder: Path, quantization: str) -> str:
    """Digest of names, sizes and times of a checkpoint's files, and of the packing."""
    digest = xxhash.xxh3_128(f"{PACKING}|{quantization}|{folder.resolve()}".encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".json"):
            status = file.stat()
            digest.update(f"|{file.name}|{status.st_size}|{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _read_packed(file: Path) -> Kept | None:
    """The packed model of a file, mapped; none if there is no file, or one that is damaged.

    The format is torch's own, in which tensors begin at multiples of 64 bytes, as the kernels read
    them quickest.
    """
    if not file.exists():
        return None
    try:
        kept: Kept = torch.load(file, mmap=True, weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        logger.warning("packed weights cannot be read, and are packed again: %s", error)
        return None
    return kept


def _restore(fill: Callable[[Mapping[str, Tensor]], Any], quantization: str, kept: Kept) -> Any:
    """The model of a file. Raises `KeyError` or `RuntimeError` where it holds another model's."""
    model = fill({n.removeprefix(_REST): each for n, each in kept.items() if n.startswith(_REST)})
    quantize_model(model, quantization, kept)
    digests, state = kept[_DIGESTS], model.state_dict()
    if {content_name(*each) for each in state.items()} != digests.keys():
        raise RuntimeError("the file holds the weights of other layers")
    if any(each.is_meta for each in state.values()):
        raise RuntimeError("the file lacks weights of the model")
    model.content_digests = {name: bytes.fromhex(each) for name, each in digests.items()}
    return model


def _without_layers(model: Any) -> dict[str, Tensor]:
    """The tensors of a model but the weights of layers that are packed."""
    packed = {id(layer) for place in _places(model) for layer in place.layers}
    names = {f"{name}.weight" for name, each in model.named_modules() if id(each) in packed}
    return {name: each for name, each in model.state_dict().items() if name not in names}


def _keep_packed(
    model: Any, packed: Sequence[PackedLinear], rest: Mapping[str, Tensor], file: Path
) -> bool:
    """Write a packed model under another name first. Returns whether it is kept."""
    kept: dict[str, Any] = {f"{_REST}{name}": each for name, each in rest.items()}
    for number, each in enumerate(packed):
        kept |= {f"{number}.weight": each.weight, f"{number}.scales": each.scales}
    digests = content_digests(model.state_dict())
    kept[_DIGESTS] = {name: each.hex() for name, each in digests.items()}
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        try:
            torch.save(kept, part)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        logger.warning("packed weights are not kept, and the next opening packs again: %s", error)
        return False
    return True


def auto_quantization(
    model: Any, dtype: torch.dtype, recall: Recall, check: Callable[[], None]
) -> str | None:
    """The quantization that `auto` stands for: itself, 4 bits where 8 do not fit the memory, none
    where packed weights are not quicker on this machine or the model is not served with them.

    Args:
        model: The model, on the meta device.
        dtype: Dtype of the computation.
        recall: Keeps times for later processes.
        check: Raises `UnsupportedModel` if the model is not served with packed weights.
    """
    if not _few_rows(8, dtype, recall):
        return None
    try:
        check()
    except UnsupportedModel:
        return None
    size = sum(each.numel() for each in model.parameters())
    return AUTO if size <= MEMORY_SHARE * available_memory() else INT4


def check_gain(model: Any) -> None:
    """Raises `UnsupportedModel` where most weights of the layers would stay as they are, as fused
    experts and the convolutions of GPT-2 do."""
    vocabulary = vocabulary_weights(model)
    small, large = 0, 0
    others: set[str] = set()
    for each in model.modules():
        own = [w for w in each.parameters(recurse=False) if w.dim() > 1 and id(w) not in vocabulary]
        size = sum(weight.numel() for weight in own)
        if packs(each):
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
