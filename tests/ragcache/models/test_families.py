"""Families: which models read segments, which one buffer, which neither; a row of a user's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTJConfig,
    Qwen2Config,
    T5Config,
)

from ragcache.engine import EncodeJob, Request, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import (
    BufferPool,
    CausalLM,
    ContiguousLM,
    Family,
    register,
    wrap,
    wrap_causal,
    wrap_contiguous,
)
from ragcache.models.families import FAMILIES, family_of, sliding_window, whole_context
from ragcache.models.hf_patch import IMPLEMENTATION
from ragcache.models.positions import Learned
from tests.ragcache.models.reference import (
    CLOSE,
    SLIDING,
    Module,
    last_logits,
    prompt,
    reference,
    tiny_gemma,
)
from tests.tiny_models import random_tokens, tiny_config, tiny_model

TYPES = (
    "bloom, falcon, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mpt, opt, phi, "
    "phi3, qwen2, qwen3"
)


COHERE = Family(("cohere",), interleaved=True)
"""What a user writes: interleaved rotary positions, and logits scaled by the model's head."""


@pytest.fixture
def cohere(monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setitem(FAMILIES, "cohere", COHERE)  # taken back after the test
    register(COHERE)
    torch.manual_seed(7)
    config = CohereConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        logit_scale=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    return wrap_causal(AutoModelForCausalLM.from_config(config).eval())


def test_registered_family_is_served(cohere: CausalLM) -> None:
    assert cohere.scheme.name == "rotary:default:8:interleaved"
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    context = prompt(cohere, pieces)
    [logits] = last_logits(cohere, [context])
    expected = reference(cohere.model, pieces)
    torch.testing.assert_close(logits, expected, **CLOSE)
    [completion] = complete(cohere, [Request(context, 1, frozenset())])
    assert completion.token_ids[0] == int(expected.argmax())


def test_interleaved_keys_do_not_move_as_halves(cohere: CausalLM) -> None:
    register(replace(COHERE, interleaved=False))
    halves = wrap_causal(cohere.model)
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(halves, [prompt(halves, pieces)])
    assert not torch.allclose(logits, reference(cohere.model, pieces), **CLOSE)


def test_every_type_of_the_list_has_a_family(family: str) -> None:
    config = tiny_config(family)
    assert config.model_type in family_of(config).model_types


def test_an_unknown_type_is_refused_by_its_name_and_told_of_the_registry() -> None:
    assert ", ".join(sorted(FAMILIES)) == TYPES
    with pytest.raises(UnsupportedModel) as caught:
        family_of(GPTJConfig())
    assert f"models of type 'gptj' are not served; served types: {TYPES}." in str(caught.value)
    assert "ragcache.models.families.register" in str(caught.value)


def test_a_refused_model_is_left_as_it_was() -> None:
    config = CohereConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        wrap_causal(model)
    assert model.config._attn_implementation == before
    assert model.training


WINDOWED = ("mistral", "phi3", "qwen2")


def windowed(family: str, window: int = 9) -> Any:
    changes = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    return tiny_model(family, sliding_window=window, **changes)


def test_every_family_reads_segments_where_it_can(family: str) -> None:
    assert isinstance(wrap(tiny_model(family)), CausalLM)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_short_window_goes_to_the_buffer(family: str) -> None:
    model = windowed(family)
    tokens = random_tokens(40)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
    served = wrap(model)
    assert isinstance(served, ContiguousLM)
    context = assemble_context([], tokens, window=512, max_new_tokens=6)
    [completion] = complete(served, [Request(context, 6, frozenset())])
    assert list(completion.token_ids) == out[0, 40:].tolist()


@pytest.mark.parametrize("family", WINDOWED)
def test_a_short_window_is_refused_where_segments_are_demanded(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="sliding window of 9 tokens"):
        wrap_causal(windowed(family))


@pytest.mark.parametrize(
    ("family", "property_"), [("gemma2", "caps its attention scores"), ("gemma3", "sliding window")]
)
def test_gemmas_go_to_the_buffer(family: str, property_: str) -> None:
    with pytest.raises(UnsupportedModel, match=property_):
        wrap_causal(tiny_gemma(family))
    assert isinstance(wrap(tiny_gemma(family)), ContiguousLM)


@pytest.mark.parametrize("family", [*WINDOWED, "gemma2", "gemma3"])
def test_kernels_read_windows_and_caps_by_segments(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gemma(family) if family.startswith("gemma") else windowed(family)
    buffered = wrap(model)
    monkeypatch.setattr("ragcache.models.families.has_kernels", lambda _: True)
    served = wrap(model)
    assert isinstance(buffered, ContiguousLM)
    assert isinstance(served, CausalLM)
    assert served.needs_kernels
    short = buffered.sliding_window
    assert served.windows == tuple(short if t == SLIDING else None for t in buffered.layer_types)
    assert served.softcap == (2.0 if family == "gemma2" else None)
    assert served.scheme.name == buffered.scheme.name
    assert not wrap_causal(tiny_model("mistral", sliding_window=512)).needs_kernels


def test_an_ordinary_call_sees_through_the_window_and_refuses_to_leave_out_a_cap() -> None:
    tokens = torch.tensor([random_tokens(40)])
    with torch.no_grad():
        expected = tiny_gemma("gemma3")(tokens).logits
        found = wrap_causal(tiny_gemma("gemma3"), kernels=True).model(tokens).logits
        torch.testing.assert_close(found, expected, **CLOSE)
        with pytest.raises(UnsupportedModel, match=r"caps its scores at 2.0, .* at None"):
            wrap_causal(tiny_gemma("gemma2"), kernels=True).model(tokens)


def test_layers_with_frequencies_of_their_own_go_to_the_buffer() -> None:
    config = tiny_gemma("gemma3", sliding_window=512).config
    why = whole_context(config)
    assert why == "turns queries and keys by other frequencies in some layers than in others"


@pytest.mark.parametrize("family", ["falcon-40b", "falcon-rw", "mpt", "bloom", "gpt2", "opt"])
def test_what_no_buffer_serves_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="not served from one buffer"):
        wrap_contiguous(tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox"])
def test_the_buffer_serves_what_segments_serve(family: str) -> None:
    """Modules moved into the buffer answer as modules that queries turn to."""
    causal = wrap_causal(tiny_model(family))
    states = list(encode(causal, [EncodeJob(random_tokens(n, seed=n), 33) for n in (24, 17)]))
    question = random_tokens(6)
    context = assemble_context(states, question, window=512, max_new_tokens=4)
    [expected] = complete(causal, [Request(context, 4, frozenset())])
    buffered = wrap_contiguous(tiny_model(family))
    [found] = complete(buffered, [Request(context, 4, frozenset())])
    assert found.token_ids == expected.token_ids
    buffer = BufferPool(buffered, 0).take(64)
    for segment in context.segments:
        buffered.place(buffer, segment.states, segment.start)
    logits: Tensor = buffered.forward(
        buffer, torch.tensor(question), torch.tensor(context.position_ids)
    )
    assert int(logits.argmax()) == expected.token_ids[0]


def test_a_model_without_the_attention_interface_needs_replaced_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "mpt", Family(("mpt",), scheme=lambda _: Learned()))
    model = tiny_model("mpt").train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="does not call transformers' attention interface"):
        wrap(model)
    assert model.config._attn_implementation == before != IMPLEMENTATION
    assert model.training


@pytest.mark.parametrize(
    ("changes", "property_"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of type linear_attention",
        ),
        ({"mamba_d_state": 16}, "state space layers"),
        ({"no_rope_layers": [1, 0]}, "layers without positions"),
        ({"kv_lora_rank": 8}, "compressed states"),
        ({"attention_chunk_size": 64}, "within chunks"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_served_in_no_way_is_named(changes: dict[str, Any], property_: str) -> None:
    config = tiny_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=property_):
        family_of(config).check(config)


def test_a_cap_keeps_the_fused_attention_away() -> None:
    """It would leave the cap out, and some versions of transformers choose it by themselves."""
    model = tiny_gemma("gemma2")
    model._supports_sdpa = True
    assert wrap(model).model.config._attn_implementation == "eager"
    assert wrap(tiny_gemma("gemma3")).model.config._attn_implementation == "sdpa"


def test_every_family_of_the_list_is_served(family: str) -> None:
    config = tiny_config(family)
    family_of(config).check(config)
    assert whole_context(config) is None
    assert sliding_window(config) is None


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    model = tiny_model("mistral", sliding_window=511)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        wrap_causal(model)
    assert "mistral model attends through a sliding window of 511 tokens" in str(caught.value)
    assert "its context of 512" in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["mistral", "phi3"])
@pytest.mark.parametrize("window", [512, 4096])
def test_a_sliding_window_as_long_as_the_context_is_served(family: str, window: int) -> None:
    config = tiny_config(family, sliding_window=window)
    assert sliding_window(config) == window
    assert whole_context(config) is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_switched_off_does_not_count(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=False)
    assert sliding_window(config) is None
    assert whole_context(config) is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_some_layers_use_is_refused(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert "sliding window of 64 tokens" in str(whole_context(config))


def test_a_window_that_no_layer_uses_does_not_count() -> None:
    config = tiny_config("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert isinstance(config, Qwen2Config)
    assert config.layer_types == ["full_attention", "full_attention"]
    assert sliding_window(config) is None
    assert whole_context(config) is None


@pytest.mark.parametrize(
    ("config", "property_"),
    [
        (T5Config(), "this t5 model has an encoder and a decoder"),
        (GPT2Config(add_cross_attention=True), "this gpt2 model attends to another sequence"),
        (DeepseekV3Config(), "this deepseek_v3 model keeps compressed states"),
        (
            SimpleNamespace(model_type="llama4_text", attention_chunk_size=8192),
            "this llama4_text model attends within chunks",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_property_is_named(config: Any, property_: str) -> None:
    with pytest.raises(UnsupportedModel, match=property_):
        family_of(config).check(config)


@pytest.mark.parametrize(
    ("changed", "property_"),
    [
        ({"alibi": False}, r"has no ALiBi \(attn_config.alibi is false\)"),
        ({"prefix_lm": True}, r"both directions within a prefix \(attn_config.prefix_lm\)"),
    ],
    ids=["alibi", "prefix"],
)
def test_an_mpt_that_hugging_face_computes_otherwise_is_refused(
    changed: dict[str, Any], property_: str
) -> None:
    config = tiny_config("mpt", attn_config=changed)
    with pytest.raises(UnsupportedModel, match=property_):
        family_of(config).check(config)
