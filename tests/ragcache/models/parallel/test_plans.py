"""Plans: what a rank has of each layer, and models that are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ragcache.errors import UnsupportedModel
from ragcache.models import LoadedModel
from ragcache.models.checkpoint import text_class
from ragcache.models.parallel.plans import (
    HeadParts,
    RowParallel,
    check_model,
    check_split,
    shard_model,
)
from tests.tiny_models import LATENT, tiny_config, tiny_model


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_all_ranks_are_the_whole(ranks: int) -> None:
    whole = tiny_model("qwen2", vocab_size=321)
    before = copy.deepcopy(whole.state_dict())
    parts = [shard_model(whole, rank, ranks)[0] for rank in range(ranks)]
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, before[name]), "the whole stays as it was"
        here = [part.state_dict()[name] for part in parts]
        if any(kind in name for kind in ("k_proj", "v_proj")) and ranks == 4:  # two key heads
            assert torch.equal(torch.cat(here[::2]), weight)
            assert torch.equal(here[0], here[1])
        elif "o_proj.weight" in name or "down_proj.weight" in name:
            assert torch.equal(torch.cat(here, 1), weight)
        elif "proj" in name or "lm_head" in name:
            assert torch.equal(torch.cat(here), weight)
        else:
            assert all(torch.equal(each, weight) for each in here)
    layer = parts[0].model.layers[0]
    assert isinstance(layer.self_attn.o_proj, RowParallel)
    assert isinstance(layer.mlp.down_proj, RowParallel)
    assert parts[0].config.num_attention_heads == whole.config.num_attention_heads // ranks
    assert whole.config.num_attention_heads == 4


def test_a_tied_head_is_a_part_of_the_embedding() -> None:
    whole = tiny_model("llama", tie_word_embeddings=True)
    part, _ = shard_model(whole, 1, 2)
    embedding, head = part.get_input_embeddings().weight, part.get_output_embeddings().weight
    assert embedding.shape[0] == 2 * head.shape[0]
    assert head.data_ptr() == embedding[head.shape[0] :].data_ptr()


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_key_heads_are_split_or_repeated(
    heads: int, ranks: int, expected: list[tuple[int, int]]
) -> None:
    parts = HeadParts(12 * heads, heads, ranks)
    assert [parts.key_heads(rank) for rank in range(ranks)] == [slice(*each) for each in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon-7b": ({}, "have no plan"),
    "gpt2": ({}, "have no plan"),
    LATENT: ({}, "keep latents"),
    "qwen3_moe": ({}, "moe_tp_experts"),
    "llama": (
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
        "3 query heads",
    ),
    "qwen2": ({"intermediate_size": 97}, "layer of 97"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_without_weights(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, reason = REFUSED[family]
    config = tiny_config(family, **changes)
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor)
    with pytest.raises(UnsupportedModel, match=r"tensor_parallel=2") as caught:
        check_split(text_class(config), config, 2)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("qwen3_next", "recurrent layers"), ("gemma4_text", "heads of two sizes")],
)
def test_states_of_other_shapes_are_refused(model_type: str, reason: str) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=6)
    with pytest.raises(UnsupportedModel, match=f"{model_type} models have {reason}"):
        check_split(text_class(config), config, 2)


def test_norms_over_all_heads_are_refused() -> None:
    config = AutoConfig.for_model(
        "cohere", use_qk_norm=True, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="weights over all heads"):
        check_split(text_class(config), config, 2)


def test_packed_weights_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = nn.Identity()
    with pytest.raises(UnsupportedModel, match=r"packed weights .*layers\.1\.mlp\.up_proj"):
        check_model(model, 2)


def test_layers_of_other_names_than_in_the_plan_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.base_model_prefix = ""
    with pytest.raises(UnsupportedModel, match="no layers of the names in their plan"):
        check_model(model, 2)


def test_the_embedded_reader_is_refused(reader: LoadedModel) -> None:
    with pytest.raises(UnsupportedModel, match="embedded reader runs in one process"):
        check_model(reader.causal.model, 2)


def test_a_layer_beside_the_plan_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.model.layers[0].mlp.gate = nn.Linear(64, 4)
    with pytest.raises(UnsupportedModel, match=r"does not split \(layers\.0\.mlp\.gate\)"):
        check_model(model, 2)
