"""Tiny models of every family, with random weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# Models this small gain nothing from threads, which lose much time waiting on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# RAGCACHE_TEST_DEVICE=cuda runs the tests of attention, models and engine on a GPU.
DEVICE = os.environ.get("RAGCACHE_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
_UNDROPPED: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
# What each family's tiny model has beyond _SIZES. BLOOM and MPT name their window otherwise.
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "mistral": (MistralConfig, {**_GROUPED, "sliding_window": None}),
    "qwen2": (Qwen2Config, _GROUPED),
    "qwen3": (Qwen3Config, _GROUPED),
    "phi": (PhiConfig, {"intermediate_size": 96, "num_key_value_heads": 2}),
    "phi3": (Phi3Config, {"intermediate_size": 96, "num_key_value_heads": 2}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 96}),
    "falcon-7b": (FalconConfig, {"multi_query": True}),
    "falcon-40b": (FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": (
        FalconConfig,
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": (MptConfig, {"max_seq_len": 512}),
    "bloom": (BloomConfig, {"seq_length": 512}),
    "gpt2": (GPT2Config, _UNDROPPED),
    "opt": (OPTConfig, {"ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 32}),
}
FAMILIES = tuple(_FAMILIES)
# One for each kind of positions and of projections is quick.
_QUICK = ("llama", "phi", "falcon-7b", "bloom", "gpt2")
FAMILY_PARAMS = [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in FAMILIES
]
_FAMILIES["qwen3_moe"] = (Qwen3MoeConfig, _GROUPED)
LATENT = "deepseek_v3"
"""Latent attention."""
_FAMILIES[LATENT] = (
    DeepseekV3Config,
    {
        **{"intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "num_key_value_heads": 4},
    },
)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Two layers, four query heads over four, two or one key heads."""
    kind, own = _FAMILIES[family]
    return kind(**{**_SIZES, **own, **changes})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Hugging Face model with random weights, the same on every device, not yet patched."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return model.to(DEVICE, dtype).eval()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator, device="cpu").tolist()
