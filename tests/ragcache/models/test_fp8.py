"""Weights in fp8: rounding, products, and families that are served with them."""

from __future__ import annotations

import pytest
import torch

from ragcache.errors import ConfigurationError, UnsupportedModel
from ragcache.models import wrap_causal
from ragcache.models.dtype import check_quantization
from ragcache.models.fp8 import LARGEST, NUMBERS, Fp8Linear, quantize_fp8, rounded
from ragcache.models.model import model_fingerprint
from ragcache.models.projections import ProjectionSlice, merge_projections
from ragcache.models.quantized_trial import check_family
from tests.tiny_models import random_tokens, tiny_model

CPU = torch.device("cpu")


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(sizes).normal_(generator=generator)


def test_rows_are_rounded_to_the_nearest_numbers_of_their_scales() -> None:
    rows = drawn(5, 64)
    rows[1] *= 1e4
    rows[2] *= 1e-6
    rows[3] = 0
    numbers, scales = rounded(rows)
    assert numbers.dtype == NUMBERS
    assert scales.shape == (5, 1)
    restored = numbers.float() * scales
    assert torch.equal(restored[3], rows[3])
    largest = rows.abs().amax(1, keepdim=True)
    step = torch.maximum(rows.abs() / 16, largest / LARGEST * 2**-9)  # three bits, or subnormal
    assert bool(((restored - rows).abs() <= step * 1.001).all())
    assert torch.allclose(numbers[4].float().abs().max(), torch.tensor(LARGEST))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(*, bias: bool) -> None:
    weight, rows = drawn(48, 64), drawn(7, 64, seed=1).bfloat16()
    layer = Fp8Linear.pack(weight, drawn(48, seed=2) if bias else None)
    numbers, scales = rounded(rows)
    expected = (numbers.float() * scales) @ layer.restored(torch.float32).t()
    found = layer.multiply(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=5e-2)
    exact = torch.nn.functional.linear(rows.float(), layer.restored(torch.float32), layer.bias)
    assert torch.equal(layer(rows.float()), exact)


def test_numbers_keep_their_type_when_a_layer_is_converted() -> None:
    layer = Fp8Linear.pack(drawn(32, 16), drawn(32, seed=1))
    numbers = layer.weight.clone()
    layer.to(torch.bfloat16)
    assert layer.bias is not None
    assert (layer.weight.dtype, layer.scales.dtype) == (NUMBERS, torch.float32)
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight.view(torch.uint8), numbers.view(torch.uint8))


@torch.inference_mode()
def test_layers_are_rounded_and_merged_later() -> None:
    model = tiny_model("llama", intermediate_size=128)
    ids = torch.tensor([random_tokens(24)])
    exact = model(ids, use_cache=False).logits
    before = model_fingerprint(model)
    count = quantize_fp8(model, model.get_output_embeddings(), CPU)
    assert count == 7 * model.config.num_hidden_layers
    assert type(model.lm_head) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.down_proj, Fp8Linear)
    rounded_logits = model(ids, use_cache=False).logits
    error = (rounded_logits - exact).std() / exact.std()
    assert 0 < float(error) < 0.1
    assert model_fingerprint(model) != before
    assert merge_projections(wrap_causal(model)) == 2 * model.config.num_hidden_layers
    assert isinstance(model.model.layers[0].mlp.gate_proj, ProjectionSlice)
    merged = model(ids, use_cache=False).logits
    torch.testing.assert_close(merged, rounded_logits, rtol=1e-4, atol=1e-5)


def test_families_are_tried_with_rounded_weights() -> None:
    model = tiny_model("llama")
    check_family(type(model), model.config, "fp8")
    gpt2 = tiny_model("gpt2")
    with pytest.raises(UnsupportedModel, match="leave quantization out"):
        check_family(type(gpt2), gpt2.config, "fp8")


def test_a_device_without_the_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"8\.9 or later, and not by cpu"):
        check_quantization("fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigurationError, match=r"not by NVIDIA A100 \(cuda:0\)"):
        check_quantization("fp8", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_quantization("fp8", torch.device("cuda:0"))
    with pytest.raises(ConfigurationError, match="quantization='fp8' or leave it out"):
        check_quantization("int8", torch.device("cuda:0"))
