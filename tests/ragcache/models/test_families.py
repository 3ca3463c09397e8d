"""Families: which models read segments, which one buffer, which neither; a row of a user's own."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GPTJConfig,
    Qwen2Config,
    T5Config,
)

from ragcache.engine import EncodeJob, Request, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, Dimensions, Family, register, wrap, wrap_causal
from ragcache.models.families import FAMILIES, family_of, layer_windows, sliding_window
from ragcache.models.hf_patch import IMPLEMENTATION
from ragcache.models.positions import Learned
from tests.ragcache.models.reference import (
    CLOSE,
    Module,
    last_logits,
    prompt,
    reference,
    tiny_gemma,
)
from tests.tiny_models import LATENT, random_tokens, tiny_config, tiny_model

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
    with pytest.raises(UnsupportedModel) as caught:
        family_of(GPTJConfig())
    assert (
        f"models of type 'gptj' are not served; served types: {', '.join(sorted(FAMILIES))}."
        in str(caught.value)
    )
    assert "ragcache.models.families.register" in str(caught.value)


def test_a_refused_model_is_left_as_it_was() -> None:
    config = GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    model = AutoModelForCausalLM.from_config(config).train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        wrap_causal(model)
    assert model.config._attn_implementation == before
    assert model.training


def test_a_latent_is_kept_once_and_serves_as_key_and_value() -> None:
    plain = tiny_model(LATENT)
    causal = wrap_causal(copy.deepcopy(plain))
    [states] = encode(causal, [EncodeJob(random_tokens(21))])
    assert states.keys.shape == (2, 1, 21, 8 + 32)
    assert states.nbytes == states.keys.nbytes == 21 * causal.bytes_per_token
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(plain, pieces), **CLOSE)
    tokens = random_tokens(40)
    with torch.no_grad():
        out = plain.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)
    context = assemble_context([], tokens, window=512, max_new_tokens=6)
    [completion] = complete(causal, [Request(context, 6, frozenset())])
    assert list(completion.token_ids) == out[0, 40:].tolist()


WINDOWED = ("mistral", "phi3", "qwen2")


def windowed(family: str, window: int = 9) -> Any:
    changes = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    return tiny_model(family, sliding_window=window, **changes)


@pytest.mark.parametrize("family", WINDOWED)
def test_answers_through_a_short_window_equal_those_of_generate(family: str) -> None:
    model = windowed(family)
    tokens = random_tokens(40)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
    served = wrap(model)
    assert 9 in served.windows
    context = assemble_context([], tokens, window=512, max_new_tokens=6)
    [completion] = complete(served, [Request(context, 6, frozenset())])
    assert list(completion.token_ids) == out[0, 40:].tolist()


def test_an_ordinary_call_sees_through_the_window_and_refuses_to_leave_out_a_cap() -> None:
    tokens = torch.tensor([random_tokens(40)])
    with torch.no_grad():
        expected = tiny_gemma("gemma3")(tokens).logits
        found = wrap_causal(tiny_gemma("gemma3")).model(tokens).logits
        torch.testing.assert_close(found, expected, **CLOSE)
        with pytest.raises(UnsupportedModel, match=r"caps its scores at 2.0, .* at None"):
            wrap_causal(tiny_gemma("gemma2")).model(tokens)


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
        ({"kv_lora_rank": 8}, "compressed states"),
        ({"attention_chunk_size": 64}, "within chunks"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"global_head_dim": 512}, "heads of two sizes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_served_in_no_way_is_named(changes: dict[str, Any], property_: str) -> None:
    config = tiny_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=property_):
        family_of(config).check(config)


def test_every_family_of_the_list_is_served(family: str) -> None:
    config = tiny_config(family)
    family_of(config).check(config)
    assert sliding_window(config) is None


@pytest.mark.parametrize("family", ["mistral", "phi3"])
@pytest.mark.parametrize("window", [512, 4096])
def test_a_sliding_window_as_long_as_the_context_is_served(family: str, window: int) -> None:
    config = tiny_config(family, sliding_window=window)
    assert sliding_window(config) == window


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_switched_off_does_not_count(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=False)
    assert sliding_window(config) is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_some_layers_use_is_theirs(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert layer_windows(config, Dimensions.of(config)) == (None, 64)


def test_a_window_that_no_layer_uses_does_not_count() -> None:
    config = tiny_config("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert isinstance(config, Qwen2Config)
    assert config.layer_types == ["full_attention", "full_attention"]
    assert sliding_window(config) is None


@pytest.mark.parametrize(
    ("config", "property_"),
    [
        (T5Config(), "this t5 model has an encoder and a decoder"),
        (GPT2Config(add_cross_attention=True), "this gpt2 model attends to another sequence"),
        (
            SimpleNamespace(model_type="mistral4", kv_lora_rank=256),
            "this mistral4 model keeps compressed states",
        ),
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
