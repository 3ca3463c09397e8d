"""Tiny Gemmas, and Hugging Face's own logits of a prompt with modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from tests.conftest import DEVICE, VOCABULARY

WINDOW = 7
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING],
    "initializer_range": 0.3,  # so large that attention and caps matter
    "tie_word_embeddings": False,  # so that a greedy answer does not repeat one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e3},
}

Module = tuple[Sequence[int], int]
"""Tokens, and the position where they start."""


def tiny_gemma(family: str, **changes: Any) -> Any:
    """Three layers, two of them through a window of seven tokens; gemma2 or gemma3."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        if family == "gemma2":
            model = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **CAPS, **changes}))
            model.set_attn_implementation("eager")  # transformers 5.10 prefers one without caps
        else:
            config = Gemma3TextConfig(**{**SIZES, "rope_parameters": ROPE, **changes})
            model = Gemma3ForCausalLM(config)
    return model.to(DEVICE).eval()


def reference_logits(model: Any, modules: Sequence[Module], own: Module | list[Module]) -> Tensor:
    """Logits of the last own token, from one pass without a cache: the modules where they are
    placed, each seeing itself alone, then the own runs. [vocabulary]"""
    runs = own if isinstance(own, list) else [own]
    blocks = [*modules, *runs]
    tokens = [token for ids, _ in blocks for token in ids]
    positions = [start + n for ids, start in blocks for n in range(len(ids))]
    block = [min(i, len(modules)) for i, (ids, _) in enumerate(blocks) for _ in ids]
    full = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    sliding = full.clone()
    for q in range(len(tokens)):
        for k in range(len(tokens)):
            if block[q] == block[k]:
                full[q, k] = k <= q
            elif block[q] == len(modules):
                full[q, k] = modules[block[k]][1] <= positions[q]
            sliding[q, k] = full[q, k] and positions[q] - positions[k] < WINDOW
    masks = {
        name: torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None]
        for name, mask in ((FULL, full), (SLIDING, sliding))
    }
    with torch.inference_mode():
        logits: Tensor = model(
            torch.tensor([tokens]),
            attention_mask=masks,
            position_ids=torch.tensor([positions]),
            use_cache=False,
        ).logits
    return logits[0, -1]
