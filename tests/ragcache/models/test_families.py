"""Which models are served, and what the refusal of the others says."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM
from ragcache.models.families import check_supported, sliding_window
from tests.conftest import tiny_config, tiny_model


def test_every_family_of_the_list_is_served(family: str) -> None:
    check_supported(tiny_config(family))
    assert sliding_window(tiny_config(family)) is None


def test_another_family_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_supported(GPT2Config())
    assert str(caught.value) == (
        "models of type 'gpt2' are not served; served types: llama, mistral, qwen2, qwen3"
    )


def test_a_refused_model_is_left_as_it_was() -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes)).train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        CausalLM.patch(model)
    assert model.config._attn_implementation == before
    assert model.training


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    model = tiny_model("mistral", sliding_window=511)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        CausalLM.patch(model)
    assert "mistral model attends through a sliding window of 511 tokens" in str(caught.value)
    assert "its context of 512" in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("window", [512, 4096])
def test_a_sliding_window_as_long_as_the_context_is_served(window: int) -> None:
    config = tiny_config("mistral", sliding_window=window)
    assert sliding_window(config) == window
    check_supported(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_switched_off_does_not_count(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=False)
    assert sliding_window(config) is None
    check_supported(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_some_layers_use_is_refused(family: str) -> None:
    config = tiny_config(family, sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModel, match="sliding window of 64 tokens"):
        check_supported(config)


def test_a_window_that_no_layer_uses_does_not_count() -> None:
    config = tiny_config("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert isinstance(config, Qwen2Config)
    assert config.layer_types == ["full_attention", "full_attention"]
    assert sliding_window(config) is None
    check_supported(config)
