"""What is timed, how often, and how much memory a process may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragcache import machine
from ragcache.machine import available_memory, linear_seconds, product_dtype

MEBIBYTE = 2**20


def test_a_size_is_timed_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(machine, "_shortest", lambda run: runs.append(run) or 0.5)
    linear_seconds.cache_clear()
    try:
        assert {linear_seconds(48, 32, torch.float32) for _ in range(3)} == {0.5}
        assert linear_seconds(48, 32, torch.bfloat16) == 0.5
        assert len(runs) == 2
        assert runs[1]().shape == (machine.ROWS, 48)
        linear_seconds(10**6, 16, torch.bfloat16)
        assert runs[2]().shape == (machine.ROWS, machine.SIDE), "no more than a part"
    finally:
        linear_seconds.cache_clear()


def test_times_are_those_of_this_machine() -> None:
    assert 0 < linear_seconds(64, 64, torch.float32) < 1
    assert product_dtype(torch.bfloat16) in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "slower", "expected"),
    [
        (torch.bfloat16, 30.0, torch.float32),
        (torch.bfloat16, 1.0, torch.bfloat16),
        (torch.bfloat16, 0.3, torch.bfloat16),
        (torch.float16, 0.3, torch.float32),
        (torch.float32, 30.0, torch.float32),
        (torch.float64, 30.0, torch.float64),
    ],
)
def test_products_avoid_a_slow_bfloat16_and_any_float16(
    dtype: torch.dtype, slower: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.bfloat16: slower, torch.float32: 1.0}
    monkeypatch.setattr(machine, "product_seconds", seconds.__getitem__)
    assert product_dtype(dtype) == expected


def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    free = available_memory()
    assert free > 0
    (tmp_path / "memory.max").write_text(f"{10 * MEBIBYTE}\n")
    (tmp_path / "memory.current").write_text(f"{8 * MEBIBYTE}\n")
    (tmp_path / "memory.stat").write_text(f"anon 77\ninactive_file {3 * MEBIBYTE}\n")
    assert available_memory() == 5 * MEBIBYTE, "files that were read can be dropped"
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 10 * MEBIBYTE
