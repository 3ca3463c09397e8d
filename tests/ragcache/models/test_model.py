"""Models that read a contiguous buffer, and forwards that are replaced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import EncodeJob, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.engine.request import Segment
from ragcache.errors import UnsupportedModel
from ragcache.models import (
    Buffer,
    BufferPool,
    CausalLM,
    ContiguousLM,
    wrap,
    wrap_causal,
    wrap_contiguous,
)
from ragcache.states import KVStates
from tests.ragcache.models.reference import (
    CLOSE,
    FULL,
    ROPE,
    SLIDING,
    WINDOW,
    Module,
    last_logits,
    prompt,
    reference,
    reference_logits,
    tiny_gemma,
)
from tests.tiny_models import random_tokens, tiny_model

NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=["gemma2", "gemma3"])
def gemma(request: pytest.FixtureRequest) -> ContiguousLM:
    return wrap_contiguous(tiny_gemma(request.param))


def go_on(model: ContiguousLM, buffer: Buffer, tokens: Sequence[int], start: int) -> Tensor:
    positions = torch.arange(start, start + len(tokens))
    return model.forward(buffer, torch.tensor(tokens), positions)


def encoded(model: ContiguousLM, tokens: Sequence[int], start: int) -> KVStates:
    buffer = BufferPool(model, 0).take(len(tokens))
    go_on(model, buffer, tokens, start)
    filled = slice(0, len(tokens))
    return KVStates(buffer.keys[:, :, filled], buffer.values[:, :, filled], start)


def with_modules(model: ContiguousLM, modules: Sequence[Module], at: int = 3) -> Buffer:
    """A buffer with the modules placed; they were encoded at another position."""
    buffer = BufferPool(model, 0).take(512)
    for tokens, start in modules:
        model.place(buffer, encoded(model, tokens, at), start)
    return buffer


def test_states_are_those_of_the_models_own_cache(gemma: ContiguousLM) -> None:
    tokens = random_tokens(3 * WINDOW)
    states = encoded(gemma, tokens, 0)
    with torch.inference_mode():
        cache = gemma.model(torch.tensor([tokens])).past_key_values
    for index, layer in enumerate(cache.layers):
        kept = layer.keys.shape[2]  # a sliding layer forgets what no later token sees
        torch.testing.assert_close(states.keys[index, :, -kept:], layer.keys[0], **NEAR)
        torch.testing.assert_close(states.values[index, :, -kept:], layer.values[0], **NEAR)


def test_moved_modules_equal_modules_computed_in_place(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(11, seed=1), 0), (random_tokens(5, seed=2), 11)]
    own = random_tokens(6, seed=3)
    buffer = with_modules(gemma, modules, at=40)
    expected = reference_logits(gemma.model, modules, (own, 16))
    torch.testing.assert_close(go_on(gemma, buffer, own, 16), expected, **NEAR)


def test_gaps_count_for_the_sliding_window(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(9, seed=1), 0), (random_tokens(8, seed=2), 13)]
    own = random_tokens(4, seed=3)
    buffer = with_modules(gemma, modules)
    expected = reference_logits(gemma.model, modules, (own, 24))
    torch.testing.assert_close(go_on(gemma, buffer, own, 24), expected, **NEAR)
    near = reference_logits(gemma.model, modules, (own, 21))
    assert not torch.allclose(expected, near, **NEAR)


def test_segments_may_come_out_of_order(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(8, seed=2), 9), (random_tokens(9, seed=1), 0)]
    own = random_tokens(4, seed=3)
    buffer = with_modules(gemma, modules)
    expected = reference_logits(gemma.model, modules, (own, 17))
    torch.testing.assert_close(go_on(gemma, buffer, own, 17), expected, **NEAR)


def test_text_between_segments_does_not_see_the_later_one(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(9, seed=1), 0), (random_tokens(8, seed=2), 12)]
    between, after = random_tokens(3, seed=3), random_tokens(2, seed=4)
    buffer = with_modules(gemma, modules)
    first = go_on(gemma, buffer, between, 9)
    torch.testing.assert_close(
        first, reference_logits(gemma.model, modules[:1], (between, 9)), **NEAR
    )
    expected = reference_logits(gemma.model, modules, [(between, 9), (after, 20)])
    torch.testing.assert_close(go_on(gemma, buffer, after, 20), expected, **NEAR)


def test_a_token_within_a_segment_sees_all_of_it(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(9, seed=1), 4)]
    own = random_tokens(3, seed=3)
    buffer = with_modules(gemma, modules)
    expected = reference_logits(gemma.model, modules, (own, 6))
    torch.testing.assert_close(go_on(gemma, buffer, own, 6), expected, **NEAR)


def test_portions_equal_one_pass(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(9, seed=1), 0)]
    own = random_tokens(12, seed=3)
    whole = go_on(gemma, with_modules(gemma, modules), own, 9)
    buffer = with_modules(gemma, modules)
    for at in range(0, 12, 4):
        last = go_on(gemma, buffer, own[at : at + 4], 9 + at)
    torch.testing.assert_close(last, whole, **NEAR)


def test_the_layers_turn_by_their_own_frequencies() -> None:
    gemma = wrap_contiguous(tiny_gemma("gemma3"))
    local, everything, again = gemma.scheme.layers
    assert again is local
    assert not torch.equal(local.inverse_frequency, everything.inverse_frequency)
    assert everything.inverse_frequency[0].item() == pytest.approx(1 / 8)
    assert gemma.scheme.name == "rotary:default:8+rotary:linear:8"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_ordinary_model_equals_its_segment_design(family: str) -> None:
    contiguous = wrap_contiguous(tiny_model(family))
    causal = wrap_causal(tiny_model(family))
    tokens, own = random_tokens(11, seed=1), random_tokens(5, seed=2)
    positions = (31, 32, 32, 33, 35)  # a position that is taken twice is seen by the later token
    [states] = encode(causal, [EncodeJob(tokens, 4)])
    mine = encoded(contiguous, tokens, 4)
    torch.testing.assert_close(mine.keys, states.keys, **NEAR)
    torch.testing.assert_close(mine.values, states.values, **NEAR)
    room = ContiguousKV.allocate(causal, len(own))
    chunk = ScheduledChunk((Segment(states, 20),), room, own, positions)
    [expected] = causal.forward(BatchBuilder(causal).build_batch([chunk]))
    buffer = with_modules(contiguous, [(tokens, 20)], at=4)
    logits = contiguous.forward(buffer, torch.tensor(own), torch.tensor(positions))
    torch.testing.assert_close(logits, expected, **NEAR)


def test_a_short_window_in_every_layer_is_served() -> None:
    model = wrap(tiny_model("mistral", sliding_window=WINDOW))
    assert isinstance(model, ContiguousLM)
    tokens = random_tokens(3 * WINDOW)
    buffer = BufferPool(model, 0).take(len(tokens))
    with torch.inference_mode():
        expected = model.model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(go_on(model, buffer, tokens, 0), expected, **NEAR)


def test_the_model_chooses_how_it_is_served() -> None:
    assert isinstance(wrap(tiny_gemma("gemma2")), ContiguousLM)
    assert isinstance(wrap(tiny_gemma("gemma3")), ContiguousLM)
    assert isinstance(wrap(tiny_model("mistral")), CausalLM)
    assert isinstance(wrap(tiny_model("mistral", sliding_window=512)), CausalLM)


def test_frequencies_that_depend_on_the_length_are_refused() -> None:
    rope = {**ROPE, FULL: {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e5}}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        wrap_contiguous(tiny_gemma("gemma3", rope_parameters=rope))


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="both directions"):
        wrap_contiguous(tiny_gemma("gemma3", use_bidirectional_attention=True))


def test_other_layers_and_families_are_refused() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = [FULL, "chunked_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        wrap_contiguous(model)
    model.config.model_type = "gpt2"
    with pytest.raises(UnsupportedModel, match="gpt2"):
        wrap_contiguous(model)


class TestBufferPool:
    def test_a_buffer_is_used_again(self, gemma: ContiguousLM) -> None:
        pool = BufferPool(gemma, keep_bytes=2**20)
        first = pool.take(100)
        assert first.capacity == 128
        other = pool.take(128)
        assert other is not first
        pool.give(first)
        assert pool.take(65) is first

    def test_a_buffer_of_another_size_is_not(self, gemma: ContiguousLM) -> None:
        pool = BufferPool(gemma, keep_bytes=2**20)
        first = pool.take(1)
        pool.give(first)
        assert pool.take(65) is not first
        assert pool.unused == 1

    def test_a_larger_one_takes_over_what_it_held(self, gemma: ContiguousLM) -> None:
        pool = BufferPool(gemma, keep_bytes=2**20)
        tokens, more = random_tokens(60), random_tokens(9, seed=2)
        buffer, straight = pool.take(60), pool.take(128)
        for each in (buffer, straight):
            go_on(gemma, each, tokens, 5)
        larger = pool.grown(buffer, 69)
        assert (larger.capacity, pool.unused) == (128, 1)
        assert pool.grown(larger, 128) is larger
        torch.testing.assert_close(
            go_on(gemma, larger, more, 65), go_on(gemma, straight, more, 65), rtol=0, atol=0
        )

    def test_unused_ones_are_kept_within_the_budget(self, gemma: ContiguousLM) -> None:
        pool = BufferPool(gemma, keep_bytes=2 * 64 * gemma.bytes_per_token)
        buffers = [pool.take(64) for _ in range(3)]
        for buffer in buffers:
            pool.give(buffer)
        assert pool.unused == 2
        assert pool.take(64) is buffers[2]
        assert pool.take(64) is buffers[1]
        assert pool.take(64) not in buffers


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
