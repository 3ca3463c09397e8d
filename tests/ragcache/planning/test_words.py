"""Figures in words."""

from __future__ import annotations

import pytest

from ragcache.config import parse_bytes
from ragcache.planning.words import bandwidth, percent, setting, span


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(2e-5, "20 µs"), (0.0123, "12.3 ms"), (5, "5.0 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_times_are_said_in_their_unit(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_rates_and_shares_keep_what_matters() -> None:
    assert [bandwidth(b) for b in (1.234e9, 1.2e7, 7.2e5)] == ["1,234 MB/s", "12 MB/s", "0.72 MB/s"]
    assert [percent(s) for s in (1.0, 0.126, 0.0042, 0)] == ["100%", "13%", "0.42%", "0%"]


@pytest.mark.parametrize("nbytes", [3, 1_500_000, 2**30, 10**11])
def test_a_setting_holds_what_it_is_for(nbytes: int) -> None:
    assert nbytes <= parse_bytes(setting(nbytes)) <= nbytes * 1.1 + 2**20
