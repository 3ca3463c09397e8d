"""Prepared models on a GPU: the numbers of eager modules, inside and outside of a CUDA graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.attention.triton.operator import OperatorMetadata, register_step
from ragcache.models import CausalLM, ForwardBatch, wrap_causal
from ragcache.models.compiled import (
    CompiledForward,
    decoder_layers,
    no_recompiles,
    prepare_for_device,
)
from ragcache.models.fp8 import Fp8Linear, quantize_fp8
from ragcache.models.hf_patch import number_layers
from ragcache.models.projections import merge_projections
from tests.ragcache.attention.triton.own_tokens import OwnTokens
from tests.ragcache.models.reference import tiny_gemma
from tests.tiny_models import FAMILIES, random_tokens, tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
ROW_COUNTS = (2, 64, 96, 700)
SHAPE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


def model_of(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    if family.startswith("gemma"):
        return tiny_gemma(family, **sizes).to(dtype)
    return tiny_model(family, dtype, **sizes)


def on_gpu(model: Any) -> CausalLM:
    causal = wrap_causal(model.to("cuda"))
    number_layers(causal.model)
    return causal


def batch_of(step: OwnTokens, rows: int, softcap: float | None = None) -> ForwardBatch:
    tokens = torch.tensor(random_tokens(rows), device="cuda")
    positions, wanted = torch.arange(rows, device="cuda"), torch.tensor([rows - 1], device="cuda")
    metadata = OperatorMetadata(register_step(step), softcap)
    return ForwardBatch(tokens, positions, wanted, metadata)


def logits(causal: CausalLM) -> list[Tensor]:
    step = OwnTokens()
    batches = (batch_of(step, rows, causal.softcap) for rows in ROW_COUNTS)
    return [causal.forward(batch).float() for batch in batches]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = 1e-3 if dtype == torch.float32 else 1e-2
    assert (got - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *product(FAMILIES, [torch.float32, torch.bfloat16]),
        ("gemma2", torch.float32),  # the tiny one's weights are too large for sums of short numbers
        ("gemma3", torch.float32),
    ],
    ids=str,
)
def test_compiled_and_merged_equals_eager_in_float32(family: str, dtype: torch.dtype) -> None:
    sizes = {"max_position_embeddings": 1024}
    expected = logits(on_gpu(model_of(family, dtype, **sizes).float()))
    causal = on_gpu(model_of(family, dtype, **sizes))
    prepare_for_device(causal)
    assert isinstance(decoder_layers(causal)[0].forward, CompiledForward)
    assert torch.backends.cuda.preferred_blas_library().name == "Cublaslt"
    with no_recompiles():
        for ours, theirs in zip(logits(causal), expected, strict=True):
            assert_near(ours, theirs, dtype)


def test_a_captured_step_equals_the_eager_one() -> None:
    causal, step = on_gpu(tiny_model("llama", torch.bfloat16, **SHAPE, head_dim=64)), OwnTokens()
    batch = batch_of(step, 64)
    expected = causal.forward(batch)
    prepare_for_device(causal)
    causal.forward(batch)
    graph = torch.cuda.CUDAGraph()
    with no_recompiles(), torch.cuda.graph(graph):
        out = causal.forward(batch)
    with torch.inference_mode():
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_near(out.float(), expected.float(), torch.bfloat16)


def test_merging_leaves_the_memory_of_the_model() -> None:
    causal = on_gpu(tiny_model("llama", **SHAPE, intermediate_size=1024))
    assert causal.fingerprint
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    merge_projections(causal)
    largest = 2 * 1024 * 256 * 4
    assert torch.cuda.memory_allocated() <= before + 2**16
    assert torch.cuda.max_memory_allocated() <= before + largest + 2**16


def test_weights_in_fp8_are_compiled_and_answer_alike(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**SHAPE, "max_position_embeddings": 1024}
    expected = logits(on_gpu(model_of("llama", torch.bfloat16, **sizes).float()))
    model = model_of("llama", torch.bfloat16, **sizes).to("cuda")
    layers = quantize_fp8(model, model.get_output_embeddings(), torch.device("cuda"))
    assert layers == 7 * sizes["num_hidden_layers"]
    causal = on_gpu(model)
    eager = logits(causal)
    prepare_for_device(causal)
    found = logits(causal)
    assert "cannot be compiled" not in caplog.text
    for ours, theirs, exact in zip(found, eager, expected, strict=True):
        assert (ours - theirs).norm() <= 5e-2 * exact.norm()
        assert 0 < (ours - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_fp8_is_that_of_its_numbers(*, bias: bool) -> None:
    weight = torch.randn(512, 256, device="cuda")
    layer = Fp8Linear.pack(weight, torch.randn(512, device="cuda") if bias else None)
    for rows in (1, 2, 17, 300):
        hidden = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        exact = torch.nn.functional.linear(
            hidden.float(), layer.restored(torch.float32), layer.bias
        )
        found = layer(hidden).float()
        assert (found - exact).norm() <= 5e-2 * exact.norm()
