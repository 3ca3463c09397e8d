"""Routing: the replica that has the states and is not busy."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import ConfigurationError
from ragcache.routing import RoutedModule, RoutingCosts, choose_replica, held_bytes, owner_of

COSTS = RoutingCosts()
LEAVE = RoutedModule("leave", nbytes=50_000_000, tokens=384)
PAY = RoutedModule("pay", nbytes=100_000_000, tokens=768)
LOADS = {"a": 0, "b": 0, "c": 0}

names = st.sampled_from("abcdefgh")
loads_of = st.dictionaries(names, st.integers(0, 40), min_size=1)
modules_of = st.lists(
    st.builds(RoutedModule, st.sampled_from("klmnop"), st.integers(0, 10**9), st.integers(0, 4096)),
    max_size=4, unique_by=lambda module: module.key,
)  # fmt: skip
holds_of = st.dictionaries(
    st.sampled_from("klmnop"), st.dictionaries(names, st.sampled_from(["device", "host"]))
)


def test_a_holder_that_is_full_is_left_alone() -> None:
    loads = {"a": 20, "b": 3, "c": 2}
    assert choose_replica([LEAVE], loads, {"leave": {"a": "device"}}, COSTS) == "c"


def test_many_requests_for_one_module_spread_it() -> None:
    """As those who get it hold it afterwards, each replica serves its share of them."""
    loads, holds = dict.fromkeys("abcd", 0), {"leave": {"a": "device"}}
    for _ in range(64):
        chosen = choose_replica([LEAVE], loads, holds, COSTS)
        loads[chosen] += 1
        holds["leave"][chosen] = "device"
    assert max(loads.values()) <= 1.25 * 64 / 4 + 1


def test_two_routers_send_what_nobody_holds_to_its_owner() -> None:
    routers = [random.Random(seed) for seed in range(20)]
    chosen = {choose_replica([LEAVE], LOADS, {}, COSTS, rng) for rng in routers}
    assert chosen == {owner_of("leave", LOADS)}


def test_a_slow_transfer_costs_no_more_than_encoding() -> None:
    slow = RoutingCosts(remote_bandwidth=1e6)
    assert slow.seconds_to_bring(LEAVE) == LEAVE.tokens / slow.encode_rate
    assert slow.seconds_to_bring(RoutedModule("unknown", 50_000_000)) == 50.0


def test_a_request_without_modules_avoids_the_busier_of_two() -> None:
    rng = random.Random(1)
    chosen = Counter(choose_replica([], {"a": 9, "b": 0}, {}, COSTS, rng) for _ in range(20))
    assert chosen == {"b": 20}


def test_without_replicas_nothing_is_chosen() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose_replica([LEAVE], {}, {}, COSTS)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_costs_are_positive(value: float) -> None:
    with pytest.raises(ConfigurationError, match="remote_bandwidth"):
        RoutingCosts(remote_bandwidth=value)
    assert RoutingCosts(owner_credit=0).owner_credit == 0


def test_moved_and_held_bytes_add_up() -> None:
    holds = {"leave": {"a": "host"}}
    assert held_bytes([LEAVE, PAY], holds, "a") == (LEAVE.nbytes, PAY.nbytes)
    assert held_bytes([LEAVE, PAY], holds, "b") == (0, LEAVE.nbytes + PAY.nbytes)


@settings(max_examples=30)
@given(modules_of, loads_of, holds_of, st.integers(0, 9))
def test_the_chosen_replica_is_one_that_may_be_chosen(
    modules: list[RoutedModule], loads: dict[str, int], holds: dict[str, dict[str, str]], seed: int
) -> None:
    chosen = choose_replica(modules, loads, holds, COSTS, random.Random(seed))
    assert chosen in loads
    assert chosen == choose_replica(modules, loads, holds, COSTS, random.Random(seed))


@settings(max_examples=30)
@given(modules_of.filter(bool), holds_of)
def test_among_idle_replicas_none_lacks_less(
    modules: list[RoutedModule], holds: dict[str, dict[str, str]]
) -> None:
    costs, loads = RoutingCosts(owner_credit=0), dict.fromkeys("abcdefgh", 0)

    def lacking(replica: str) -> float:
        tiers = (holds.get(module.key, {}).get(replica) for module in modules)
        return sum(map(costs.seconds_to_bring, modules, tiers))

    chosen = choose_replica(modules, loads, holds, costs)
    assert lacking(chosen) == pytest.approx(min(map(lacking, loads)))


@settings(max_examples=30)
@given(st.sets(names, min_size=2), st.lists(st.sampled_from("klmnop")))
def test_only_what_a_leaving_replica_owned_gets_another_owner(
    replicas: set[str], keys: list[str]
) -> None:
    gone = min(replicas)
    for key in keys:
        before, after = owner_of(key, replicas), owner_of(key, replicas - {gone})
        assert after == before or before == gone


def test_owners_share_the_keys() -> None:
    owned = Counter(owner_of(f"key {number}", "abcd") for number in range(2000))
    assert min(owned.values()) > 400
