"""The comparison of fp8 with bfloat16, on a tiny model."""

from __future__ import annotations

import fp8
import pytest
import torch

from tests.tiny_models import random_tokens, tiny_model


def test_rounded_weights_move_probabilities_a_little() -> None:
    model = tiny_model("llama", torch.bfloat16, initializer_range=0.1)
    windows = [random_tokens(24, seed=n) for n in range(2)]
    exact = fp8.log_probabilities(model, windows)
    found = fp8.compare(model, windows, torch.device("cpu"))
    assert found["tokens"] == 2 * 23
    expected = [-exact[n][at, windows[n][at + 1]] for n in range(2) for at in range(23)]
    assert found["bfloat16_nll"] == pytest.approx(float(torch.stack(expected).mean()))
    assert 0 < abs(found["fp8_nll"] - found["bfloat16_nll"]) < 0.5
    assert 0 < found["kl_mean"] < found["kl_p99"] < 1
    assert 0.5 < found["same_likeliest"] <= 1
