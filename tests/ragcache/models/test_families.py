"""Families: which models are served, with which windows, and why others are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTJConfig

from ragcache.engine import EncodeJob, Request, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import Dimensions, Family, properties, wrap, wrap_causal
from ragcache.models.families import FAMILIES, family_of
from ragcache.models.hf_patch import IMPLEMENTATION
from ragcache.models.positions import Absolute
from ragcache.models.properties import layer_windows, sliding_window
from tests.ragcache.models.reference import CLOSE, assert_moved_modules_are_exact, tiny_gemma
from tests.tiny_models import LATENT, random_tokens, tiny_config, tiny_model


def test_an_unknown_type_is_refused_by_name_and_left_as_it_was() -> None:
    config = GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    model = AutoModelForCausalLM.from_config(config).train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        wrap_causal(model)
    served = ", ".join(sorted(FAMILIES))
    assert f"models of type 'gptj' are not served; served types: {served}." in str(caught.value)
    assert "ragcache.models.families.register" in str(caught.value)
    assert model.config._attn_implementation == before
    assert model.training


def test_a_latent_is_kept_once_and_serves_as_key_and_value() -> None:
    plain = tiny_model(LATENT)
    causal = wrap_causal(copy.deepcopy(plain))
    [states] = encode(causal, [EncodeJob(random_tokens(21))])
    assert states.keys.shape == (2, 1, 21, 8 + 32)
    assert states.nbytes == states.keys.nbytes == 21 * causal.bytes_per_token
    assert_moved_modules_are_exact(causal, plain)
    tokens = random_tokens(40)
    with torch.no_grad():
        out = plain.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)
    context = assemble_context([], tokens, window=512, max_tokens=6)
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
    context = assemble_context([], tokens, window=512, max_tokens=6)
    [completion] = complete(served, [Request(context, 6, frozenset())])
    assert list(completion.token_ids) == out[0, 40:].tolist()


def test_an_ordinary_call_keeps_windows_and_refuses_caps() -> None:
    tokens = torch.tensor([random_tokens(40)])
    with torch.no_grad():
        expected = tiny_gemma("gemma3")(tokens).logits
        found = wrap_causal(tiny_gemma("gemma3")).model(tokens).logits
        torch.testing.assert_close(found, expected, **CLOSE)
        with pytest.raises(UnsupportedModel, match=r"caps its scores at 2.0, .* at None"):
            wrap_causal(tiny_gemma("gemma2")).model(tokens)


def test_a_model_without_the_interface_needs_other_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "mpt", Family(("mpt",), scheme=lambda _: Absolute("learned")))
    model = tiny_model("mpt").train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="does not call transformers' attention interface"):
        wrap(model)
    assert model.config._attn_implementation == before != IMPLEMENTATION
    assert model.training


@pytest.mark.parametrize(
    ("family", "changes", "window", "windows"),
    [
        *((family, {"sliding_window": 512}, 512, ()) for family in ("mistral", "phi3")),
        *((family, {"sliding_window": 4096}, 4096, ()) for family in ("mistral", "phi3")),
        *((family, {"use_sliding_window": False}, None, ()) for family in ("qwen2", "qwen3")),
        *((family, {"max_window_layers": 1}, 64, (None, 64)) for family in ("qwen2", "qwen3")),
        ("qwen2", {"max_window_layers": 2}, None, ()),
    ],
)
def test_windows_follow_layers_and_are_below_the_context(
    family: str, changes: dict[str, Any], window: int | None, windows: tuple[int | None, ...]
) -> None:
    config = tiny_config(family, **{"sliding_window": 64, "use_sliding_window": True} | changes)
    assert sliding_window(config) == window
    assert layer_windows(config, Dimensions.of(config)) == windows


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("llama", {"mamba_d_state": 16}, "state space layers"),
        ("llama", {"kv_lora_rank": 8}, "compressed states"),
        ("llama", {"attention_chunk_size": 64}, "within chunks"),
        ("llama", {"use_bidirectional_attention": True}, "both directions"),
        ("llama", {"global_head_dim": 512}, "heads of two sizes"),
        ("t5", {}, "this t5 model has an encoder and a decoder"),
        ("gpt2", {"add_cross_attention": True}, "this gpt2 model attends to another sequence"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("llama", {"per_layer_config": {0: {"head_dim": 64}}}, "layers that differ in head_dim"),
        (
            "gemma4_text",
            {"per_layer_config": {0: {"head_dim": 512, "intermediate_size": 64}}},
            "layers that differ in intermediate_size",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attends in both directions"),
        ("mistral4", {}, "this mistral4 model keeps compressed states"),
        ("llama4_text", {}, "this llama4_text model attends within chunks"),
        ("granitemoehybrid", {}, "has no attention layer"),
        ("jamba", {}, "this jamba model has recurrent layers that continue no text from a cache"),
        ("mamba", {}, "this mamba model has no attention layer"),
        ("qwen4_exp_text", {}, "chooses the keys of a query by an indexer"),
        ("glm5_next_text", {}, "chooses the keys of a query by an indexer"),
        ("inkling_text", {}, "has convolutions around its keys and values"),
        ("zaya", {}, "has convolutions around its keys and values"),
        ("minimax", {}, "continue no text from a cache"),
        ("zamba", {}, "continue no text from a cache"),
        ("recurrent_gemma", {}, "continue no text from a cache"),
        ("falcon_mamba", {}, "this falcon_mamba model has no attention layer"),
        ("mamba2", {}, "this mamba2 model has no attention layer"),
        ("xlstm", {}, "this xlstm model has no attention layer"),
        ("rwkv", {}, "this rwkv model has no attention layer"),
        ("inkling2_text", {}, "has convolutions around its keys and values"),
        ("deepseek_v4", {}, "pools keys over several tokens"),
        ("mpt", {"attn_config": {"alibi": False}}, r"no ALiBi \(attn_config.alibi is false\)"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, r"within a prefix \(attn_config.prefix_lm\)"),
    ],
)
def test_what_is_not_served_is_named(model_type: str, changes: dict[str, Any], reason: str) -> None:
    sizes = {"num_hidden_layers": 2} if "layer_types" in changes else {}
    config = AutoConfig.for_model(model_type, **sizes, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        family_of(config).check(config)


def test_hybrids_need_the_cache_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "Cache", object)  # transformers before 5.21
    config = AutoConfig.for_model("bamba", num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match=r"recurrent layers, which need transformers 5\.21"):
        family_of(config).check(config)
