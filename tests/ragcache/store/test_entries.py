"""The columns of a tier's entries against a plain dictionary."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache.states import KVKey
from ragcache.store.entries import Entries, KVEntry

numbers = st.integers(0, 30)


def key(number: int) -> KVKey:
    return KVKey(f"{number:064x}")


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
