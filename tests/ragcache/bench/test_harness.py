"""Shapes, their arithmetic, and the machine."""

from __future__ import annotations

import json

import torch

from ragcache.bench.harness import LlamaShape, describe_machine

TINY = LlamaShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocabulary=64, window=128
)


def test_the_weights_of_a_layer_are_those_of_the_model() -> None:
    layer = TINY.build(torch.float32).model.layers[0]
    products = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    assert TINY.layer_weights == products


def test_flops_equal_a_count_by_hand() -> None:
    """q and o: 32x32, k and v: 32x16, three products 32x48; a multiply-add counts two."""
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    products = 2 * 3 * 2 * weights  # three tokens, two layers
    pairs = (10 + 1) + (10 + 2) + (10 + 3)  # each token sees the past, those before, and itself
    attention = pairs * 2 * 4 * (2 * 8 + 2 * 8)  # two layers, four heads, scores and values
    logits = 2 * 32 * 64
    assert TINY.flops(new_tokens=3, past_tokens=10) == products + attention + logits


def test_a_prompt_costs_the_same_in_one_part_or_two_but_for_the_logits() -> None:
    parts = TINY.flops(20, 0) + TINY.flops(13, 20)
    assert parts == TINY.flops(33, 0) + 2 * TINY.hidden * TINY.vocabulary


def test_a_shape_builds_the_same_model_every_time() -> None:
    one, other = TINY.build(torch.bfloat16), TINY.build(torch.bfloat16)
    assert one.dtype == torch.bfloat16
    assert one.config.num_key_value_heads == 2
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    seeded = TINY.build(torch.bfloat16, seed=1).lm_head.weight
    assert not torch.equal(one.lm_head.weight, seeded)


def test_the_machine_is_described_for_the_file_beside_a_figure() -> None:
    facts = describe_machine()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["processor"]
    assert json.loads(json.dumps(facts)) == facts
