"""Models with windows, caps and frequencies by layer read segments; forwards that are replaced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import EncodeJob, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.request import Segment
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, LayeredRotary, wrap_causal
from tests.ragcache.models.reference import (
    FULL,
    ROPE,
    SLIDING,
    WINDOW,
    Tokens,
    assert_moved_modules_are_exact,
    reference_logits,
    tiny_gemma,
)
from tests.tiny_models import random_tokens, tiny_model

NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=["gemma2", "gemma3", "gemma4"])
def plain(request: pytest.FixtureRequest) -> Any:
    """A Gemma as Hugging Face computes it."""
    return tiny_gemma(request.param)


@pytest.fixture
def gemma(plain: Any) -> CausalLM:
    """The same, patched."""
    return wrap_causal(copy.deepcopy(plain))


def go_on(
    causal: CausalLM, segments: tuple[Segment, ...], *runs: Tokens, portion: int = 512
) -> Tensor:
    """Logits after runs of tokens behind segments, in portions."""
    tokens = [token for ids, _ in runs for token in ids]
    positions = [start + n for ids, start in runs for n in range(len(ids))]
    room = ContiguousKV.allocate(causal, len(tokens))
    for begin in range(0, len(tokens), portion):
        here = slice(begin, begin + portion)
        chunk = ScheduledChunk(segments, room, tokens[here], positions[here])
        [logits] = causal.forward(BatchBuilder(causal).build_batch([chunk]))
        room.advance(positions[here])
    return logits


def placed(causal: CausalLM, modules: Sequence[Tokens], at: int = 3) -> tuple[Segment, ...]:
    """Segments of the modules, which were encoded at another position."""
    states = encode(causal, [EncodeJob(tokens, at) for tokens, _ in modules])
    return tuple(Segment(each, start) for each, (_, start) in zip(states, modules, strict=True))


def test_states_are_those_of_the_models_own_cache(plain: Any, gemma: CausalLM) -> None:
    tokens = random_tokens(3 * WINDOW)
    [states] = encode(gemma, [EncodeJob(tokens)])
    with torch.inference_mode():
        cache = plain(torch.tensor([tokens])).past_key_values
    own = cache.layers[: len(gemma.windows)]  # later layers share states
    for index, layer in enumerate(own):
        kept = layer.keys.shape[2]  # a sliding layer forgets what no later token sees
        keys, values = (
            each[index] if gemma.layout is None else gemma.layout.of_layer(index, each)
            for each in (states.keys, states.values)
        )
        torch.testing.assert_close(keys[:, -kept:], layer.keys[0], **NEAR)
        torch.testing.assert_close(values[:, -kept:], layer.values[0], **NEAR)


@pytest.mark.parametrize(
    ("modules", "own"),
    [
        ([(11, 0), (5, 11)], (6, 16)),
        ([(8, 9), (9, 0)], (4, 17)),  # out of order
        ([(9, 0)], (4, 100)),  # outside the window of all rows
        ([(9, 4)], (3, 6)),  # a token within a segment sees all of it
    ],
)
def test_moved_modules_equal_modules_computed_in_place(
    plain: Any, gemma: CausalLM, modules: list[tuple[int, int]], own: tuple[int, int]
) -> None:
    """modules, own: how many tokens, and where they start."""
    runs = [(random_tokens(count, seed=start + 1), start) for count, start in (*modules, own)]
    found = go_on(gemma, placed(gemma, runs[:-1], at=40), runs[-1])
    torch.testing.assert_close(found, reference_logits(plain, runs[:-1], runs[-1]), **NEAR)


def test_gaps_count_for_the_sliding_window(plain: Any, gemma: CausalLM) -> None:
    modules = [(random_tokens(9, seed=1), 0), (random_tokens(8, seed=2), 13)]
    own = random_tokens(4, seed=3)
    expected = reference_logits(plain, modules, (own, 24))
    torch.testing.assert_close(go_on(gemma, placed(gemma, modules), (own, 24)), expected, **NEAR)
    near = reference_logits(plain, modules, (own, 21))
    assert not torch.allclose(expected, near, **NEAR)


def test_text_between_segments_does_not_see_the_later_one(plain: Any, gemma: CausalLM) -> None:
    modules = [(random_tokens(9, seed=1), 0), (random_tokens(8, seed=2), 12)]
    between, after = (random_tokens(3, seed=3), 9), (random_tokens(2, seed=4), 20)
    segments = placed(gemma, modules)
    first = go_on(gemma, segments, between)
    torch.testing.assert_close(first, reference_logits(plain, modules[:1], between), **NEAR)
    expected = reference_logits(plain, modules, [between, after])
    torch.testing.assert_close(go_on(gemma, segments, between, after), expected, **NEAR)


def test_portions_equal_one_pass(gemma: CausalLM) -> None:
    segments = placed(gemma, [(random_tokens(9, seed=1), 0)])
    own = random_tokens(12, seed=3), 9
    whole = go_on(gemma, segments, own)
    torch.testing.assert_close(go_on(gemma, segments, own, portion=4), whole, **NEAR)


def test_the_layers_turn_by_their_own_frequencies() -> None:
    scheme = wrap_causal(tiny_gemma("gemma3")).scheme
    assert isinstance(scheme, LayeredRotary)
    local, everything, again = scheme.layers
    assert again is local
    assert not torch.equal(local.inverse_frequency, everything.inverse_frequency)
    assert everything.inverse_frequency[0].item() == pytest.approx(1 / 8)
    assert scheme.name == "rotary:default:8+rotary:linear:8"


def test_unknown_scalings_of_some_layers_are_refused() -> None:
    model = tiny_gemma("gemma3", rope_parameters=copy.deepcopy(ROPE))
    model.config.rope_parameters[FULL]["rope_type"] = "axial"
    with pytest.raises(UnsupportedModel, match="axial"):
        wrap_causal(model)


def test_windows_and_caps_change_the_tiny_models() -> None:
    """The tests above would not notice a mask or a cap that is lost, were the effect too small."""
    tokens = torch.tensor([random_tokens(3 * WINDOW)])
    wide = {"layer_types": [FULL] * 3}
    for family, change in (
        ("gemma2", wide),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3", wide),
        ("gemma3", {"rope_parameters": {**ROPE, SLIDING: {**ROPE[SLIDING], "rope_theta": 1e2}}}),
    ):
        with torch.inference_mode():
            usual = tiny_gemma(family)(tokens).logits
            changed = tiny_gemma(family, **change)(tokens).logits
        assert (usual - changed).abs().max() > 0.01


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
    assert_moved_modules_are_exact(causal)


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
