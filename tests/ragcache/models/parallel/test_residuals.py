"""Compiled sums add the residual and normalize: the logits of layers that are not compiled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ragcache.models import wrap_causal
from ragcache.models.compiled import compile_layers
from ragcache.models.hf_patch import number_layers
from ragcache.models.parallel.collectives import Norm
from ragcache.models.parallel.plans import attach, shard_model
from ragcache.models.parallel.residuals import sums_add_residuals
from tests.ragcache.models.test_compiled import OwnTokens, run_step
from tests.tiny_models import tiny_model

LAYERS = 3


class TwinCollectives:
    """Sums with another rank that has the same part."""

    rank, ranks, alone = 0, 2, False

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def sum_products(
        self, hidden: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        self.calls["plain" if residual is None else "added"] += 1
        total = 2 * functional.linear(hidden, weight)
        return total if residual is None else residual + total

    def sum_and_normalize(
        self, hidden: Tensor, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        self.calls["normalized"] += 1
        total = residual + 2 * functional.linear(hidden, weight)
        return total, norm.normalize(total)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16)])
def test_residuals_and_norms_are_given_to_compiled_sums(family: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = tiny_model(family, num_hidden_layers=LAYERS).to(dtype)
    shard, _ = shard_model(model, 0, 2)
    collectives: Any = TwinCollectives()
    attach(shard, collectives)
    causal = wrap_causal(shard)
    tokens = list(range(5, 16))
    number_layers(causal.model)
    expected = run_step(causal, OwnTokens(), tokens)
    collectives.calls.clear()
    with sums_add_residuals():
        assert compile_layers(causal)
    collectives.calls.clear()
    found = run_step(causal, OwnTokens(), tokens)
    assert collectives.calls == Counter(["normalized", "added"] * LAYERS)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
