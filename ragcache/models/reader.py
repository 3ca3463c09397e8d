"""The embedded reader: a Llama in the package, whose files need no transformers.

Its weights may be stored in int8, a scale for each row, which no other checkpoint's are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ragcache.errors import UnsupportedModel
from ragcache.models.plain import PlainConfig, PlainForCausalLM
from ragcache.models.plain_tokenizer import PlainTokenizer

READER = Path(__file__).parent.parent / "reader"
SCALE = "_scale"  # an int8 matrix `NAME` has its scales at `NAME_scale`


def read_reader(folder: Path) -> tuple[PlainForCausalLM, PlainTokenizer]:
    """The reader's model, in its checkpoint's dtype, and its tokenizer."""
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = entries["dtype"] = getattr(torch, entries["dtype"])
    int8_rows = entries.pop("int8_rows", False)
    model = PlainForCausalLM(PlainConfig(**entries))
    weights = load_file(folder / "model.safetensors")
    model.load_weights(dequantize_rows(weights, dtype) if int8_rows else weights)
    return model, PlainTokenizer(folder)


def dequantize_rows(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a checkpoint whose `config.json` says `int8_rows`, in `dtype`.

    Its matrices [rows, columns] are int8, and each has float32 scales [rows] at its name with
    `_scale`. The product is computed in float32 and rounded once.

    Raises:
        UnsupportedModel: A matrix has no scales, or scales are without a matrix, of another shape,
            or not positive numbers.
    """
    scales = {name.removesuffix(SCALE): w for name, w in weights.items() if name.endswith(SCALE)}
    kept = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    for name in sorted(scales.keys() | {n for n, w in kept.items() if w.dtype == torch.int8}):
        _check_scales(name, kept.get(name), scales.get(name))
        kept[name] = (kept[name].float() * scales[name][:, None]).to(dtype)
    return kept


def _check_scales(name: str, matrix: Tensor | None, scale: Tensor | None) -> None:
    if scale is None:
        wrong = f"{name} is in int8, and there is no {name}{SCALE}"
    elif matrix is None or matrix.dtype != torch.int8 or matrix.dim() != 2:
        wrong = f"{name}{SCALE} is there, and {name} is no matrix in int8"
    elif scale.shape != matrix.shape[:1] or scale.dtype != torch.float32:
        wanted = f"float32 {list(matrix.shape[:1])}"
        wrong = f"{name}{SCALE} is {scale.dtype} {list(scale.shape)} instead of {wanted}"
    elif not (scale.isfinite() & (scale > 0)).all():
        wrong = f"{name}{SCALE} holds numbers that are not positive"
    else:
        return
    raise UnsupportedModel(
        f"the checkpoint says int8_rows, but its file does not fit: {wrong}; write it again, each "
        f"matrix with one positive scale for a row"
    )
