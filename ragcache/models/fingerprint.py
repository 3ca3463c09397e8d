"""Digests of a model and of a tokenizer: parts of every state key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SAMPLES = 1024  # elements of every weight whose bits enter the digest as they are
TOKENIZING = 2  # higher when `PromptTokenizer` gives other tokens for a text
VOLATILE = (
    *("transformers_version", "_name_or_path", "_attn_implementation"),
    *("architectures", "dtype", "torch_dtype"),
)


def model_fingerprint(model: Any, states_dtype: torch.dtype | None = None) -> str:
    """A digest of configuration, dtypes and weights: of every weight tensor the name, shape and
    dtype, an integer sum over all of its bits (exact, whatever the order of summing) and a sample
    of its elements; a quantized weight counts as the tensors that it consists of. states_dtype: of
    kept states, where the model computes in another."""
    digest = hashlib.sha256(_config_text(model.config).encode())
    if states_dtype not in (None, model.dtype):
        digest.update(f"states|{states_dtype}|".encode())
    for name, weight in sorted(model.state_dict().items()):
        for part, tensor in plain_tensors(name, weight.detach()):
            bits = _bits(tensor)
            total = int(bits.sum(dtype=torch.int64))
            step = max(1, bits.numel() // SAMPLES)
            digest.update(f"{part}|{tuple(tensor.shape)}|{tensor.dtype}|{total}|".encode())
            digest.update(bits[::step].cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def plain_tensors(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight consists of, by name: itself or, of a quantized one, its numbers,
    scales and zeros."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield name, weight
        return
    parts, _ = weight.__tensor_flatten__()
    for part in parts:
        yield from plain_tensors(f"{name}.{type(weight).__name__}.{part}", getattr(weight, part))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of vocabulary and merges: the serialized tokenizer without the padding and
    truncation that its last caller set, and how texts are put to it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    entries = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        entries = {**entries, "padding": None, "truncation": None}
    entries = {"how": TOKENIZING, "tokenizer": entries}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]


def _config_text(config: Any) -> str:
    """The configuration less what saving adds; the dtype counts with every weight."""
    entries = config.to_dict()
    nested = [entries[name] for name in config.sub_configs if isinstance(entries.get(name), dict)]
    for part in (entries, *nested):
        for name in VOLATILE:
            part.pop(name, None)
    return json.dumps(entries, sort_keys=True, default=str)


def _bits(weight: Tensor) -> Tensor:
    flat = weight.contiguous().view(-1)
    if flat.is_floating_point():
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return flat.view(width[flat.element_size()])
    return flat.to(torch.int64)
