"""Tiny hybrid models: recurrent layers beside attention, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import VOCABULARY

RECURRENT, FULL = "linear_attention", "full_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LAYERS = [RECURRENT, FULL]
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 16,
    "layer_types": _LAYERS,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": _LAYERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", FULL], "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "conv", FULL],
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 9,
    },
    "nemotron_h": {
        "layers_block_type": [RECURRENT, FULL, "mlp", RECURRENT],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 16,
        "time_step_min": 1e-30,  # clamps the time steps of a text, not those of one token
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", RECURRENT, "hybrid"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "num_key_value_heads": 4,  # adapters are as wide as the queries
        "adapter_rank": 8,
        "use_mem_rope": True,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "time_step_min": 1e-30,
    },
    "bailing_hybrid": {
        "layer_types": _LAYERS,
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "kimi_linear": {
        **_EXPERTS,
        "layer_types": _LAYERS,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
}
HYBRIDS = tuple(_HYBRIDS)
_QUICK = ("bamba", "lfm2")  # the delta rule of transformers loops over tokens
# One for each kind of recurrence, and of layers beside it. The others are of the night.
OFTEN = (*_QUICK, "falcon_h1", "kimi_linear", "qwen3_5_text", "qwen3_next")


def _marks(family: str) -> tuple[pytest.MarkDecorator, ...]:
    if family in _QUICK:
        return ()
    return (pytest.mark.slow,) if family in OFTEN else (pytest.mark.slow, pytest.mark.nightly)


HYBRID_PARAMS = [pytest.param(name, marks=_marks(name)) for name in HYBRIDS]


def tiny_hybrid(family: str, **changes: Any) -> Any:
    """A Hugging Face model with random weights in float32, not yet patched. The weights are so
    large that its states matter, and its heads forget slowly and fast."""
    config = AutoConfig.for_model(family, **{**_SIZES, **_HYBRIDS[family], **changes})
    torch.manual_seed(7)
    with torch.device("cpu"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith(("A_log", "dt_bias")):
                weight.copy_(torch.linspace(-4.0, 0.0, weight.numel()).view_as(weight))
    return model.float().eval()
