"""The trial of hybrid models finds compositions that are wrong, and sizes follow from the maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.attention.recurrent_maps import DeltaRule
from ragcache.models import composition, wrap_causal
from ragcache.models.model import MODULE_TOKENS, MOST_MODULE_TOKENS, RECURRING_TOKENS
from ragcache.models.trial import TOLERANCE, trial_difference
from tests.tiny_hybrids import tiny_hybrid
from tests.tiny_models import tiny_model


def without_transition(transition: Tensor, increment: Tensor, state: Tensor, out: Tensor) -> Tensor:
    del transition
    return torch.add(state, increment, out=out)


def without_seam(mixers: Any, inputs: Tensor, channels: slice) -> Tensor:
    """Nothing stands before the first tokens of a document."""
    inputs = inputs.clone()
    inputs[: composition._kernel(mixers[0]) - 1] = 0
    return convolved(mixers, inputs, channels)


def without_decay(self: DeltaRule, queries: Tensor, inputs: Any, state: Tensor, first: int) -> Any:
    """A module's outputs and states are right, and its map is not."""
    wrong = type(inputs)(inputs.keys, inputs.values, inputs.decays * 0, inputs.steps)
    found = read(self, queries, wrong, state, first).map
    return replace(read(self, queries, inputs, state, first), map=found)


convolved, read = composition._convolved, DeltaRule.read


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (composition, "apply_map", without_transition),
        (composition, "_convolved", without_seam),
        (DeltaRule, "read", without_decay),
    ],
    ids=["transition", "seam", "decay"],
)
def test_a_wrong_composition_fails_the_trial(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    assert trial_difference(tiny_hybrid("qwen3_5_text")) <= TOLERANCE
    monkeypatch.setattr(owner, name, wrong)
    assert trial_difference(tiny_hybrid("qwen3_5_text")) > 10 * TOLERANCE


def sized(window: int, state: int) -> Any:
    """A hybrid model with a window, and with maps of a size."""
    sizes = {"mamba_d_head": 64, "mamba_expand": 8, "mamba_d_state": state}
    return wrap_causal(tiny_hybrid("bamba", max_position_embeddings=window, **sizes))


def test_modules_are_long_where_their_maps_are_large() -> None:
    causal = sized(8192, 128)
    assert causal.map_tokens == -(-causal.map_bytes // causal.bytes_per_token)
    assert MODULE_TOKENS < causal.map_tokens == causal.module_limit() < MOST_MODULE_TOKENS
    assert causal.module_limit(100) == 100
    assert sized(8192, 256).module_limit() == MOST_MODULE_TOKENS
    assert sized(8192, 16).module_limit() == MODULE_TOKENS, "small maps"
    assert sized(8192, 16).module_limit("auto", RECURRING_TOKENS) == RECURRING_TOKENS
    assert sized(8192, 256).module_limit("auto", RECURRING_TOKENS) == MOST_MODULE_TOKENS
    assert sized(2048, 128).module_limit() == 512, "a quarter of the window"


def test_models_of_attention_keep_no_maps() -> None:
    causal = wrap_causal(tiny_model("llama"))
    assert (causal.map_shape, causal.map_bytes, causal.module_limit()) == (None, 0, 384)
    assert causal.module_bytes(3) == 3 * causal.bytes_per_token


def test_maps_are_counted_in_the_dtype_of_states() -> None:
    causal = wrap_causal(tiny_hybrid("bamba"))
    whole = causal.map_bytes
    causal.states_dtype = torch.bfloat16
    assert whole / 2 < causal.map_bytes < 0.6 * whole


def test_a_map_keeps_the_inputs_at_the_ends_of_a_text_alone() -> None:
    kept = composition._extended(None, torch.randn(1, 8, 100), None, None, 4)
    assert (kept.first.shape, kept.last.shape) == ((1, 8, 3), (1, 8, 4))
    for each in (kept.first, kept.last):
        assert each.untyped_storage().nbytes() == each.nbytes
