"""Prepared models on a GPU: the numbers of eager modules, inside and outside of a CUDA graph."""

from __future__ import annotations

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
from ragcache.models.hf_patch import number_layers
from ragcache.models.projections import merge_projections
from tests.ragcache.attention.triton.own_tokens import OwnTokens
from tests.tiny_models import FAMILIES, random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROW_COUNTS = (2, 64, 96, 700)
SHAPE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


def on_gpu(model: Any) -> CausalLM:
    causal = wrap_causal(model.to("cuda"))
    number_layers(causal.model)
    return causal


def batch_of(step: OwnTokens, rows: int) -> ForwardBatch:
    tokens = torch.tensor(random_tokens(rows), device="cuda")
    positions, wanted = torch.arange(rows, device="cuda"), torch.tensor([rows - 1], device="cuda")
    return ForwardBatch(tokens, positions, wanted, OperatorMetadata(register_step(step)))


def logits(causal: CausalLM) -> list[Tensor]:
    step = OwnTokens()
    return [causal.forward(batch_of(step, rows)).float() for rows in ROW_COUNTS]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = 1e-3 if dtype == torch.float32 else 1e-2
    assert (got - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_and_merged_equals_eager_in_float32(family: str, dtype: torch.dtype) -> None:
    sizes = {"max_position_embeddings": 1024}
    expected = logits(on_gpu(tiny_model(family, dtype, **sizes).float()))
    causal = on_gpu(tiny_model(family, dtype, **sizes))
    prepare_for_device(causal)
    assert isinstance(decoder_layers(causal)[0].forward, CompiledForward)
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
