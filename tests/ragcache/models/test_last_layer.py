"""The last layer over the rows that are wanted, beside all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ragcache.models import CausalLM, wrap_causal
from ragcache.models.last_layer import LastLayer
from ragcache.models.model import layer_list
from ragcache.models.single_pass import forward_text
from tests.tiny_models import FAMILY_PARAMS, LATENT, random_tokens, tiny_model

ROWS = 24


@torch.inference_mode()
def computed(causal: CausalLM, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the last rows of a text, and the states of all."""
    keys, values = causal.new_states(ROWS)
    text = torch.tensor(random_tokens(ROWS))
    return forward_text(causal, text, 3, keys, values, wanted=wanted), keys, values


@pytest.mark.parametrize("family", [*FAMILY_PARAMS, "qwen3_moe", LATENT])
def test_few_rows_equal_all_rows(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    every = computed(causal, ROWS)
    assert not divided(causal), "steps that want all rows change nothing"
    for wanted in (6, 1, 0):
        logits, *states = computed(causal, wanted)
        torch.testing.assert_close(logits, every[0][ROWS - wanted :], rtol=1e-4, atol=1e-5)
        assert logits.shape == (wanted, causal.logits_width)
        for found, expected in zip(states, every[1:], strict=True):
            assert torch.equal(found, expected)
    assert divided(causal) != causal.whole_layers


def divided(causal: CausalLM) -> bool:
    """Whether the last layer was prepared."""
    layers = layer_list(causal.model, causal.depth)
    return layers is not None and isinstance(layers[-1].forward, LastLayer)


def test_rows_that_are_not_wanted_leave_the_layer_early() -> None:
    causal = wrap_causal(tiny_model("llama"))
    rows = list[int]()
    layer = causal.model.base_model.layers[-1]
    layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    for wanted in (ROWS, 7, 6, 1, 0):
        computed(causal, wanted)
    assert rows == [ROWS, ROWS, 6, 1]
