"""Rotary positions: which scalings let states move, and by what rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.attention.rotary import rotate
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM
from ragcache.models.positions import Rotary
from tests.conftest import random_tokens, tiny_model
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference

LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
}
FIXED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def scaled(scaling: str, parameters: dict[str, Any], family: str = "llama") -> Any:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **parameters}
    return tiny_model(family, rope_parameters=rope)


@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT)
@pytest.mark.parametrize("family", ["llama", "falcon-7b"])
def test_scalings_that_depend_on_the_length_are_refused(scaling: str, family: str) -> None:
    model = scaled(scaling, LENGTH_DEPENDENT[scaling], family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        CausalLM.patch(model)
    assert f"rotary scaling '{scaling}' changes with the length" in str(caught.value)
    assert "served scalings: default, linear, llama3, longrope, yarn" in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("scaling", FIXED)
def test_fixed_scalings_are_served_and_named_in_the_keys(scaling: str) -> None:
    scheme = CausalLM.patch(scaled(scaling, FIXED[scaling])).scheme
    assert scheme.name == f"rotary:{scaling}:8"
    assert scheme.movable
    assert scheme.slopes is None


@pytest.mark.parametrize("family", ["llama", "falcon-40b"])
@pytest.mark.parametrize("scaling", FIXED)
def test_moving_is_exact_under_fixed_scalings(scaling: str, family: str) -> None:
    causal = CausalLM.patch(scaled(scaling, FIXED[scaling], family))
    modules = [Module(random_tokens(n, seed=n)) for n in (30, 20)]
    pieces = [*modules, random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(causal.model, pieces), **CLOSE)


def test_yarns_attention_factor_is_in_the_keys_and_not_in_the_move() -> None:
    """The model scales cos and sin, so keys carry the factor; a turn has none."""
    causal = CausalLM.patch(scaled("yarn", FIXED["yarn"]))
    assert causal.model.model.rotary_emb.attention_scaling > 1.1
    rotation = causal.scheme.relocation(torch.tensor([57]))
    assert rotation is not None
    torch.testing.assert_close(rotation.cos**2 + rotation.sin**2, torch.ones(1, 8))


@pytest.mark.parametrize(
    ("family", "part", "width"),
    [("gpt_neox", None, 4), ("gpt_neox", 1.0, 16), ("phi", 0.5, 8), ("phi3", 0.5, 8)],
)
def test_a_part_of_every_head_turns(family: str, part: float | None, width: int) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if part is not None:
        rope["partial_rotary_factor"] = part
    causal = CausalLM.patch(tiny_model(family, rope_parameters=rope))
    assert causal.scheme.name == f"rotary:default:{width // 2}"
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(causal.model, pieces), **CLOSE)


def test_a_relocation_turns_the_query_back(causal: CausalLM) -> None:
    """q·R(d)k = (R(-d)q)·k, with the frequencies of the model."""
    frequency = causal.model.model.rotary_emb.inv_freq
    rotation = causal.scheme.relocation(torch.tensor([3, -40]))
    assert rotation is not None
    torch.testing.assert_close(rotation.cos[0], (3 * frequency).cos())
    torch.testing.assert_close(rotation.sin[0], (-3 * frequency).sin())
    torch.testing.assert_close(rotation.sin[1], (40 * frequency).sin())
    query, key = torch.randn(
        2, 1, 2, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )
    back = causal.scheme.relocation(torch.tensor([-3, 40]))
    assert back is not None
    moved = rotate(key, back)
    torch.testing.assert_close((rotate(query, rotation) * key).sum(-1), (query * moved).sum(-1))


def test_interleaved_pairs_are_named_in_the_keys() -> None:
    scheme = Rotary(torch.ones(8), interleaved=True)
    assert scheme.name == "rotary:default:8:interleaved"
    assert scheme.relocation(torch.tensor([4])).interleaved
    assert not Rotary(torch.ones(8)).relocation(torch.tensor([4])).interleaved


def test_the_frequencies_are_kept_in_single_precision() -> None:
    model = tiny_model("llama", torch.bfloat16)
    scheme = Rotary.of(model.config, model.model.rotary_emb)
    assert scheme.inverse_frequency.dtype == torch.float32
    assert not scheme.inverse_frequency.requires_grad
