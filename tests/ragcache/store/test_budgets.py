"""Budgets: what is evicted from which tier, what stays, and what expires."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from sqlalchemy import delete

from ragcache.db import Database
from ragcache.db.references import retire
from ragcache.db.tables import JobStateTable
from ragcache.errors import StoreBudgetExceeded
from ragcache.store import KVStore, LeaseRequest, admin, memory_tiers
from tests.ragcache.conftest import full_lease, make_key, make_states
from tests.ragcache.store.conftest import (
    BLOCK,
    INGEST,
    Open,
    Producer,
    fill,
    in_host,
    keys,
    leased,
    sources,
)


def test_eviction_leaves_the_disk_alone(reopen: Open) -> None:
    store = reopen(2)
    fill(store, 1, 2, 3, 4)
    assert in_host(store) == set(keys(3, 4))
    store.ledger.flush()
    assert store.ledger.keys("host") == set(keys(3, 4))
    assert store.ledger.keys("disk") == set(keys(1, 2, 3, 4))
    assert store.ledger.evictions()["host"]["pressure"] == 2
    assert sources(store, 4, 1) == ["host", "disk"]


def test_a_lease_larger_than_the_budget_is_refused_and_let_go(reopen: Open) -> None:
    store = reopen(2)
    with pytest.raises(StoreBudgetExceeded, match="Raise host_bytes, or ask with a smaller k"):
        full_lease(store, keys(1, 2, 3), Producer(), INGEST)
    assert leased(store) == set()
    assert sources(store, 3, 4) == ["disk", "encoded"]


def test_leased_states_are_not_evicted(reopen: Open) -> None:
    store = reopen(3)
    with full_lease(store, keys(1), Producer(), INGEST):
        fill(store, 2, 3, 4, 5)
        assert make_key(1) in in_host(store)
    fill(store, 6, 7, 8)
    assert make_key(1) not in in_host(store)


@pytest.mark.parametrize("source", ["encoded", "disk"])
def test_states_used_once_push_out_nothing_that_was_used_again(reopen: Open, source: str) -> None:
    store = reopen(3)
    fill(store, *(range(20) if source == "disk" else (18, 19)))
    on_disk = set(store.disk.keys())
    assert sources(store, 18, 19) == ["host"] * 2
    for number in range(10):
        assert sources(store, number) == [source]
    assert in_host(store) == set(keys(18, 19, 9))
    assert set(store.disk.keys()) == on_disk


@pytest.mark.parametrize(
    ("number", "mode", "kept"),
    [(9, "", True), (200, "root", True), (255, "", False)],
    ids=["of a module", "of the store", "without an owner"],
)
def test_states_used_again_are_written_if_something_owns_them(
    reopen: Open, number: int, mode: str, kept: bool
) -> None:
    """Preambles belong to the store: no module owns them, and no row says so before."""
    store, request = reopen(), LeaseRequest(mode=mode)
    assert sources(store, number, request=request) == ["encoded"]
    store.sweep()
    assert (store.count_unkept(), list(store.disk.keys())) == (1, [])
    assert sources(store, number, request=request) == ["host"]
    assert store.count_unkept() == (0 if kept else 1)
    assert list(store.disk.keys()) == (keys(number) if kept else [])


def test_a_process_that_ends_keeps_what_it_encoded(reopen: Open) -> None:
    store = reopen()
    sources(store, 9)
    sources(store, 255, request=LeaseRequest())
    store.keep_encoded()
    assert list(store.disk.keys()) == keys(9), "nothing owns the other"
    assert store.count_unkept() == 1


def test_states_used_again_soon_after_they_went_stay(reopen: Open) -> None:
    store = reopen(6)
    fill(store, *range(8))
    assert sources(store, 1) == ["disk"]
    fill(store, *range(10, 30))
    assert make_key(1) in in_host(store)


def test_states_that_a_call_names_stay_beside_states_used_once(reopen: Open) -> None:
    store = reopen(3)
    fill(store, 1, 2, 3)
    assert sources(store, 4, request=LeaseRequest("warm")) == ["encoded"]
    fill(store, *range(10, 20))
    assert make_key(4) in in_host(store)


def test_states_that_are_read_ahead_are_used_by_their_reader(reopen: Open) -> None:
    fill(reopen(), 1)
    store = reopen(3)
    store.read_ahead(keys(1))
    assert sources(store, 1) == ["disk"]
    assert not store.memory.top.entries.is_reused(make_key(1))
    assert sources(store, 1) == ["host"]
    assert store.memory.top.entries.is_reused(make_key(1))


def test_uses_of_an_earlier_process_order_the_disk(reopen: Open) -> None:
    store = reopen(10)
    fill(store, 1, 2, 3, 4)
    for number in (3, 1):
        sources(store, number)
    store.close()
    later = reopen(10, disk_bytes=5 * BLOCK)
    fill(later, 5)
    assert set(later.disk.keys()) == set(keys(1, 3, 4, 5))
    fill(later, 6, 7, 8)
    assert set(keys(1, 3)) <= set(later.disk.keys())
    assert list(later.persistent.indexes[0].entries)[-2:] == keys(3, 1)


def test_questions_in_flight_are_bounded_too(reopen: Open) -> None:
    store = reopen(3)
    fill(store, 1, 2, 3)
    with full_lease(store, keys(4, 5, 6), Producer()):
        with pytest.raises(StoreBudgetExceeded):
            full_lease(store, keys(7), Producer())
        assert in_host(store) == set(keys(4, 5, 6))


def test_the_disk_evicts_by_the_uses_of_all_processes(reopen: Open) -> None:
    first, second = (reopen(disk_bytes=4 * BLOCK) for _ in range(2))
    fill(first, 1, 2, 3)
    second.persistent.learn(second.ledger.load())
    assert sources(first, 1) == ["host"]
    first.sweep()
    second.sweep()
    fill(second, 4)
    on_disk = second.ledger.keys("disk")
    assert set(keys(1, 4)) <= on_disk, "the first process has just used it"
    assert not set(keys(2)) <= on_disk


def test_two_processes_share_one_budget(reopen: Open) -> None:
    first = reopen(10, disk_bytes=5 * BLOCK)
    second = reopen(10, disk_bytes=5 * BLOCK)
    for number in range(0, 20, 2):
        fill(first, number)
        fill(second, number + 1)
        assert len(list(first.disk.keys())) <= 4
    left = set(first.disk.keys())
    assert make_key(19) in left
    assert first.ledger.keys("disk") == left
    assert first.ledger.evictions()["disk"]["pressure"] == 20 - len(left)


def test_a_pin_holds_in_every_tier_and_process(reopen: Open) -> None:
    store = reopen(2, disk_bytes=3 * BLOCK)
    fill(store, 1)
    store.pin(keys(1))
    other = reopen(2, disk_bytes=3 * BLOCK)
    fill(other, 2, 3, 4, 5)
    fill(store, 6, 7, 8)
    assert make_key(1) in in_host(store)
    assert make_key(1) in set(store.disk.keys())
    store.pin(keys(1), False)
    fill(store, 2, 3, 4, 5)
    assert make_key(1) not in in_host(store)


def test_a_disk_full_of_pins_is_refused_with_its_budget(reopen: Open) -> None:
    store = reopen(10, disk_bytes=3 * BLOCK)
    for number in (1, 2):
        fill(store, number)
        store.pin(keys(number))
    with pytest.raises(StoreBudgetExceeded, match=r"disk tier may hold .* Raise disk_bytes"):
        fill(store, 3)
    assert set(store.disk.keys()) == set(keys(1, 2))


def test_an_ingestion_waits_for_a_disk_full_of_leases(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they stay for long, or it is not to wait. A later question does not wait for it."""
    store = reopen(10, disk_bytes=3 * BLOCK)
    fill(store, 1, 2)
    question = full_lease(store, keys(1, 2), Producer())
    with pytest.raises(StoreBudgetExceeded, match=r"disk tier may hold .* Raise disk_bytes"):
        store.put_states(make_key(3), make_states(3), LeaseRequest("ingest", patience=0.0))
    monkeypatch.setattr("ragcache.store.lease_queue.ROOM_SECONDS", 0.03)
    with pytest.raises(StoreBudgetExceeded):
        fill(store, 3)
    monkeypatch.setattr("ragcache.store.lease_queue.ROOM_SECONDS", 60.0)
    with ThreadPoolExecutor(1) as pool:
        ingestion = pool.submit(fill, store, 3)
        with pytest.raises(TimeoutError):
            ingestion.result(0.1)
        assert sources(store, 1, 2) == ["host"] * 2
        question.release()
        ingestion.result(30)
    assert make_key(3) in set(store.disk.keys())


def test_two_ingestions_do_not_wait_for_each_other(reopen: Open) -> None:
    store = reopen(10, disk_bytes=3 * BLOCK)
    first, second = (store.lease(keys(*each), INGEST) for each in ((1, 3), (2, 4)))
    for lease, number in ((first, 1), (second, 2)):
        lease.claim()
        lease.put(make_key(number), make_states(number))
    with ThreadPoolExecutor(2) as pool:
        puts = {
            pool.submit(lease.put, make_key(number), make_states(number)): lease
            for lease, number in ((first, 3), (second, 4))
        }
        [failed], [waits] = wait(puts, 30, return_when="FIRST_COMPLETED")
        assert isinstance(failed.exception(), StoreBudgetExceeded)
        puts[failed].release()
        waits.result(30)
        puts[waits].release()


def test_blobs_that_another_process_has_retired_make_room(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a disk end when any process retires their states, and blobs at the next sweep."""
    monkeypatch.setattr(KVStore, "sweep", lambda _: None)
    store = reopen(10, disk_bytes=4 * BLOCK)
    fill(store, *range(90, 93))
    with store.ledger.database.transaction() as session:
        expected = JobStateTable.key.in_(keys(90, 91, 92))
        session.execute(delete(JobStateTable).where(expected))
        assert retire(session, keys(90, 91, 92)) == keys(90, 91, 92)
    fill(store, 3)
    assert make_key(3) in set(store.disk.keys())


def test_a_disk_evicts_for_blobs_whose_process_died(reopen: Open) -> None:
    """Their claims end with its session, some seconds later."""
    store, dead = (reopen(10, disk_bytes=5 * BLOCK) for _ in range(2))
    fill(store, 1, 2)
    for number in (3, 4):
        assert dead.ledger.locks.acquire(keys(number)) == keys(number)
        dead.disk.put(make_key(number), make_states(number))
    store.disk.scan()  # as at opening
    fill(store, 5)
    assert set(store.disk.keys()) >= set(keys(3, 4, 5))


def test_what_is_known_of_absent_states_is_forgotten(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while some of them are leased."""
    monkeypatch.setattr(memory_tiers, "_SPARE_METADATA", 0)
    store = reopen(10)
    fill(store, *range(20))
    store.evict(keys(*range(1, 20)))
    with full_lease(store, keys(0, 20), Producer(), INGEST):
        store.evict(keys(20))
        store.sweep()
        assert store.memory.metadata.keys() == set(keys(0, 20))


def test_expired_states_go_with_the_sweep(store: KVStore) -> None:
    fill(store, 1, 2, 3)
    store.expire(keys(1, 2), time.time() - 1)
    store.pin(keys(2))
    store.expire(keys(3), time.time() + 3600)
    store.sweep()
    assert (in_host(store), set(store.disk.keys())) == (set(keys(2, 3)), set(keys(2, 3)))
    assert store.ledger.evictions()["disk"]["ttl"] == 1
    assert sources(store, 1) == ["encoded"]
    store.sweep()
    assert sources(store, 1) == ["host"], "what was encoded anew has no limit"


def test_a_limit_that_another_process_sets_is_kept(store: KVStore, database: Database) -> None:
    fill(store, 1, 2)
    store.ledger.flush()
    other = KVStore.inspect(store.disk.folder.parent, database)
    admin.expire(other, keys(1), 0)
    store.expire(keys(2), time.time() - 1)
    admin.expire(other, keys(2), None)
    other.close()
    store.sweep()
    assert set(store.disk.keys()) == set(keys(2))
    assert in_host(store) <= set(keys(2))


def test_a_limit_outlives_the_process(reopen: Open) -> None:
    store = reopen(10)
    fill(store, 1, 2)
    store.expire(keys(1), time.time() + 0.01)
    time.sleep(0.02)
    again = reopen(10)
    again.sweep()
    assert set(again.disk.keys()) == set(keys(2))
