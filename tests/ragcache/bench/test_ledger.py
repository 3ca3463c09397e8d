"""The bench of the ledger, on a small store."""

from __future__ import annotations

from pathlib import Path

from ragcache.bench.ledger import bench_ledger


def test_the_ledger_is_measured_on_a_store_that_was_opened_again(tmp_path: Path) -> None:
    figures = bench_ledger(tmp_path, modules=150, requests=5)
    assert set(figures) == {"ledger_ms_p50", "open_s"}
    assert all(value > 0 for value in figures.values())
    assert len(list(tmp_path.glob("states/??/*.safetensors"))) == 150, "opening lost nothing"
