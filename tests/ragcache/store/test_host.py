"""The host tier: a budget that holds, leases that pin."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import StoreBudgetExceeded
from ragcache.store import HostTier
from tests.ragcache.store.conftest import TOKEN_BYTES, make_key, make_states, same

numbers = st.integers(0, 6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), numbers),
        st.tuples(st.just("get"), numbers),
        st.tuples(st.just("drop"), numbers),
        st.tuples(st.just("lease"), numbers),
        st.tuples(st.just("release"), numbers),
    ),
    max_size=40,
)


def tier_of(tokens: int) -> HostTier:
    return HostTier(tokens * TOKEN_BYTES)


@given(steps=steps, budget=st.integers(0, 12))
@settings(deadline=None)
def test_whatever_happens_the_budget_holds_and_leases_pin(
    steps: list[tuple[str, int]], budget: int
) -> None:
    tier = tier_of(budget)
    held: set[int] = set()
    leases: Counter[int] = Counter()
    for action, number in steps:
        key, states = make_key(number), make_states(number, tokens=1 + number % 4)
        if action == "put":
            pinned = sum(1 + n % 4 for n in held if leases[n])
            fits = number in held or pinned + 1 + number % 4 <= budget
            if fits:
                victims = tier.put(key, states)
                held = {n for n in held if make_key(n) not in victims} | {number}
            else:
                with pytest.raises(StoreBudgetExceeded):
                    tier.put(key, states)
        elif action == "get":
            assert (tier.get(key) is not None) == (number in held)
        elif action == "drop":
            tier.drop(key)
            held.discard(number)
        elif action == "lease":
            tier.lease([key])
            leases[number] += 1
        elif leases[number]:
            tier.release([key])
            leases[number] -= 1
        assert {n for n in range(7) if make_key(n) in tier} == held
        assert tier.used_bytes == sum(e.nbytes for e in tier.entries()) <= tier.budget_bytes
        assert {e.key for e in tier.entries() if e.leased} == {
            make_key(n) for n in held if leases[n]
        }


def test_what_was_put_is_what_is_found() -> None:
    tier = tier_of(4)
    tier.put(make_key(1), make_states(1, 2))
    assert same(tier.get(make_key(1)), make_states(1, 2))
    assert tier.get(make_key(2)) is None
    assert (len(tier), tier.used_bytes) == (1, 2 * TOKEN_BYTES)


def test_a_get_saves_from_the_next_eviction() -> None:
    tier = tier_of(2)
    for number in (1, 2):
        tier.put(make_key(number), make_states(number))
    tier.get(make_key(1))
    assert tier.put(make_key(3), make_states(3)) == (make_key(2),)
    assert tier.evictions == 1


def test_a_put_of_what_is_there_saves_it_and_evicts_nothing() -> None:
    tier = tier_of(2)
    for number in (1, 2, 1):
        assert tier.put(make_key(number), make_states(number)) == ()
    assert tier.put(make_key(3), make_states(3)) == (make_key(2),)


def test_a_key_leased_twice_stays_pinned_until_both_are_released() -> None:
    tier = tier_of(1)
    key, other = make_key(1), make_key(2)
    tier.lease([key, key])
    tier.put(key, make_states(1))
    tier.release([key])
    with pytest.raises(StoreBudgetExceeded):
        tier.put(other, make_states(2))
    tier.release([key])
    assert tier.put(other, make_states(2)) == (key,)


def test_the_message_tells_the_sizes_and_what_to_do() -> None:
    tier = HostTier(2000)
    tier.lease([make_key(1)])
    tier.put(make_key(1), make_states(1, 20))
    with pytest.raises(StoreBudgetExceeded) as caught:
        tier.put(make_key(2), make_states(2, 20))
    for fact in ("2,000 bytes", "1,280 are in use", "1,280 more", "Raise host_bytes", "smaller k"):
        assert fact in str(caught.value)
    assert make_key(1) in tier, "nothing was dropped for what cannot be admitted"


def test_a_failed_put_evicts_nothing() -> None:
    tier = tier_of(3)
    tier.lease([make_key(1)])
    for number in (1, 2):
        tier.put(make_key(number), make_states(number))
    with pytest.raises(StoreBudgetExceeded):
        tier.put(make_key(3), make_states(3, 3))
    assert (len(tier), tier.evictions) == (2, 0)


def test_a_dropped_key_gives_its_bytes_back_even_while_leased() -> None:
    tier = tier_of(1)
    tier.lease([make_key(1)])
    tier.put(make_key(1), make_states(1))
    tier.drop(make_key(1))
    tier.drop(make_key(1))
    assert tier.used_bytes == 0
    assert tier.put(make_key(2), make_states(2)) == ()
