"""The registry: what is served, what is not, and a family of a user's own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GPTJConfig

from ragcache.engine import Request
from ragcache.engine.offline import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, RotaryFamily, register
from ragcache.models.families import family_of, registry, served_types
from tests.conftest import random_tokens, tiny_config
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference

TYPES = (
    "bloom, falcon, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mpt, opt, phi, "
    "phi3, qwen2, qwen3"
)


class Cohere(RotaryFamily):
    """What a user writes: interleaved rotary positions, and logits scaled by the model's head."""

    model_types = ("cohere",)
    interleaved = True


@pytest.fixture
def cohere(monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    register(Cohere())
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
    return CausalLM.patch(AutoModelForCausalLM.from_config(config).eval())


def test_a_family_of_ones_own_is_served_from_end_to_end(cohere: CausalLM) -> None:
    assert cohere.scheme.name == "rotary:default:8:interleaved"
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    context = prompt(cohere, pieces)
    [logits] = last_logits(cohere, [context])
    expected = reference(cohere.model, pieces)
    torch.testing.assert_close(logits, expected, **CLOSE)
    [completion] = complete(cohere, [Request(context, 1, frozenset())])
    assert completion.token_ids[0] == int(expected.argmax())


def test_interleaved_keys_do_not_move_as_halves(
    cohere: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cohere, "interleaved", False)
    halves = CausalLM.patch(cohere.model)
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(halves, [prompt(halves, pieces)])
    assert not torch.allclose(logits, reference(cohere.model, pieces), **CLOSE)


def test_every_type_of_the_list_has_a_family(family: str) -> None:
    config = tiny_config(family)
    assert config.model_type in family_of(config).model_types


def test_an_unknown_type_is_refused_by_its_name_and_told_of_the_registry() -> None:
    assert ", ".join(served_types()) == TYPES
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
        CausalLM.patch(model)
    assert model.config._attn_implementation == before
    assert model.training
