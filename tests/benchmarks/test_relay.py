"""Attention alone: that it runs, adds up and is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from relay import RelaySetting, bench_relay, plot_relay

SETTING = RelaySetting((2,), (16, 32), own=8, num_heads=4, num_kv_heads=2, head_dim=8, runs=2)


def test_the_theory_is_relay_attentions(tmp_path: Path) -> None:
    result = {"relay": bench_relay(SETTING)}
    assert [(row["batch"], row["shared"]) for row in result["relay"]] == [(2, 16), (2, 32)]
    row = result["relay"][1]
    assert row["theory"] == pytest.approx((32 + 8 + 2) / (32 / 2 + 8 + 7))
    assert row["measured_over_theory"] == pytest.approx(row["speedup"] / row["theory"])
    json.dumps(result)
    plot_relay(result, tmp_path / "relay.png")
    assert (tmp_path / "relay.png").read_bytes().startswith(b"\x89PNG")
