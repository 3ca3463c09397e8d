"""The contiguous fallback against Hugging Face's own masks, positions and rotary modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from ragcache.engine import EncodeJob, Segment, assemble, encode
from ragcache.engine.batch import build_step
from ragcache.engine.layout import Work
from ragcache.engine.private import Room
from ragcache.errors import UnsupportedModel
from ragcache.models import BufferPool, CausalLM, ContiguousLM
from ragcache.models.loading import patched
from ragcache.states import KVStates
from tests.conftest import VOCABULARY, random_tokens, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
WINDOW = 7
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
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
    "layer_types": TYPES,
    "initializer_range": 0.3,  # so that attention and caps matter
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}


def tiny_gemma(family: str, **changes: Any) -> Any:
    """Three layers, two of them through a window of seven tokens; not yet patched."""
    torch.manual_seed(7)
    if family == "gemma2":
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
        return Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **caps, **changes})).eval()
    rope = {"rope_parameters": GEMMA3_ROPE}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **rope, **changes})).eval()


@pytest.fixture(params=["gemma2", "gemma3"])
def gemma(request: pytest.FixtureRequest) -> ContiguousLM:
    return ContiguousLM.patch(tiny_gemma(request.param))


def ints(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def states_of(model: ContiguousLM, tokens: list[int], start: int) -> KVStates:
    """What Hugging Face's own cache holds after tokens at these positions."""
    positions = ints(range(start, start + len(tokens)))
    cache = model.model(
        ints(tokens)[None], attention_mask=masks(positions, positions), position_ids=positions[None]
    ).past_key_values
    keys = torch.stack([layer.keys[0] for layer in full(model, tokens, positions, cache)])
    values = torch.stack([layer.values[0] for layer in full(model, tokens, positions, cache)])
    return KVStates(keys, values, start)
