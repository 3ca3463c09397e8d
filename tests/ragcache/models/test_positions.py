"""Position schemes: slopes, scalings, rotations, and what cannot move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_tensor

from ragcache.attention.ops import alibi_bias
from ragcache.engine import EncodeJob, Request, Segment, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.engine.request import Context
from ragcache.errors import PromptTooLong, UnsupportedModel
from ragcache.models import wrap_causal
from ragcache.models.positions import Absolute, Alibi, Rotary, geometric_slopes, interleaved_slopes
from tests.ragcache.models.reference import assert_moved_modules_are_exact, last_logits
from tests.tiny_models import random_tokens, tiny_model

SWITCH = 128
PARAMETERS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SWITCH,
}
FIXED: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": PARAMETERS,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def scaled(scaling: str, parameters: dict[str, Any], family: str = "llama") -> Any:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **parameters}
    return tiny_model(family, rope_parameters=rope)


@pytest.mark.parametrize("family", ["llama", "falcon-7b"])
def test_scalings_that_are_not_known_are_refused(family: str) -> None:
    model = scaled("default", {}, family)
    model.config.rope_parameters["rope_type"] = "axial"
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        wrap_causal(model)
    assert "rotary scaling 'axial' may change with the length" in str(caught.value)
    served = "default, dynamic, linear, llama3, longrope, proportional, yarn"
    assert f"served scalings: {served}" in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["llama", "falcon-40b"])
@pytest.mark.parametrize("scaling", FIXED)
def test_moving_is_exact_under_fixed_scalings(scaling: str, family: str) -> None:
    causal = wrap_causal(scaled(scaling, FIXED[scaling], family))
    assert causal.scheme.name == f"rotary:{scaling}:8"
    assert_moved_modules_are_exact(causal)


def test_yarns_attention_factor_is_in_the_keys_only() -> None:
    """The model scales cos and sin, so keys carry the factor; a turn has none."""
    causal = wrap_causal(scaled("yarn", FIXED["yarn"]))
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
    causal = wrap_causal(tiny_model(family, rope_parameters=rope))
    assert causal.scheme.name == f"rotary:default:{width // 2}"
    assert_moved_modules_are_exact(causal)


def test_schemes_without_rotation_turn_no_query() -> None:
    alibi, learned = Alibi(geometric_slopes(4)), Absolute("learned")
    assert (alibi.name, alibi.movable, alibi.relocation(torch.tensor([5]))) == ("alibi", True, None)
    assert (learned.name, learned.movable, learned.slopes) == ("learned", False, None)
    assert learned.relocation(torch.tensor([0, 0])) is None


def test_interleaved_pairs_are_named_and_frequencies_exact() -> None:
    scheme = Rotary(torch.ones(8), interleaved=True)
    assert scheme.name == "rotary:default:8:interleaved"
    assert scheme.relocation(torch.tensor([4])).interleaved
    assert not Rotary(torch.ones(8)).relocation(torch.tensor([4])).interleaved
    model = tiny_model("llama", torch.bfloat16)
    frequency = Rotary.of(model.config, model.model.rotary_emb).inverse_frequency
    assert (frequency.dtype, frequency.requires_grad) == (torch.float32, False)


def longrope(family: str) -> Any:
    changes = {"original_max_position_embeddings": SWITCH} if family == "phi3" else {}
    return tiny_model(family, rope_parameters=dict(PARAMETERS), **changes)


@pytest.fixture(params=["llama", "phi3"])
def model(request: pytest.FixtureRequest) -> Any:
    return longrope(request.param)


def test_the_window_ends_at_the_switch_unless_it_ends_before(model: Any) -> None:
    causal = wrap_causal(model)
    assert causal.window == SWITCH < model.config.max_position_embeddings
    assert causal.scheme.name == "rotary:longrope:8"
    with pytest.raises(PromptTooLong):
        assemble_context([], random_tokens(SWITCH), window=causal.window, max_tokens=1)
    short = tiny_model("llama", rope_parameters=dict(PARAMETERS), max_position_embeddings=100)
    assert wrap_causal(short).window == 100


def test_an_ordinary_call_past_the_switch_changes_nothing(model: Any) -> None:
    """transformers overwrites the frequencies in place there."""
    causal = wrap_causal(model)
    frequency = causal.scheme.relocation(torch.tensor([1])).cos
    context = assemble_context([], random_tokens(30), window=SWITCH, max_tokens=4)
    [before] = complete(causal, [Request(context, 4, frozenset())])
    with torch.no_grad():
        model(torch.tensor([random_tokens(SWITCH + 50)]))
    assert torch.equal(causal.scheme.relocation(torch.tensor([1])).cos, frequency)
    [after] = complete(causal, [Request(context, 4, frozenset())])
    assert before.token_ids == after.token_ids
    assert torch.equal(wrap_causal(model).scheme.relocation(torch.tensor([1])).cos, frequency), (
        "patching anew takes the frequencies before the switch, too"
    )


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


def test_falcons_distances_are_not_rounded() -> None:
    """Beyond 256 positions, which bfloat16 does not hold (docs/guides/models.md)."""
    model = tiny_model("falcon-rw")
    scheme = wrap_causal(model).scheme
    assert scheme.slopes is not None
    count, scale = 400, model.config.head_dim**-0.5
    rounded = falcon_tensor(torch.ones(1, count, dtype=torch.long), 4, torch.float32) * scale
    exact = scheme.slopes.double()[:, None] * torch.arange(count)
    found = alibi_bias(scheme.slopes, torch.arange(count)[None], 4).view(4, count)
    torch.testing.assert_close(found.double(), exact, rtol=1e-7, atol=0.0)
    theirs = rounded.view(4, count).double()
    torch.testing.assert_close(theirs[:, :257], exact[:, :257])
    assert ((theirs - exact)[:, 257:].abs() > 1e-3 * exact[:, 257:]).any()


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12])
def test_falcons_slopes_are_scaled_with_its_scores(heads: int) -> None:
    model = tiny_model("falcon-rw", num_attention_heads=heads, hidden_size=heads * 16)
    slopes = wrap_causal(model).scheme.slopes
    assert slopes is not None
    tensor = falcon_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    torch.testing.assert_close(slopes, tensor[:, 0, 1] / 4, **EXACT)  # √16


@pytest.mark.parametrize("heads", [3, 6, 12])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_heads_that_are_no_power_of_two_equal_the_reference(family: str, heads: int) -> None:
    causal = wrap_causal(tiny_model(family, num_attention_heads=heads, hidden_size=heads * 8))
    assert_moved_modules_are_exact(causal)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_moved_segment_is_an_error_of_the_caller(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    [states] = encode(causal, [EncodeJob(random_tokens(12), start=5)])
    context = Context((Segment(states, 0),), (1, 2, 3), (12, 13, 14), 15)
    with pytest.raises(AssertionError, match="stay where they were encoded"):
        last_logits(causal, [context])
