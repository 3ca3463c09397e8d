"""Position schemes: which rotary scalings let states move, and by what rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.attention.rotary import rotate
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM
from ragcache.models.positions import Rotary
from tests.conftest import tiny_model

LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
    },
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


def scaled(scaling: str, parameters: dict[str, Any]) -> Any:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **parameters}
    return tiny_model("llama", rope_parameters=rope)


@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT)
def test_scalings_that_depend_on_the_length_are_refused(scaling: str) -> None:
    model = scaled(scaling, LENGTH_DEPENDENT[scaling])
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        CausalLM.patch(model)
    assert f"rotary scaling '{scaling}' changes with the length" in str(caught.value)
    assert "served scalings: default, linear, llama3, yarn" in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("scaling", FIXED)
def test_fixed_scalings_are_served_and_named_in_the_keys(scaling: str) -> None:
    scheme = CausalLM.patch(scaled(scaling, FIXED[scaling])).scheme
    assert scheme.name == f"rotary:{scaling}:8"


def test_a_relocation_turns_the_query_back(causal: CausalLM) -> None:
    """q·R(d)k = (R(-d)q)·k, with the frequencies of the model."""
    frequency = causal.model.model.rotary_emb.inv_freq
    rotation = causal.scheme.relocation(torch.tensor([3, -40]))
    assert rotation is not None
    torch.testing.assert_close(rotation.cos[0], (3 * frequency).cos())
    torch.testing.assert_close(rotation.sin[0], (-3 * frequency).sin())
    torch.testing.assert_close(rotation.sin[1], (40 * frequency).sin())
    query, key = torch.randn(2, 1, 2, 16, generator=torch.Generator().manual_seed(1))
    moved = rotate(key, causal.scheme.relocation(torch.tensor([-3, 40])))
    torch.testing.assert_close((rotate(query, rotation) * key).sum(-1), (query * moved).sum(-1))


def test_the_frequencies_are_kept_in_single_precision() -> None:
    model = tiny_model("llama", torch.bfloat16)
    scheme = Rotary.of(model.config, model.model.rotary_emb)
    assert scheme.inverse_frequency.dtype == torch.float32
    assert not scheme.inverse_frequency.requires_grad
