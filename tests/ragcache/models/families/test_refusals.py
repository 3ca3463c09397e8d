"""Which properties are refused, and what the refusal says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    Qwen2Config,
    T5Config,
)

from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM
from ragcache.models.families import family_of
from ragcache.models.families.refusals import sliding_window, whole_context
from tests.conftest import tiny_config, tiny_model


def test_every_family_of_the_list_is_served(family: str) -> None:
    config = tiny_config(family)
    family_of(config).check(config)
    assert family_of(config).obstacle(config) is None
    assert sliding_window(config) is None


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    model = tiny_model("mistral", sliding_window=511)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        CausalLM.patch(model)
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
