"""ALiBi slopes are those of Hugging Face, for every number of heads."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_tensor

from ragcache.models import CausalLM
from ragcache.models.positions import Alibi
from ragcache.models.positions.alibi import geometric_slopes, interleaved_slopes
from tests.conftest import random_tokens, tiny_model
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference

HEADS = [1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 32, 64, 71, 112, 128]
EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.mark.parametrize("heads", HEADS)
def test_the_geometric_slopes_are_blooms(heads: int) -> None:
    tensor = bloom_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    torch.testing.assert_close(geometric_slopes(heads), tensor[:, 0, 1], **EXACT)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bias_max", [8, 16])
def test_the_interleaved_slopes_are_mpts(heads: int, bias_max: int) -> None:
    expected = -mpt_tensor(heads, 2, alibi_bias_max=bias_max)[:, 0, 0]
    torch.testing.assert_close(interleaved_slopes(heads, bias_max), expected, **EXACT)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12])
def test_falcons_slopes_are_scaled_with_its_scores(heads: int) -> None:
    model = tiny_model("falcon-rw", num_attention_heads=heads, hidden_size=heads * 16)
    slopes = CausalLM.patch(model).scheme.slopes
    assert slopes is not None
    tensor = falcon_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    torch.testing.assert_close(slopes, tensor[:, 0, 1] / 4, **EXACT)  # √16


@pytest.mark.parametrize("heads", [3, 6, 12])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_heads_that_are_no_power_of_two_equal_the_reference(family: str, heads: int) -> None:
    causal = CausalLM.patch(tiny_model(family, num_attention_heads=heads, hidden_size=heads * 8))
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(causal.model, pieces), **CLOSE)


def test_moving_turns_no_query() -> None:
    scheme = Alibi(geometric_slopes(4))
    assert scheme.movable
    assert scheme.relocation(torch.tensor([5])) is None
    assert scheme.name == "alibi"
