"""The replaced forwards under the settings that change what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.models import wrap_causal
from tests.conftest import random_tokens, tiny_model
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, one norm": ("falcon-40b", {"num_ln_in_parallel_attn": 1}),
    "falcon, sequential": ("falcon-7b", {"parallel_attn": False}),
    "falcon, many key heads": ("falcon-7b", {"multi_query": False}),
    "falcon, alibi over one key head": ("falcon-rw", {"multi_query": True}),
    "falcon, alibi over groups": (
        "falcon-rw",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True},
    ),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.05}}),
    "mpt, scaled": ("mpt", {"attn_config": {"softmax_scale": 0.5}}),
    "mpt, another bias range": ("mpt", {"attn_config": {"alibi_bias_max": 16}}),
    "bloom, residual after the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "gpt2, scaled by the layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "opt, norm after attention": ("opt", {"do_layer_norm_before": False}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_segments_equal_the_reference(setting: str) -> None:
    family, changes = SETTINGS[setting]
    causal = wrap_causal(tiny_model(family, **changes))
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(causal.model, pieces), **CLOSE)


@pytest.mark.parametrize(
    ("family", "heads"), [("falcon-7b", 1), ("falcon-40b", 2), ("falcon-rw", 4), ("mpt", 4)]
)
def test_states_hold_no_repeated_heads(family: str, heads: int) -> None:
    causal = wrap_causal(tiny_model(family))
    assert causal.num_kv_heads == heads
    assert causal.new_states(3)[0].shape == (2, heads, 3, 16)
    assert causal.bytes_per_token == 2 * 2 * heads * 16 * 4


@pytest.mark.parametrize("family", ["falcon-7b", "mpt", "bloom"])
def test_a_copy_of_a_patched_model_runs_on_its_own_weights(family: str) -> None:
    model = tiny_model(family)
    wrap_causal(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
        ids = torch.tensor([random_tokens(8)])
        logits: Tensor = copied(ids).logits
        assert not logits.any()
        assert model(ids).logits.any()
