"""The number of threads that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragcache import openmp
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.models import CausalLM

VERSION_1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores, and a control group without a quota."""
    monkeypatch.setattr(openmp, "_CGROUP", tmp_path)
    monkeypatch.setattr(openmp.os, "sched_getaffinity", lambda _: range(8), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        (dict(zip(VERSION_1, ("300000", "100000"), strict=True)), 3),
        (dict(zip(VERSION_1, ("-1", "100000"), strict=True)), 8),
    ],
)
def test_a_quota_bounds_the_cores(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert openmp.available_cores() == cores


@pytest.mark.parametrize(("given", "expected"), [(None, 2), ("3", 3)])
def test_an_engine_takes_the_cores_of_its_quota(
    causal: CausalLM,
    given: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the environment says how many threads there are."""
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LLMEngine(causal, EngineConfig(2**20)):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_processes_of_one_model_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        openmp.fit_threads(3)
        assert torch.get_num_threads() == 2
        openmp.fit_threads(100)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
