"""Which modules of a corpus are measured."""

from __future__ import annotations

from ragcache.planning.measure import choose_sample


def test_a_sample_is_spread_over_the_lengths() -> None:
    assert choose_sample([30, 10, 20], 3) == [1, 2, 0]
    assert choose_sample([30, 10, 20], 9) == [1, 2, 0]
    assert choose_sample([5, 1, 4, 2, 3, 6], 2) == [3, 0]
    assert choose_sample(list(range(100)), 4) == [12, 37, 62, 87]
