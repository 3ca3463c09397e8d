"""Where loading becomes quicker than computing."""

from __future__ import annotations

import pytest

from ragcache.planning import break_even_bandwidth, break_even_tokens

LENGTHS = [10, 20, 40]


@pytest.mark.parametrize(
    ("compute", "load", "tokens"),
    [
        ([1.0, 2.0, 4.0], [0.5, 0.5, 0.5], 10.0),  # quicker at all: the shortest
        ([1.0, 2.0, 4.0], [1.5, 1.5, 1.5], 15.0),  # half-way between -0.5 and +0.5
        ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0], pytest.approx(20 + 20 / 2)),
        ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], None),
        ([1.0, 2.0, 4.0], [0.5, 3.0, 3.0], 30.0),  # an early win does not count
        ([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], 10.0),
    ],
)
def test_the_crossing_is_found_from_the_longest_module_down(
    compute: list[float], load: list[float], tokens: float | None
) -> None:
    assert break_even_tokens(LENGTHS, compute, load) == tokens


def test_nothing_measured_is_no_break_even() -> None:
    assert break_even_tokens([], [], []) is None


def test_bandwidth_is_bytes_over_the_time_of_computing_them() -> None:
    assert break_even_bandwidth(3_000_000, 0.5) == 6_000_000
