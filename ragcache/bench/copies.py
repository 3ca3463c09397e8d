"""Hugging Face `generate` over states that every request has a copy of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ragcache.states import KVStates


class _Times:
    """A logits processor that only looks at the clock."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        self.at.append(time.perf_counter())
        return scores


def generate_copies(
    model: Any, prompts: Sequence[Sequence[KVStates]], questions: Sequence[Sequence[int]], new: int
) -> list[float]:
    """Seconds of each decoding step of a batch, after the first token.

    prompts: the states before each question, equally many tokens for all. They are copied into one
    `DynamicCache` of [B, Hkv, S, D] a layer, as every request's own.
    """
    from transformers import DynamicCache, LogitsProcessorList

    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    cached = sum(states.length for states in prompts[0]) if prompts else 0
    cache = DynamicCache()
    if cached:
        for layer in range(prompts[0][0].keys.shape[0]):
            keys = [torch.cat([s.keys[layer] for s in states], dim=1) for states in prompts]
            values = [torch.cat([s.values[layer] for s in states], dim=1) for states in prompts]
            cache.update(torch.stack(keys), torch.stack(values), layer)
    ids = torch.tensor([[0] * cached + list(question) for question in questions])
    times = _Times()
    with torch.inference_mode():
        model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            logits_processor=LogitsProcessorList([times]),
        )
    model.set_attn_implementation(implementation)
    return [after - before for before, after in zip(times.at, times.at[1:], strict=False)]
