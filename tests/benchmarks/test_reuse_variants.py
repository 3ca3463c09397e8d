"""Ideas for modes of reuse: the plain model, and what all of them have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_model import PlainModel, Shape
from reuse_fit import StateFit
from reuse_ideas import VARIANTS, ReuseVariant
from reuse_prompts import TokenizedPrompt, batches
from reuse_variants import VariantComparison

from tests.tiny_models import random_tokens, tiny_model

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> tuple[Any, PlainModel]:
    """A tiny Llama of Hugging Face, and the plain model with its weights."""
    whole = tiny_model("llama").eval()
    config, weights = whole.config, whole.state_dict()
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for own, theirs in NAMES.items():
            each = weights[f"model.layers.{layer}.{theirs}.weight"]
            found[f"blk.{layer}.{own}.weight"] = each
    heads = config.num_attention_heads
    shape = Shape(
        config.num_hidden_layers, heads, config.num_key_value_heads, config.hidden_size // heads,
        config.rms_norm_eps, config.rope_parameters["rope_theta"],
    )  # fmt: skip
    return whole, PlainModel(shape, found, "cpu", positions=256)


@torch.inference_mode()
def test_the_plain_model_computes_what_transformers_computes(model: tuple[Any, PlainModel]) -> None:
    whole, plain = model
    tokens = torch.tensor([random_tokens(19, seed=1), random_tokens(19, seed=2)])
    rows = torch.arange(19)[None].expand(2, -1)
    cache = plain.cache(2, 19)
    plain.forward(tokens[:, :11], rows[:, :11], cache)  # in two passes
    hidden = plain.forward(tokens[:, 11:], rows[:, 11:], cache)
    expected = whole(tokens).logits[:, 11:]
    torch.testing.assert_close(plain.logits(hidden), expected, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_variants_that_compute_all_tokens_are_exact(model: tuple[Any, PlainModel]) -> None:
    texts = {
        "preamble": random_tokens(5, seed=3), "priming": random_tokens(12, seed=4),
        "chinese": random_tokens(9, seed=5), "long": random_tokens(40, seed=6),
        "other": random_tokens(11, seed=7), "stop_ids": [],
    }  # fmt: skip
    prompts = [
        TokenizedPrompt(
            {}, [random_tokens(size, seed=n + size) for size in (17, 9, 24)],
            random_tokens(6, seed=n), random_tokens(10, seed=20 + n),
            [[], *([random_tokens(7, seed=30 + n)],) * 2],
        )
        for n in range(2)
    ]  # fmt: skip
    fit = StateFit(model[1])
    VariantComparison(model[1], texts, prompts, tokens=1).teach(fit)
    compared = VariantComparison(model[1], texts, prompts, tokens=4, fit=fit)
    for name in ("rooted", "mean4", "own", "before", "by place", "beyond", "similar", "fitted"):
        whole = ReuseVariant(name, first=(99,), bias=-0.5, scale=0.9)
        [own, _] = compared._forced([whole])[0]
        assert own["answer"] == compared.answers[0]
        assert own["computed"] == 9 + 24
    found = compared.compare(list(VARIANTS))
    for row in found:
        assert row["exact"]["kl"] == 0
        assert row["rooted"]["kl"] > 1e-7
        assert all(each["length"] == 4 for each in row.values())
        assert row["primed:16"]["computed"] == 9 + 16
        assert row["primed, first 5 %"]["computed"] == 2, "one token of each later module"
        assert 2.5 <= row["primed, question 5 %"]["computed"] <= 10, "whole runs"
        assert row["exact, bfloat16 states"]["kl"] < row["rooted"]["kl"]
    assert replace(VARIANTS["primed"], first=(16,)) == VARIANTS["primed:16"]


def test_batches_have_one_setting_and_bounded_tokens() -> None:
    prompts = [
        TokenizedPrompt({"number": n, "k": k, "module_tokens": 8}, [[0] * (n + 1)] * k, [0], [])
        for n in range(9)
        for k in (1, 2)
    ]
    found = list(batches(prompts, 30))
    assert sorted(id(each) for batch in found for each in batch) == sorted(map(id, prompts))
    for batch in found:
        assert len({each.setting for each in batch}) == 1
        assert len(batch) * max(each.length for each in batch) <= 30
