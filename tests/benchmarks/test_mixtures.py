"""The benchmark of mixtures, with a tiny model on a CPU."""

from __future__ import annotations

import pytest
from mixtures import MixtureWorkload, add_floors, measure


@pytest.mark.slow
def test_steps_are_compared_with_the_bytes_they_read() -> None:
    load = MixtureWorkload(
        documents=2, document_tokens=16, preamble_tokens=4, question_tokens=4, requests=2,
        new_tokens=4, counted_tokens=4, runs=1, answers=("sampled",),
    )  # fmt: skip
    found = measure("tiny-deepseek", load, "cpu", lambda _: None, profiled=False)
    add_floors(found, 1000.0)
    assert 2 / 8 <= found["sampled_experts"] <= 4 / 8  # of 8 experts, two for each of two rows
    assert 0 < found["sampled_gb"] < 1.1 * found["weights_gb"] + 0.001
    assert found["sampled_ratio"] == found["sampled_step_ms"] / found["sampled_floor_ms"]
    assert "greedy_ratio" not in found
