"""Hugging Face transformers beside ragcache: ordinary prefill, and states concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ragcache.states import KVStates


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turns cuDNN's attention off: on Hopper it adds 30 to 40 ms at each new length."""
    # PyTorch types the setter alone
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@torch.inference_mode()
def prefill(model: Any, prompt: Sequence[int]) -> int:
    """The first token of a prompt of which everything is computed."""
    logits: Tensor = model(_ids(model, prompt), use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def in_dtype(states: KVStates, dtype: torch.dtype) -> KVStates:
    """States as Hugging Face attends to them: in the dtype that the model computes in."""
    return KVStates(states.keys.to(dtype), states.values.to(dtype), states.start)


@torch.inference_mode()
def concatenate(model: Any, states: Sequence[KVStates], question: Sequence[int]) -> int:
    """The first token over the states of every layer, concatenated into a `DynamicCache`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(states[0].keys.shape[0]):
        keys = torch.cat([s.keys[layer] for s in states], dim=1)
        values = torch.cat([s.values[layer] for s in states], dim=1)
        cache.update(keys[None], values[None], layer)
    start = sum(s.length for s in states)
    positions = torch.arange(start, start + len(question), device=model.device)[None]
    logits: Tensor = model(
        _ids(model, question), position_ids=positions, past_key_values=cache, logits_to_keep=1
    ).logits
    return int(logits[0, -1].argmax())


def _ids(model: Any, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=model.device)
