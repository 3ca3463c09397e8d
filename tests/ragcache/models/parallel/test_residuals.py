"""Sums of compiled layers add the residual: the logits of layers that are not compiled."""

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
from ragcache.models.parallel.plans import attach, shard_model
from ragcache.models.parallel.residuals import sums_add_residuals
from tests.ragcache.models.test_compiled import OwnTokens, run_step
from tests.tiny_models import tiny_model

LAYERS = 3


class TwinCollectives:
    """Sums with another rank that has the same part."""

    rank, ranks, alone = 0, 2, False

    def __init__(self) -> None:
        self.calls = Counter[bool]()

    def sum_products(
        self, hidden: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        self.calls[residual is not None] += 1
        total = 2 * functional.linear(hidden, weight)
        return total if residual is None else residual + total


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_residuals_are_given_to_the_sums_of_compiled_layers(family: str) -> None:
    torch._dynamo.reset()
    model = tiny_model(family, num_hidden_layers=LAYERS)
    shard, _ = shard_model(model, 0, 2)
    collectives: Any = TwinCollectives()
    attach(shard, collectives)
    causal = wrap_causal(shard)
    causal.whole_layers = True
    tokens = list(range(5, 16))
    number_layers(causal.model)
    expected = run_step(causal, OwnTokens(), tokens)
    collectives.calls.clear()
    with sums_add_residuals():
        assert compile_layers(causal)
    collectives.calls.clear()
    found = run_step(causal, OwnTokens(), tokens)
    assert collectives.calls == {True: 2 * LAYERS}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
