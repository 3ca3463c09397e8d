"""The store: leases over the tiers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import select

from ragcache.errors import StoreBudgetExceeded, StoreFull
from ragcache.states import KVKey, KVStates
from ragcache.store import Database, DiskTier, HostTier, KVStore, Ledger
from ragcache.store.store import ABANDONED_SECONDS
from ragcache.store.tables import StateTable
from tests.ragcache.store.conftest import TOKEN_BYTES, make_key, make_states, same

Open = Callable[[int], KVStore]


@pytest.fixture
def reopen(tmp_path: Path, database: Database) -> Open:
    """Opens the store as another process would, with a budget in tokens."""
    return lambda tokens: KVStore.open(tmp_path, database, tokens * TOKEN_BYTES)


@pytest.fixture
def store(reopen: Open) -> KVStore:
    return reopen(10)


class Producer:
    """Makes the states of keys and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[KVKey] = []

    def __call__(self, keys: Sequence[KVKey]) -> Iterator[KVStates]:
        for key in keys:
            self.asked.append(key)
            yield make_states(int(key.digest[:2], 16))


def nothing(keys: Sequence[KVKey]) -> list[KVStates]:
    raise AssertionError(f"asked to produce {keys}")


def keys(*numbers: int) -> list[KVKey]:
    return [make_key(number) for number in numbers]


def fill(store: KVStore, *numbers: int) -> None:
    for number in numbers:
        store.put(make_key(number), make_states(number))


def sources(store: KVStore, *numbers: int) -> list[str]:
    with store.lease(keys(*numbers), Producer()) as lease:
        for number, states in zip(numbers, lease.states, strict=True):
            assert same(states, make_states(number))
        return [lease.source[key] for key in lease.keys]


def make_old(path: Path) -> None:
    then = time.time() - ABANDONED_SECONDS - 100
    os.utime(path, (then, then))


def test_a_lease_tells_where_each_state_came_from(store: KVStore, reopen: Open) -> None:
    fill(store, 1)
    other = reopen(10)
    fill(other, 2)
    with other.lease(keys(3, 2, 1, 1), Producer()) as lease:
        assert [lease.source[key] for key in lease.keys] == ["encoded", "host", "disk", "disk"]
        expected = [make_states(n) for n in (3, 2, 1, 1)]
        assert all(map(same, lease.states, expected))
        assert lease.moved == {"disk": TOKEN_BYTES}
    assert sources(other, 1, 2, 3) == ["host"] * 3


def test_only_what_is_missing_is_produced_and_once(store: KVStore) -> None:
    fill(store, 1)
    produce = Producer()
    with store.lease(keys(2, 1, 3, 2), produce):
        assert produce.asked == keys(2, 3)
    with store.lease(keys(1, 2, 3), nothing) as lease:
        assert len(lease.states) == 3


def test_what_was_produced_is_on_disk_for_the_next_process(store: KVStore, reopen: Open) -> None:
    sources(store, 1, 2)
    with reopen(10).lease(keys(2, 1), nothing) as lease:
        assert set(lease.source.values()) == {"disk"}


def test_too_few_states_produced_is_an_error(store: KVStore) -> None:
    with pytest.raises(ValueError, match="zip"):
        store.lease(keys(1, 2), lambda _: [make_states(1)])
    assert not any(entry.leased for entry in store.host.entries())


def test_a_blob_that_vanished_is_produced_again(store: KVStore, reopen: Open) -> None:
    fill(store, 1, 2)
    other = reopen(10)
    other.disk.path(make_key(1)).unlink()
    assert sources(other, 1, 2) == ["encoded", "disk"]
    assert other.counters.corrupt == 1
    assert sources(reopen(10), 1) == ["disk"]


def test_a_corrupt_blob_is_produced_again_and_replaced(
    store: KVStore, reopen: Open, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 1)
    path = store.disk.path(make_key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    other = reopen(10)
    assert sources(other, 1) == ["encoded"]
    assert (other.counters.corrupt, other.counters.encoded) == (1, 1)
    assert "the states are encoded again" in caplog.text
    assert same(other.disk.get(make_key(1)), make_states(1))


def test_opening_drops_rows_without_blobs(store: KVStore, reopen: Open) -> None:
    fill(store, 1, 2)
    store.disk.path(make_key(1)).unlink()
    ledger = reopen(10).ledger
    assert ledger.keys("disk") == set(keys(2))
    assert ledger.keys("host") == set(), "another process's memory is gone"


def test_opening_removes_blobs_without_rows_only_when_they_are_old(
    store: KVStore, reopen: Open
) -> None:
    fill(store, 1, 2, 3)
    store.ledger.remove("disk", keys(1, 2))
    for number in (1, 3):
        make_old(store.disk.path(make_key(number)))
    other = reopen(10)
    assert set(other.disk.keys()) == set(keys(2, 3)), "2 may be of a writer still at work"
    assert other.ledger.keys("disk") == set(keys(3))


def test_opening_removes_old_parts(store: KVStore, reopen: Open) -> None:
    fill(store, 1)
    part = store.disk.path(make_key(1)).with_name("x.safetensors.1.part")
    part.write_bytes(b"half")
    reopen(10)
    assert part.exists()
    make_old(part)
    reopen(10)
    assert not part.exists()


def test_eviction_leaves_the_disk_alone(reopen: Open) -> None:
    store = reopen(2)
    fill(store, 1, 2, 3, 4)
    assert (len(store.host), store.host.evictions) == (2, 2)
    assert store.ledger.keys("host") == set(keys(3, 4))
    assert store.ledger.keys("disk") == set(keys(1, 2, 3, 4))
    assert sources(store, 4, 1) == ["host", "disk"]


def test_a_lease_larger_than_the_budget_is_refused_and_let_go(reopen: Open) -> None:
    store = reopen(2)
    with pytest.raises(StoreBudgetExceeded):
        store.lease(keys(1, 2, 3), Producer())
    assert not any(entry.leased for entry in store.host.entries())
    assert sources(store, 3, 4) == ["disk", "encoded"]


def test_what_is_leased_stays_while_others_come_and_go(reopen: Open) -> None:
    store = reopen(3)
    with store.lease(keys(1), Producer()):
        assert sources(store, 2, 3) == ["encoded"] * 2
        assert sources(store, 4, 5) == ["encoded"] * 2
        assert make_key(1) in store.host
    fill(store, 6, 7, 8)
    assert make_key(1) not in store.host


def test_leases_are_released_when_producing_fails(store: KVStore) -> None:
    fill(store, 1)

    def fail(missing: Sequence[KVKey]) -> Iterator[KVStates]:
        yield make_states(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.lease(keys(1, 2, 3), fail)
    assert not any(entry.leased for entry in store.host.entries())
    assert sources(store, 2, 3) == ["host", "encoded"], "what was made before is kept"


def test_a_lease_is_released_when_its_block_fails(store: KVStore) -> None:
    def fail() -> None:
        with store.lease(keys(1), Producer()):
            assert [entry.leased for entry in store.host.entries()] == [True]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [entry.leased for entry in store.host.entries()] == [False]


def test_hits_and_last_use_are_counted_at_release(
    store: KVStore, reopen: Open, database: Database
) -> None:
    fill(store, 1, 2)
    other = reopen(10)
    sources(other, 1)
    sources(other, 1)
    sources(other, 1, 2, 3)
    assert other.counters.hits == {"host": 2, "disk": 2}
    assert (other.counters.encoded, store.counters.encoded) == (1, 2)
    with database.transaction() as session:
        rows = {
            (r.key[:2], r.tier): (r.hits, r.last_use) for r in session.scalars(select(StateTable))
        }
    assert rows[("01", "disk")] == (3, 3)
    assert rows[("01", "host")] == (3, 3)
    assert rows[("02", "disk")] == (1, 3)
    assert rows[("03", "disk")] == (0, 0), "what was just encoded is no hit"


def test_deleted_states_are_in_no_tier(store: KVStore) -> None:
    fill(store, 1, 2)
    store.delete(keys(1, 9))
    assert make_key(1) not in store.host
    assert list(store.disk.keys()) == keys(2)
    assert (store.ledger.keys("disk"), store.ledger.keys("host")) == (set(keys(2)), set(keys(2)))


def test_states_deleted_while_leased_can_still_be_read(store: KVStore) -> None:
    with store.lease(keys(1), Producer()) as lease:
        store.delete(keys(1))
        assert same(lease.states[0], make_states(1))
    assert sources(store, 1) == ["encoded"]


class FullForNotes(Ledger):
    """A ledger whose device is full for all but rows of the disk tier."""

    def touch(self, hits: object) -> None:
        raise StoreFull("full")

    def record(self, tier: str, key: KVKey, states: KVStates, nbytes: int) -> None:
        if tier == "host":
            raise StoreFull("full")
        super().record(tier, key, states, nbytes)


def test_a_full_disk_does_not_stop_a_request_that_only_reads(
    store: KVStore, tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 1)
    full = KVStore(FullForNotes(database), HostTier(1000), DiskTier(tmp_path / "states"))
    assert sources(full, 1) == ["disk"]
    assert "the use of states is not counted" in caplog.text
