"""Hit rates: caches of a few places against what can be counted by hand; victims."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from eviction import (
    ZipfWorkload,
    belady,
    bench_hit_rate,
    bench_victims,
    encoding_saved,
    prefix,
)
from hypothesis import given
from hypothesis import strategies as st

from ragcache.store.eviction import POLICIES

SMALL = ZipfWorkload(documents=60, prompts=400, budget=0.2)


def test_the_optimum_bounds_every_policy_and_a_prefix_cache_stays_below() -> None:
    rates = bench_hit_rate(SMALL)["hit_rate"]
    assert set(rates) == {*POLICIES, "belady", "prefix", "prefix_sorted"}
    for policy in POLICIES:
        assert 0 < rates["prefix"] < rates[policy] <= rates["belady"] < 1
    assert rates["prefix"] <= rates["prefix_sorted"]


def test_prompts_hold_different_documents_and_the_first_ranks_most_often() -> None:
    drawn = SMALL.draw()
    assert drawn.shape == (400, 4)
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    counts = np.bincount(drawn.ravel(), minlength=60)
    assert counts[0] == counts.max()
    assert counts[:10].sum() > counts[10:].sum() / 2
    assert (drawn == SMALL.draw()).all()


def test_lru_by_hand() -> None:
    """Two places: 0 1 | 0 2 drops 1 | 1 0 drops 2 | 2 1 drops 0. Found: 0, 0, 1."""
    prompts = np.array([[0, 1], [0, 2], [1, 0], [2, 1]])
    assert encoding_saved(prompts, "lru", np.ones(3, np.int64), 2) == 3 / 8


def test_belady_by_hand() -> None:
    """Two places, one a prompt: 0 1 2 0 1: 2 is never asked for again and does not stay."""
    assert belady(np.array([[0], [1], [2], [0], [1]]), 2) == 2 / 5


def test_a_prefix_is_found_only_from_the_start_and_in_order() -> None:
    prompts = np.array([[0, 1], [0, 1], [1, 0], [0, 2], [2, 1]])
    assert prefix(prompts, 100) == 3 / 10


def test_the_leaf_that_was_used_least_recently_goes() -> None:
    """Three places: 0 1, then 0 2 fill them; 3 4 leaves 0 only, if leaves go first."""
    assert prefix(np.array([[0, 1], [0, 2], [3, 4], [0, 1]]), 3) == pytest.approx(2 / 8)


def optimum(prompts: list[int], places: int) -> int:
    """The most hits of any policy, by trying all of them."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for number in prompts:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = hits + (number in held)
            everything = held | {number}
            size = min(places, len(everything))
            for kept in itertools.combinations(sorted(everything), size):
                name = frozenset(kept)
                following[name] = max(following.get(name, 0), found)
        states = following
    return max(states.values())


@given(prompts=st.lists(st.integers(0, 4), min_size=1, max_size=9), places=st.integers(1, 3))
def test_belady_is_the_optimum(prompts: list[int], places: int) -> None:
    found = belady(np.array(prompts)[:, None], places)
    assert round(found * len(prompts)) == optimum(prompts, places)


def test_victims_are_timed_under_every_policy() -> None:
    assert set(bench_victims(500, runs=1)) == set(POLICIES)
