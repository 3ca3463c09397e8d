"""Fingerprints: what changes states changes the digest, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache.models import LoadedModel, wrap_causal
from ragcache.models.fingerprint import SAMPLES, model_fingerprint, tokenizer_fingerprint
from tests.conftest import tiny_model


def test_the_same_model_has_the_same_fingerprint(family: str) -> None:
    assert model_fingerprint(tiny_model(family)) == model_fingerprint(tiny_model(family))


def test_patching_changes_no_fingerprint(family: str) -> None:
    model = tiny_model(family)
    before = model_fingerprint(model)
    assert wrap_causal(model).fingerprint == before


@pytest.mark.parametrize("where", [0, 1, 12_345])
def test_one_changed_element_changes_the_fingerprint(where: int) -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    weight = model.model.embed_tokens.weight
    assert weight.numel() > 10 * SAMPLES, "so that most elements are only in the sum"
    with torch.no_grad():
        weight.view(-1)[where] += 1e-3
    assert model_fingerprint(model) != before


def test_exchanged_layers_change_the_fingerprint() -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    assert model_fingerprint(model) != before


def test_another_dtype_changes_the_fingerprint() -> None:
    digests = {
        model_fingerprint(tiny_model("llama", dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"max_position_embeddings": 1024},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_over_the_same_weights_changes_the_fingerprint(
    change: dict[str, Any],
) -> None:
    plain, changed = tiny_model("llama"), tiny_model("llama", **change)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, changed.state_dict()[name])
    assert model_fingerprint(plain) != model_fingerprint(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_changes_no_fingerprint(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family, dtype)
    before = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model_fingerprint(loaded) == before
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert wrap_causal(again).fingerprint == before


def test_a_tokenizer_keeps_its_fingerprint_through_saving(
    tmp_path: Path, reader: LoadedModel
) -> None:
    reader.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint


def test_an_added_token_changes_the_fingerprint_of_a_tokenizer(
    tmp_path: Path, reader: LoadedModel
) -> None:
    reader.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.add_tokens(["quayside"])
    assert tokenizer_fingerprint(loaded) != reader.tokenizer_fingerprint


def test_using_a_tokenizer_changes_no_fingerprint(tmp_path: Path, reader: LoadedModel) -> None:
    reader.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.encode("<|end|>", split_special_tokens=True)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint
    loaded(["one", "two and three"], padding=True, truncation=True, max_length=8)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint


def test_without_a_serialized_form_tokens_count_with_their_ids() -> None:
    """Slow tokenizers tell their vocabulary only."""

    def slow(vocabulary: dict[str, int]) -> str:
        return tokenizer_fingerprint(SimpleNamespace(get_vocab=lambda: vocabulary))

    assert slow({"a": 0, "b": 1}) == slow({"b": 1, "a": 0})
    assert slow({"a": 0, "b": 1}) != slow({"a": 1, "b": 0})
