"""Eviction: the policies against a plain sort, and the columns of entries against plain
dictionaries."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store.eviction import (
    POLICIES,
    Entries,
    KVEntry,
    Policy,
    Victims,
    check_policy,
    choose_victims,
    expired,
)


def key(number: int) -> KVKey:
    return KVKey(f"{number:064x}")


@st.composite
def entry_lists(draw: st.DrawFn) -> list[KVEntry]:
    """Entries with many ties; each may stand on the one before it."""
    entries: list[KVEntry] = []
    for number in draw(st.lists(st.integers(0, 500), max_size=12, unique=True)):
        root = entries[-1].key if entries and draw(st.booleans()) else None
        entries.append(
            KVEntry(
                key(number),
                nbytes=draw(st.integers(1, 50)),
                last_use=draw(st.integers(0, 8)),
                leased=draw(st.booleans()),
                pinned=draw(st.integers(0, 3)) == 0,
                hits=draw(st.integers(0, 3)),
                cost=draw(st.sampled_from([0.0, 0.5, 2.0])),
                expires_at=draw(st.sampled_from([5.0, math.inf])),
                clock=draw(st.sampled_from([0.0, 0.1])),
                root=root,
            )
        )
    return entries


needs = st.integers(-5, 300)
policies = st.sampled_from(POLICIES)
NOW = 10.0


def choose(entries: list[KVEntry], need: int, policy: Policy = "lru") -> Victims:
    return choose_victims(entries, need, policy, now=NOW)


def chosen(entries: list[KVEntry], need: int, policy: Policy = "lru") -> list[KVEntry]:
    by_key = {entry.key: entry for entry in entries}
    return [by_key[victim] for victim in choose(entries, need, policy).keys]


@given(entries=entry_lists(), need=needs, policy=policies)
def test_leased_and_pinned_entries_are_never_victims(
    entries: list[KVEntry], need: int, policy: Policy
) -> None:
    assert not any(entry.leased or entry.pinned for entry in chosen(entries, need, policy))


@given(entries=entry_lists(), need=needs, policy=policies)
def test_enough_is_freed_or_it_is_said_how_much_is_missing(
    entries: list[KVEntry], need: int, policy: Policy
) -> None:
    possible = sum(e.nbytes for e in entries if not e.leased and not e.pinned)
    victims = choose(entries, need, policy)
    assert victims.freed == sum(e.nbytes for e in chosen(entries, need, policy))
    assert victims.freed >= min(need, possible)
    assert victims.missing == max(0, need - possible)


@given(entries=entry_lists(), need=needs, policy=policies)
def test_no_victim_more_than_needed(entries: list[KVEntry], need: int, policy: Policy) -> None:
    victims = chosen(entries, need, policy)
    assert len({v.key for v in victims}) == len(victims)
    assert not victims or sum(entry.nbytes for entry in victims[:-1]) < need


@given(entries=entry_lists(), need=needs, policy=policies)
def test_expired_entries_go_first_and_are_counted(
    entries: list[KVEntry], need: int, policy: Policy
) -> None:
    over = [victim.expires_at <= NOW for victim in chosen(entries, need, policy)]
    assert over == sorted(over, reverse=True)
    assert choose(entries, need, policy).expired == sum(over)


@given(entries=entry_lists(), need=needs, policy=policies)
def test_a_root_goes_after_what_was_encoded_after_it(
    entries: list[KVEntry], need: int, policy: Policy
) -> None:
    order = [victim.key for victim in chosen(entries, need, policy)]
    for entry in entries:
        root = next((e for e in entries if e.key == entry.root), None)
        if root is not None and root.key in order and root.expires_at > NOW:
            held = entry.leased or entry.pinned
            assert held or order.index(entry.key) < order.index(root.key)


@given(entries=entry_lists(), need=needs, policy=policies, order=st.randoms())
def test_the_order_of_the_entries_does_not_matter(
    entries: list[KVEntry], need: int, policy: Policy, order: random.Random
) -> None:
    shuffled = list(entries)
    order.shuffle(shuffled)
    assert choose(shuffled, need, policy) == choose(entries, need, policy)


@given(entries=entry_lists(), need=needs)
def test_without_roots_each_policy_sorts_by_its_own_key(entries: list[KVEntry], need: int) -> None:
    plain = [KVEntry(e.key, e.nbytes, e.last_use, hits=e.hits, cost=e.cost) for e in entries]
    worth = {
        "lru": lambda e: (e.last_use, e.key),
        "lfu": lambda e: (e.hits, e.last_use, e.key),
        "gdsf": lambda e: (e.clock + (1 + e.hits) * e.cost / e.nbytes, e.last_use, e.key),
    }
    for policy, rank in worth.items():
        victims = chosen(plain, need, check_policy(policy))
        assert victims == sorted(plain, key=rank)[: len(victims)]


def test_all_victims_are_named_where_they_do_not_suffice() -> None:
    entries = [KVEntry(key(1), 10, 2), KVEntry(key(2), 10, 1), KVEntry(key(3), 99, 0, leased=True)]
    assert choose(entries, 50) == Victims((key(2), key(1)), 0, 20, 30, 0.0)


def test_the_greedy_dual_clock_rises_to_what_was_evicted_and_ages_what_is_not_used() -> None:
    """A dear document that nobody asks for leaves once cheap ones have raised the clock over it."""
    table = Entries()
    table.add(KVEntry(key(0), 10, 0, cost=25.0))  # priority 2.5
    clock = 0.0
    for tick in range(1, 10):
        table.add(KVEntry(key(tick), 10, tick, cost=10.0, clock=clock))  # priority clock + 1
        victims = choose_victims(table, 10, "gdsf", clock=clock)
        assert victims.clock >= clock
        clock = victims.clock
        for victim in victims.keys:
            table.remove(victim)
        if key(0) not in table:
            break
    assert (tick, clock) == (3, 2.5)


def test_gdsf_keeps_what_is_dear_small_or_often_used() -> None:
    plain = {"nbytes": 10, "last_use": 0, "cost": 1.0}
    rows = [plain, {**plain, "nbytes": 5}, {**plain, "cost": 3.0}, {**plain, "hits": 3}]
    entries = [KVEntry(key(n), **row) for n, row in enumerate(rows)]
    order = choose(entries, 1000, "gdsf").keys
    assert order == (key(0), key(1), key(2), key(3))


def test_expired_entries_are_listed_unless_they_are_held() -> None:
    table = Entries.of([KVEntry(key(n), 1, 0, expires_at=5.0) for n in range(4)])
    table.lease(key(0))
    table.pin(key(1))
    table.expire(key(2), 20.0)
    assert expired(table, NOW) == (key(3),)
    assert expired(table, 4.9) == ()


def test_keys_alike_in_their_first_digits_are_still_told_apart() -> None:
    entries = [KVEntry(KVKey("0" * 63 + digit), 1, 0) for digit in "3142"]
    assert [str(k)[-1] for k in choose(entries, 3).keys] == ["1", "2", "3"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fifo'; policies: lru, gdsf, lfu"):
        check_policy("fifo")


numbers = st.integers(0, 30)


class EntriesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = Entries()
        self.model: dict[KVKey, KVEntry] = {}
        self.leases: dict[KVKey, int] = {}

    @rule(number=numbers, root=st.none() | numbers, nbytes=st.integers(0, 9), leased=st.booleans())
    def add(self, number: int, root: int | None, nbytes: int, leased: bool) -> None:
        if root == number:
            root = None
        name = None if root is None else key(root)
        entry = KVEntry(key(number), nbytes, number, leased=leased, cost=0.5, root=name)
        self.table.add(entry)
        self.model[entry.key], self.leases[entry.key] = entry, int(leased)

    @rule(chosen=st.lists(st.tuples(numbers, st.none() | numbers), max_size=20))
    def extend(self, chosen: list[tuple[int, int | None]]) -> None:
        entries = [
            KVEntry(key(n), n, n, root=None if root in (None, n) else key(root))
            for n, root in chosen
        ]  # fmt: skip
        self.table.extend(entries)
        for entry in entries:
            self.model[entry.key], self.leases[entry.key] = entry, 0

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        if self.model.pop(key(number), None) is None:
            with pytest.raises(KeyError):
                self.table.remove(key(number))
        else:
            self.table.remove(key(number))

    @rule(number=numbers, tick=st.integers(0, 99))
    def use(self, number: int, tick: int) -> None:
        entry = self.model.get(key(number))
        if entry is not None:
            self.table.touch(entry.key, tick, tick / 2)
            self.table.pin(entry.key, tick % 2 == 0)
            self.table.expire(entry.key, math.inf if tick % 3 else tick)
            self.model[entry.key] = replace(
                entry, last_use=tick, clock=tick / 2, hits=entry.hits + 1,
                pinned=tick % 2 == 0, expires_at=math.inf if tick % 3 else tick,
            )  # fmt: skip

    @rule(number=numbers, begin=st.booleans())
    def hold(self, number: int, begin: bool) -> None:
        name = key(number)
        if name in self.model and begin:
            self.table.lease(name)
            self.leases[name] += 1
        elif not begin:
            self.table.release(name)
            self.leases[name] = max(0, self.leases.get(name, 0) - 1)

    @invariant()
    def agrees(self) -> None:
        expected = {k: replace(e, leased=self.leases[k] > 0) for k, e in self.model.items()}
        assert {entry.key: entry for entry in self.table} == expected
        assert len(self.table) == len(expected)
        assert self.table.used_bytes == sum(e.nbytes for e in expected.values())
        assert all((key(n) in self.table) == (key(n) in expected) for n in range(31))


TestEntries = EntriesMachine.TestCase


def test_rows_are_used_again() -> None:
    table = Entries()
    for number in range(10_000):
        table.add(KVEntry(key(number), 1, number, root=key(number + 1)))
        table.remove(key(number))
    assert table["resident"].size <= 3
