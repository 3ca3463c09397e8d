"""Weights in 8 and 4 bits: made when a model is loaded, and stored by torchao."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache import RagCache
from ragcache.errors import ConfigurationError, MissingExtra, UnsupportedModel
from ragcache.models import LoadedModel, dtype, load_model
from ragcache.models.compiled import merge_projections
from ragcache.models.model import plain_tensors
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference
from tests.tiny_models import random_tokens, tiny_config, tiny_model

QUANTIZATIONS = ("int8", "int4")
FLOAT: Any = {"dtype": "float32", "states_dtype": "float32"}
ERRORS = {"int8": 0.05, "int4": 0.5}  # of the spread of logits; weights are random
SHARES = {"int8": 0.28, "int4": 0.20}  # of the bytes of float32, scales included

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="the extra `quantized` is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reader: LoadedModel) -> str:
    return saved(tmp_path_factory.mktemp("model"), reader)


@pytest.fixture(scope="module")
def plain(folder: str) -> LoadedModel:
    return load_model(folder, **FLOAT)


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def quantized(request: pytest.FixtureRequest, folder: str) -> tuple[str, LoadedModel]:
    return request.param, load_model(folder, **FLOAT, quantization=request.param)


def saved(folder: Path, reader: LoadedModel, **changes: Any) -> str:
    """A tiny model in bfloat16 with the tokenizer of the reader."""
    words = len(reader.tokenizer)
    tiny_model("qwen3", torch.bfloat16, vocab_size=words, **changes).save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def logits(loaded: LoadedModel) -> Tensor:
    ids = torch.tensor([random_tokens(40)])
    last: Tensor = loaded.causal.model(ids, use_cache=False).logits[0, -1].float()
    return last


def layer_bytes(loaded: LoadedModel) -> int:
    return sum(
        part.nbytes for each in loaded.causal.model.modules()
        if type(each) is torch.nn.Linear and each is not loaded.causal.model.lm_head
        for weight in each.parameters() for _, part in plain_tensors("", weight.detach())
    )  # fmt: skip


@needs_torchao
def test_quantized_weights_are_small_and_answer_alike(
    quantized: tuple[str, LoadedModel], plain: LoadedModel
) -> None:
    name, loaded = quantized
    error = (logits(loaded) - logits(plain)).std() / logits(plain).std()
    assert 0 < float(error) < ERRORS[name]
    assert layer_bytes(loaded) < SHARES[name] * layer_bytes(plain)


@needs_torchao
def test_segments_are_read_as_exactly_as_those_of_any_model(
    quantized: tuple[str, LoadedModel],
) -> None:
    """Moved modules give the logits of the quantized model where they stand."""
    causal = quantized[1].causal
    pieces = [Module(random_tokens(24)), Module(random_tokens(31, seed=1)), random_tokens(9)]
    [cached] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(cached, reference(causal.model, pieces), **CLOSE)


@needs_torchao
def test_keys_follow_from_quantized_weights(
    quantized: tuple[str, LoadedModel], folder: str, plain: LoadedModel
) -> None:
    name, loaded = quantized
    again = load_model(folder, **FLOAT, quantization=name)
    assert again.causal.fingerprint == loaded.causal.fingerprint != plain.causal.fingerprint
    weight = again.causal.model.model.layers[1].mlp.up_proj.weight
    for part in weight.tensor_data_names:  # numbers and scales
        number = getattr(weight, part).view(-1)[:1]
        before = number.clone()
        number.add_(1)
        del again.causal.fingerprint
        assert again.causal.fingerprint != loaded.causal.fingerprint
        number.copy_(before)


@needs_torchao
def test_quantized_projections_stay_apart(folder: str) -> None:
    loaded = load_model(folder, **FLOAT, quantization="int8")
    before = logits(loaded)
    assert merge_projections(loaded.causal) == 0
    torch.testing.assert_close(logits(loaded), before)


@needs_torchao
def test_four_bits_compute_in_bfloat16_unless_it_is_said(folder: str) -> None:
    causal = load_model(folder, quantization="int4").causal
    assert causal.dtype == causal.states_dtype == torch.bfloat16


@pytest.mark.slow
@needs_torchao
def test_a_checkpoint_of_torchao_loads_as_it_was_stored(
    folder: str, tmp_path: Path, reader: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_model(folder, dtype="bfloat16", quantization="int8")
    made.causal.model.save_pretrained(tmp_path)
    reader.tokenizer.save_pretrained(tmp_path)
    stored = load_model(tmp_path)
    assert layer_bytes(stored) == layer_bytes(made)
    torch.testing.assert_close(logits(stored), logits(made), rtol=0, atol=0)
    assert load_model(tmp_path).causal.fingerprint == stored.causal.fingerprint
    with pytest.raises(ConfigurationError, match=r"quantized for bfloat16; leave dtype at auto"):
        load_model(tmp_path, dtype="float32")
    with pytest.raises(ConfigurationError, match=r"stored quantized; leave quantization='int4'"):
        load_model(tmp_path, quantization="int4")
    monkeypatch.setattr(dtype, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[quantized\]'"):
        load_model(tmp_path)


@needs_torchao
def test_a_stored_format_without_a_kernel_here_is_named() -> None:
    from torchao.quantization import Int4Tensor

    from ragcache.models.quantized import check_computes

    model = tiny_model("llama", torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    rows, columns = layer.weight.shape
    scales = torch.ones(columns // 32, rows, dtype=torch.bfloat16)
    packed = torch.zeros(rows, columns // 2, dtype=torch.int8)
    weight = Int4Tensor(packed, scales, scales, [1, 32], layer.weight.shape)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"stored as Int4Tensor, which cpu does not"):
        check_computes(model)


@needs_torchao
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon-7b", "'falcon' are not served with quantized weights: their code reads weights"),
        ("deepseek_v3", "'deepseek_v3' are not served with quantized weights"),
        ("gpt2", "a gpt2 model keeps 100% of its layers' weights in Conv1D"),
        ("qwen3_moe", "a qwen3_moe model keeps .* in Qwen3MoeExperts"),
    ],
)
def test_families_without_quantization_are_refused_unread(
    family: str, reason: str, tmp_path: Path, reader: LoadedModel
) -> None:
    tiny_config(family).save_pretrained(tmp_path)  # and no weights
    reader.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path, quantization="int8")


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[quantized\]'"):
        load_model(quantization="int8")


def test_an_unknown_quantization_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"quantization is 'int2'.*'int8' or 'int4'"):
        RagCache.open(tmp_path, quantization="int2")
