"""The store: tiers, leases, claims, admission, options, and what an operator changes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import delete, event, update
from sqlalchemy.exc import IntegrityError

from ragcache import RagCache, SourceDocument
from ragcache.db import Database
from ragcache.db.jobs import Jobs
from ragcache.db.references import retire
from ragcache.db.sessions import DEAD_SECONDS
from ragcache.db.tables import JobStateTable, SessionTable
from ragcache.errors import (
    ConfigurationError,
    RemoteMismatch,
    RemoteUnavailable,
    StoreBudgetExceeded,
    StoreError,
    StoreFull,
    StoreUnreadable,
    StoreUnwritable,
)
from ragcache.models import LoadedModel
from ragcache.states import KVKey, KVStates
from ragcache.store import (
    HostTier,
    KVStore,
    LeaseRequest,
    RemoteTier,
    admin,
    open_tiers,
    tier_status,
)
from ragcache.store.verify import verify
from tests.ragcache.conftest import (
    TOKEN_BYTES,
    encode_missing,
    full_lease,
    make_key,
    make_states,
    same,
)

STATE_BYTES = HostTier(1 << 20).size_of(make_states(1))  # of one state in memory
BLOCK = 4096  # bytes that a blob of such states takes; while it is written, two are reserved
INGEST = LeaseRequest("ingest")
Open = Callable[..., KVStore]


@pytest.fixture
def reopen(tmp_path: Path, database: Database) -> Iterator[Open]:
    """Opens the store as another process would, with a budget in states of one token."""
    jobs = Jobs(database, "tests")
    jobs.expect(jobs.begin("collection tests", 0), map(make_key, range(100)))
    opened: list[KVStore] = []

    def open_store(states: int = 10, **options: Any) -> KVStore:
        store = KVStore.open(tmp_path, database, states * STATE_BYTES, **options)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def store(reopen: Open) -> KVStore:
    return reopen()


class Producer:
    """Makes the states of keys and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[KVKey] = []

    def __call__(self, keys: Sequence[KVKey]) -> Iterator[KVStates]:
        for key in keys:
            self.asked.append(key)
            yield make_states(int(key[:2], 16))


def failing(error: Exception) -> Callable[..., Any]:
    """A method that fails."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


AWAY = failing(RemoteUnavailable("away"))


def nothing(keys: Sequence[KVKey]) -> list[KVStates]:
    raise AssertionError(f"asked to produce {keys}")


def keys(*numbers: int) -> list[KVKey]:
    return [make_key(number) for number in numbers]


def fill(store: KVStore, *numbers: int) -> None:
    for number in numbers:
        store.put_states(make_key(number), make_states(number))


def sources(store: KVStore, *numbers: int, request: LeaseRequest | None = None) -> list[str]:
    with full_lease(store, keys(*numbers), Producer(), request) as lease:
        for number, states in zip(numbers, lease.states, strict=True):
            assert same(states, make_states(number))
        return [lease.source[key] for key in lease.keys]


def in_host(store: KVStore) -> set[KVKey]:
    return set(store.host.keys())


def leased(store: KVStore) -> set[KVKey]:
    return set(store.memory.leases)


def test_a_lease_names_the_tier_of_each_state(store: KVStore, reopen: Open) -> None:
    fill(store, 1)
    other = reopen()
    fill(other, 2)
    with full_lease(other, keys(3, 2, 1, 1), Producer()) as lease:
        assert [lease.source[key] for key in lease.keys] == ["encoded", "host", "disk", "disk"]
        expected = [make_states(n) for n in (3, 2, 1, 1)]
        assert all(map(same, lease.states, expected))
        assert lease.moved == {"disk": make_states(1).nbytes}
    assert sources(other, 1, 2, 3) == ["host"] * 3


def test_only_what_is_missing_is_produced_and_once(store: KVStore) -> None:
    fill(store, 1)
    produce = Producer()
    with full_lease(store, keys(2, 1, 3, 2), produce):
        assert produce.asked == keys(2, 3)
    with full_lease(store, keys(1, 2, 3), nothing) as lease:
        assert len(lease.states) == 3


@pytest.mark.parametrize("origin", ["ingest", "warm"])
def test_ingested_states_are_on_disk_for_the_next_process(
    store: KVStore, reopen: Open, origin: Any
) -> None:
    sources(store, 1, 2, request=LeaseRequest(origin))
    with full_lease(reopen(), keys(2, 1), nothing) as lease:
        assert set(lease.source.values()) == {"disk"}


def test_a_blob_that_vanished_is_produced_again(store: KVStore, reopen: Open) -> None:
    fill(store, 1, 2)
    other = reopen()
    other.disk.path(make_key(1)).unlink()
    assert sources(other, 1, 2) == ["encoded", "disk"]
    assert other.counters.corrupt == 1
    assert sources(reopen(), 1) == ["disk"]


def test_a_corrupt_blob_is_produced_again_and_replaced(
    store: KVStore, reopen: Open, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 1)
    path = store.disk.path(make_key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    other = reopen()
    assert sources(other, 1) == ["encoded"]
    assert (other.counters.corrupt, other.counters.encoded) == (1, 1)
    assert "the states are encoded again" in caplog.text
    assert same(other.disk.get(make_key(1)), make_states(1))
    assert store.ledger.evictions()["disk"] == {"corrupt": 1}


class TestOpening:
    def test_recovery_removes_rows_without_blobs(self, store: KVStore, reopen: Open) -> None:
        fill(store, 1, 2)
        store.disk.path(make_key(1)).unlink()
        assert reopen().ledger.keys("disk") == set(keys(2))

    def test_recovery_removes_blobs_without_rows(self, store: KVStore, reopen: Open) -> None:
        fill(store, 1)
        store.disk.put(make_key(2), make_states(2))
        assert set(reopen().disk.keys()) == set(keys(1))

    def test_blobs_that_another_process_is_writing_stay(self, store: KVStore, reopen: Open) -> None:
        store.ledger.locks.acquire(keys(2))
        store.disk.put(make_key(2), make_states(2))
        assert set(reopen().disk.keys()) == set(keys(2))

    def test_recovery_removes_half_written_files_without_other_sessions(
        self, store: KVStore, reopen: Open
    ) -> None:
        fill(store, 1)
        part = store.disk.path(make_key(1)).with_name("x.safetensors.1.part")
        part.write_bytes(b"half")
        reopen().close()
        assert part.exists(), "the first process may be writing it"
        store.close()
        reopen()
        assert not part.exists()

    def test_recovery_removes_states_without_an_owner(self, store: KVStore, reopen: Open) -> None:
        unowned, root = KVKey("ff" * 32), KVKey("fe" * 32)
        with full_lease(store, [root], Producer(), LeaseRequest("ingest", "root")) as lease:
            lease.extend([unowned], LeaseRequest("ingest", root=root))
            encode_missing(lease, Producer())
        assert set(reopen().disk.keys()) == {root}, "preambles belong to the store"


def test_eviction_leaves_the_disk_alone(reopen: Open) -> None:
    store = reopen(2)
    fill(store, 1, 2, 3, 4)
    assert in_host(store) == set(keys(3, 4))
    store.ledger.flush()
    assert store.ledger.keys("host") == set(keys(3, 4))
    assert store.ledger.keys("disk") == set(keys(1, 2, 3, 4))
    assert store.ledger.evictions()["host"]["pressure"] == 2
    assert sources(store, 4, 1) == ["host", "disk"]


@pytest.mark.parametrize("work", ["sweep", "heartbeat"])
def test_an_upkeep_that_fails_is_tried_again(
    reopen: Open, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    for seconds in ("SWEEP_SECONDS", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(f"ragcache.store.store.{seconds}", 0.01)
    failed = threading.Semaphore(0)

    def fail(_: KVStore) -> None:
        failed.release()
        raise IntegrityError("INSERT", {}, Exception("another process was first"))

    monkeypatch.setattr(KVStore, work, fail)
    store = reopen()
    for _ in range(3):
        assert failed.acquire(timeout=60), "the thread died"
    assert store.counters.unreadable >= 2


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


def test_leases_are_released_when_producing_fails(store: KVStore) -> None:
    fill(store, 1)

    def fail(missing: Sequence[KVKey]) -> Iterator[KVStates]:
        yield make_states(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        full_lease(store, keys(1, 2, 3), fail, INGEST)
    assert leased(store) == set()
    assert sources(store, 2, 3) == ["host", "encoded"], "what was made before is kept"


def test_a_lease_is_released_once_also_when_its_block_fails(store: KVStore) -> None:
    def fail() -> None:
        with full_lease(store, keys(1), Producer()) as lease:
            assert leased(store) == set(keys(1))
            lease.release()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert leased(store) == set()


def test_hits_are_counted_at_release(store: KVStore, reopen: Open) -> None:
    fill(store, 1, 2)
    other = reopen()
    for numbers in ((1,), (1,), (1, 2, 3)):
        sources(other, *numbers)
    assert other.counters.hits == {"host": 2, "disk": 2}
    assert (other.counters.encoded, store.counters.encoded) == (1, 2)
    other.ledger.flush()
    hits = {row.key: row.hits for row in other.ledger.load()}
    assert hits == {make_key(1): 3, make_key(2): 1}


def test_what_one_process_retires_leaves_the_others(
    reopen: Open, tmp_path: Path, database: Database
) -> None:
    store = reopen()
    other = KVStore.open(tmp_path / "other", database, 10 * STATE_BYTES)
    other.ledger.place = "" if database.engine.dialect.name == "sqlite" else other.ledger.place
    fill(other, 1, 2)
    sources(other, 3)  # in memory alone
    other.ledger.flush()
    with database.transaction() as session:
        session.execute(delete(JobStateTable).where(JobStateTable.key.in_(keys(1, 3))))
        gone = retire(session, keys(1, 2, 3))
    assert set(gone) == set(keys(1, 3))
    store.discard(gone)
    other.sweep()
    assert in_host(other) == set(other.disk.keys()) == set(keys(2))
    assert other.ledger.keys("host") == other.ledger.keys("disk") == set(keys(2))
    other.close()


def test_states_removed_while_leased_can_still_be_read(store: KVStore) -> None:
    fill(store, 1)
    with full_lease(store, keys(1), nothing) as lease:
        store.evict(keys(1))
        assert same(lease.states[0], make_states(1))
        assert in_host(store) == set(keys(1)), "until the last lease is released"
    assert in_host(store) == set()
    assert sources(store, 1) == ["encoded"]


class TestClaims:
    """What a caller has claimed is its own until it is put or given up."""

    def test_states_that_are_put_are_there_for_others_at_once(self, store: KVStore) -> None:
        with store.lease(keys(1, 2), INGEST) as lease:
            assert lease.claim() == keys(1, 2)
            lease.put(make_key(1), make_states(1))
            found: list[str] = []
            other = threading.Thread(target=lambda: found.extend(sources(store, 1)))
            other.start()
            other.join(10)
            assert found == ["host"]
            assert lease.missing == keys(2)

    def test_a_claim_before_the_last_one_was_put_is_an_error(self, store: KVStore) -> None:
        with store.lease(keys(1, 2)) as lease:
            lease.claim()
            lease.put(make_key(1), make_states(1))
            with pytest.raises(ValueError, match="1 claimed states are not put yet"):
                lease.claim()
        assert leased(store) == set()
        assert store.ledger.locks.acquire(keys(1, 2)) == keys(1, 2)

    def test_only_what_is_claimed_can_be_put(self, store: KVStore) -> None:
        fill(store, 1)
        with store.lease(keys(1, 2)) as lease:
            assert lease.claim() == keys(2)
            for number in (1, 3):
                with pytest.raises(ValueError, match="is not claimed by this lease"):
                    lease.put(make_key(number), make_states(number))

    def test_claims_end_with_their_lease_for_threads_and_processes(
        self, store: KVStore, reopen: Open
    ) -> None:
        other = reopen()

        def give_up() -> None:
            with store.lease(keys(1), INGEST) as lease:
                assert lease.claim() == keys(1)
                assert other.ledger.claim(keys(1), ()) == ([], [])
                raise KeyboardInterrupt

        for opened in (store, other):
            with pytest.raises(KeyboardInterrupt):
                give_up()
            assert leased(store) == set()
            with opened.lease(keys(1), INGEST) as again:
                assert again.claim() == keys(1)

    def test_a_thread_that_would_wait_for_its_own_claim_is_told(self, store: KVStore) -> None:
        with store.lease(keys(1)) as lease:
            assert lease.claim() == keys(1)
            with store.lease(keys(2, 1)) as other:
                assert other.claim() == keys(2), "what nobody has claimed comes first"
                other.put(make_key(2), make_states(2))
                with pytest.raises(ValueError, match=f"has claimed {make_key(1)} in another lease"):
                    other.claim()
            with pytest.raises(ValueError, match="in another lease"):
                store.fetch(keys(1))
            lease.put(make_key(1), make_states(1))
            assert sources(store, 1) == ["host"]
        assert leased(store) == set()

    def test_a_lease_that_another_thread_releases_ends_its_claims(self, store: KVStore) -> None:
        lease = store.lease(keys(1))
        assert lease.claim() == keys(1)
        other = threading.Thread(target=lease.release)
        other.start()
        other.join(10)
        assert sources(store, 1) == ["encoded"]

    def test_modules_are_leased_after_their_preamble(self, store: KVStore, reopen: Open) -> None:
        fill(store, 1, 2)
        other = reopen()
        with full_lease(other, keys(1), nothing) as lease:
            lease.extend(keys(2, 1, 3), INGEST)
            assert lease.missing == keys(3)
            encode_missing(lease, Producer())
            assert lease.keys == tuple(keys(1, 2, 1, 3))
            assert [lease.source[key] for key in lease.keys] == ["disk", "disk", "disk", "encoded"]
            assert leased(other) == set(keys(1, 2, 3))
        assert leased(other) == set()
        assert other.counters.hits == {"disk": 2}


class TestQueues:
    def test_one_off_questions_push_out_nothing_that_was_used_again(self, reopen: Open) -> None:
        store = reopen(3)
        fill(store, 1, 2)
        assert sources(store, 1, 2) == ["host"] * 2
        for number in range(10, 60):
            assert sources(store, number) == ["encoded"]
        assert in_host(store) == set(keys(1, 2, 59))
        assert set(store.disk.keys()) == set(keys(1, 2))

    def test_one_off_reads_from_the_disk_push_out_nothing_that_was_used_again(
        self, reopen: Open
    ) -> None:
        store = reopen(3)
        fill(store, *range(20))
        assert sources(store, 18, 19) == ["host"] * 2
        for number in range(10):
            assert sources(store, number) == ["disk"]
        assert in_host(store) == set(keys(18, 19, 9))

    def test_states_used_again_are_written_to_the_disk(self, reopen: Open) -> None:
        store = reopen(3)
        assert sources(store, 9) == ["encoded"]
        store.sweep()
        assert make_key(9) not in set(store.disk.keys())
        assert sources(store, 9) == ["host"]
        store.sweep()
        assert make_key(9) in set(store.disk.keys())

    def test_states_used_again_soon_after_they_went_stay(self, reopen: Open) -> None:
        store = reopen(6)
        fill(store, *range(8))
        assert sources(store, 1) == ["disk"]
        fill(store, *range(10, 30))
        assert make_key(1) in in_host(store)

    def test_states_that_a_call_names_stay_beside_states_used_once(self, reopen: Open) -> None:
        store = reopen(3)
        fill(store, 1, 2, 3)
        assert sources(store, 4, request=LeaseRequest("warm")) == ["encoded"]
        fill(store, *range(10, 20))
        assert make_key(4) in in_host(store)

    def test_states_that_are_read_ahead_are_used_once_by_their_first_reader(
        self, reopen: Open
    ) -> None:
        fill(reopen(), 1)
        store = reopen(3)
        store.read_ahead(keys(1))
        assert sources(store, 1) == ["disk"]
        assert not store.memory.top.entries.is_reused(make_key(1))
        assert sources(store, 1) == ["host"]
        assert store.memory.top.entries.is_reused(make_key(1))

    def test_uses_of_an_earlier_process_order_the_disk(self, reopen: Open) -> None:
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

    def test_reused_states_without_an_owner_are_not_written_to_disk(self, store: KVStore) -> None:
        unowned = KVKey("ff" * 32)
        for _ in range(3):
            full_lease(store, [unowned], lambda _: [make_states(1)]).release()
        store.sweep()
        assert list(store.disk.keys()) == []

    def test_questions_in_flight_are_bounded_too(self, reopen: Open) -> None:
        store = reopen(3)
        fill(store, 1, 2, 3)
        with full_lease(store, keys(4, 5, 6), Producer()):
            with pytest.raises(StoreBudgetExceeded):
                full_lease(store, keys(7), Producer())
            assert in_host(store) == set(keys(4, 5, 6))


class TestBudgets:
    def test_the_disk_keeps_to_its_budget_and_evicts_by_use(self, reopen: Open) -> None:
        store = reopen(10, disk_bytes=4 * BLOCK)
        fill(store, 1, 2, 3)
        sources(store, 1)
        fill(store, 4, 5)
        assert store.disk.used_bytes <= 4 * BLOCK
        left = set(store.disk.keys())
        assert set(keys(4, 5)) <= left
        assert store.ledger.keys("disk") == left
        assert store.ledger.evictions()["disk"]["pressure"] == 5 - len(left)

    def test_the_disk_evicts_by_the_uses_of_all_processes(self, reopen: Open) -> None:
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

    def test_two_processes_share_one_budget(self, reopen: Open) -> None:
        first = reopen(10, disk_bytes=5 * BLOCK)
        second = reopen(10, disk_bytes=5 * BLOCK)
        for number in range(0, 20, 2):
            fill(first, number)
            fill(second, number + 1)
            assert len(list(first.disk.keys())) <= 4
        assert first.ledger.keys("disk") == set(first.disk.keys())

    def test_a_pin_holds_in_every_tier_and_process(self, reopen: Open) -> None:
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

    def test_a_disk_full_of_pins_is_refused_with_its_budget(self, reopen: Open) -> None:
        store = reopen(10, disk_bytes=3 * BLOCK)
        for number in (1, 2):
            fill(store, number)
            store.pin(keys(number))
        with pytest.raises(StoreBudgetExceeded, match=r"disk tier may hold .* Raise disk_bytes"):
            fill(store, 3)
        assert set(store.disk.keys()) == set(keys(1, 2))

    def test_expired_states_go_with_the_sweep(self, store: KVStore) -> None:
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

    def test_a_limit_that_another_process_sets_is_kept(
        self, store: KVStore, database: Database
    ) -> None:
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

    def test_a_limit_outlives_the_process(self, reopen: Open) -> None:
        store = reopen(10)
        fill(store, 1, 2)
        store.expire(keys(1), time.time() + 0.01)
        time.sleep(0.02)
        again = reopen(10)
        again.sweep()
        assert set(again.disk.keys()) == set(keys(2))


def test_a_preamble_that_is_used_again_is_kept_by_the_store(reopen: Open) -> None:
    """No module owns it, and before it is written it has no row that says so."""
    store = reopen(10)
    request = LeaseRequest(mode="root")
    assert sources(store, 200, request=request) == ["encoded"]
    assert store.count_unkept() == 1
    assert sources(store, 200, request=request) == ["host"]
    assert store.count_unkept() == 0
    assert set(store.disk.keys()) == set(keys(200))


class TestRemote:
    @pytest.fixture
    def remote(self, tmp_path: Path) -> RemoteTier:
        return RemoteTier.open(f"file://{tmp_path / 'bucket'}")

    def test_what_is_ingested_is_there_for_a_machine_with_an_empty_disk(
        self, reopen: Open, remote: RemoteTier
    ) -> None:
        store = reopen(10, tiers=[remote])
        fill(store, 1)
        assert set(remote.keys()) == set(keys(1))
        other = reopen(10, tiers=[remote])
        other.evict(keys(1), "disk")
        with full_lease(other, keys(1), nothing) as lease:
            assert lease.source == {make_key(1): "remote"}
            assert lease.moved == {"disk": 0, "remote": make_states(1).nbytes}

    def test_what_is_used_again_comes_back_to_the_disk(
        self, reopen: Open, remote: RemoteTier
    ) -> None:
        store = reopen(1, tiers=[remote])
        fill(store, 1, 2)
        store.evict(keys(1), "disk")
        assert (sources(store, 1), sources(store, 1)) == (["remote"], ["host"])
        store.sweep()
        assert make_key(1) in set(store.disk.keys())

    @pytest.mark.parametrize("failing", ["read_place", "write_place"])
    def test_a_remote_that_fails_while_it_is_first_opened_is_used_when_it_answers(
        self, reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(remote, failing, AWAY)
            store = reopen(10, tiers=[remote])
            store.check_remote_again()
        fill(store, 1)
        store.check_remote_again()
        assert remote.read_place() == remote.place == store.ledger.get_fact("remote")
        fill(store, 2)
        assert make_key(2) in set(remote.keys())
        assert reopen(10, tiers=[remote]).ledger.get_fact("remote") == remote.place

    def test_a_remote_that_turns_out_to_be_another_one_takes_no_states(
        self, reopen: Open, remote: RemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reopen(10, tiers=[remote])
        wrong = RemoteTier.open(f"file://{tmp_path / 'another'}")
        wrong.write_place("its own")

        with monkeypatch.context() as patched:
            patched.setattr(wrong, "read_place", AWAY)
            store = reopen(10, tiers=[wrong])
        store.check_remote_again()
        fill(store, 1)
        assert list(wrong.keys()) == []
        assert make_key(1) in set(store.disk.keys())

    @pytest.mark.parametrize("refusal", [StoreUnreadable("permission denied"), StoreFull("full")])
    def test_the_upkeep_goes_on_while_a_remote_cannot_be_compared(
        self, reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture, refusal: StoreError,
    ) -> None:  # fmt: skip
        monkeypatch.setattr("ragcache.store.store.SWEEP_SECONDS", 600.0)
        said: list[StoreError] = [RemoteUnavailable("away")]
        failing = "read_place" if isinstance(refusal, StoreUnreadable) else "write_place"

        def refuse(*_: object) -> None:
            raise said[-1]

        with monkeypatch.context() as patched:
            patched.setattr(remote, failing, refuse)
            store = reopen(10, tiers=[remote])
            fill(store, 1)
            store.expire(keys(1), 1.0)
            said.append(refusal)
            store.check_remote_again()
            store.check_remote_again()
            assert not store.remote_checked
            store.sweep()
            assert make_key(1) not in set(store.disk.keys())
        assert caplog.text.count(str(refusal)) == 1
        store.check_remote_again()
        assert remote.read_place() == remote.place == store.ledger.get_fact("remote")

    def test_the_upkeep_does_not_wait_for_a_remote_that_hangs(
        self, reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, answers = threading.Event(), threading.Event()

        def hang() -> None:
            asked.set()
            answers.wait(20)
            raise RemoteUnavailable("away")

        swept = threading.Event()
        monkeypatch.setattr("ragcache.store.store.SWEEP_SECONDS", 0.001)
        monkeypatch.setattr(remote, "read_place", AWAY)
        store = reopen(10, tiers=[remote])
        monkeypatch.setattr(remote, "read_place", hang)
        try:
            assert asked.wait(10)
            monkeypatch.setattr(store.memory, "forget_expirations", lambda _: swept.set())
            assert swept.wait(10)
        finally:
            answers.set()

    def test_another_remote_is_refused_and_nothing_is_changed(
        self, reopen: Open, remote: RemoteTier, tmp_path: Path
    ) -> None:
        store = reopen(10, tiers=[remote])
        fill(store, 1, 2, 3)
        for name, there in (("unmounted", "none"), ("another", "'its own'")):
            wrong = RemoteTier.open(f"file://{tmp_path / name}")
            if name == "another":
                wrong.write_place("its own")
            with pytest.raises(RemoteMismatch, match=f"has {there} in its file 'place'"):
                reopen(10, tiers=[wrong])
        assert store.ledger.keys("remote") == set(keys(1, 2, 3))
        assert reopen(10, tiers=[remote]).ledger.get_fact("remote") == remote.read_place()

    def test_a_remote_that_cannot_be_written_is_read_as_it_is(
        self, reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse = failing(StoreUnwritable("the remote is mounted for reading"))
        monkeypatch.setattr(remote, "write_place", refuse)
        store = reopen(10, tiers=[remote])
        fill(store, 1)
        assert sources(store, 1) == ["host"]
        assert remote.place == ""

    def test_a_remote_whose_mount_goes_away_keeps_its_rows(
        self, reopen: Open, remote: RemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = reopen(10, tiers=[remote])
        fill(store, 1)
        for tier in ("host", "disk"):
            store.evict(keys(1), tier)
        (tmp_path / "bucket").rename(tmp_path / "away")
        monkeypatch.setattr("ragcache.store.tiers.remote._CHECKED_SECONDS", -1.0)
        assert sources(store, 1) == ["encoded"]
        fill(store, 2)
        assert store.ledger.keys("remote") == set(keys(1))
        assert verify(store).found[0].kind == "unreadable"
        (tmp_path / "away").rename(tmp_path / "bucket")
        assert set(remote.keys()) == set(keys(1))

    def test_an_unreachable_remote_costs_an_encoding(
        self, reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = reopen(10, tiers=[remote])
        fill(store, 1)
        store.evict(keys(1), "host")
        store.evict(keys(1), "disk")
        with monkeypatch.context() as patched:
            patched.setattr(remote, "get", AWAY)
            patched.setattr(remote, "put", AWAY)
            assert sources(store, 1) == ["encoded"]
            fill(store, 2)
        assert store.counters.unreadable == 2
        assert make_key(2) in set(store.disk.keys())


def test_prefetching_brings_states_to_memory_and_waits_for_nobody(
    reopen: Open, store: KVStore
) -> None:
    fill(store, 1, 2, 3)
    other = reopen(2)
    other.read_ahead(keys(1, 9))
    assert in_host(other) == set(keys(1))
    assert sources(other, 1) == ["disk"], "it was read for whoever uses it first"
    assert sources(other, 1) == ["host"]
    fill(other, 4)
    other.prefetch(keys(2, 3))
    assert sources(other, 4) == ["host"], "which pushes nothing out"


def test_prefetching_learns_what_another_process_has_encoded(
    reopen: Open, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = reopen()
    fill(store, 1, 2)
    other.prefetch(keys(1, 2))
    monkeypatch.setattr(other.ledger, "claim", nothing)
    assert sources(other, 1, 2) == ["disk", "disk"]
    other.prefetch(keys(3))  # nobody has it, and nothing is learned
    monkeypatch.undo()
    assert sources(other, 3) == ["encoded"]


def test_states_are_added_to_a_disk_in_two_transactions(store: KVStore) -> None:
    engine, mine = store.ledger.database.engine, threading.get_ident()
    begun: list[int] = []
    event.listen(engine, "begin", lambda _: begun.append(threading.get_ident()))
    store.persistent.add({make_key(n): make_states(n) for n in range(1, 9)}, 1)
    assert begun.count(mine) == 2
    assert {row.key for row in store.ledger.load()} == set(keys(*range(1, 9)))
    assert store.ledger.locks.acquire(keys(*range(1, 9))), "no claim is left"
    store.ledger.locks.release(keys(*range(1, 9)))


def test_what_cannot_be_added_leaves_no_claim(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.disk.put

    def full(key: KVKey, states: KVStates) -> int:
        if key == make_key(2):
            raise StoreFull("full")
        return put(key, states)

    monkeypatch.setattr(store.disk, "put", full)
    with pytest.raises(StoreFull):
        store.persistent.add({make_key(n): make_states(n) for n in (1, 2, 3)}, 1)
    assert set(store.ledger.locks.acquire(keys(1, 2, 3))) == set(keys(1, 2, 3))
    store.ledger.locks.release(keys(1, 2, 3))
    assert set(store.disk.keys()) == {row.key for row in store.ledger.load()}


def test_a_full_disk_does_not_stop_a_question(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 1)
    with monkeypatch.context() as patched:
        for name in ("claim", "record", "evict_rows"):
            patched.setattr(store.ledger, name, failing(StoreFull("full")))
        assert sources(store, 1, 2) == ["host", "encoded"]
        path = store.disk.path(make_key(1))
        store.memory.drop(make_key(1), "manual")
        path.write_bytes(b"")
        assert sources(store, 1) == ["encoded"]
        with pytest.raises(StoreFull):
            fill(store, 3)
    assert "states are encoded for this question only" in caplog.text
    assert store.counters.unclaimed == 2
    assert leased(store) == set()


class TestThreads:
    """Each test ends by itself where the store is right; a wait in it has a limit."""

    def test_two_threads_that_miss_a_key_encode_it_once(self, store: KVStore) -> None:
        began, go = threading.Event(), threading.Event()
        made: list[KVKey] = []

        def produce(missing: Sequence[KVKey]) -> Iterator[KVStates]:
            for key in missing:
                made.append(key)
                began.set()
                assert go.wait(10)
                yield make_states(int(key[:2], 16))

        found: dict[int, list[str]] = {}

        def ask(name: int, *numbers: int) -> None:
            with full_lease(store, keys(*numbers), produce, INGEST) as lease:
                found[name] = [lease.source[key] for key in lease.keys]

        first = threading.Thread(target=ask, args=(1, 1, 2))
        first.start()
        assert began.wait(10)
        second = threading.Thread(target=ask, args=(2, 2, 1))
        second.start()
        go.set()
        for thread in (first, second):
            thread.join(10)
        assert sorted(made) == keys(1, 2)
        assert (found[1], found[2]) == (["encoded"] * 2, ["host"] * 2)

    def test_another_thread_encodes_what_one_fails_to_encode(self, store: KVStore) -> None:
        began, go = threading.Event(), threading.Event()

        def fail(_: Sequence[KVKey]) -> Iterator[KVStates]:
            began.set()
            assert go.wait(10)
            raise RuntimeError("out of memory")

        errors: list[str] = []

        def ask() -> None:
            try:
                full_lease(store, keys(1), fail)
            except RuntimeError as error:
                errors.append(str(error))

        first = threading.Thread(target=ask)
        first.start()
        assert began.wait(10)
        threading.Timer(0.05, go.set).start()
        assert sources(store, 1) == ["encoded"]
        first.join(10)
        assert errors == ["out of memory"]

    @pytest.mark.slow
    def test_threads_that_lease_the_same_keys_in_other_orders_do_not_wait_for_ever(
        self, reopen: Open
    ) -> None:
        store = reopen(40)
        failures: list[BaseException] = []

        def ask(seed: int) -> None:
            import random

            try:
                order = list(range(12))
                for _ in range(20):
                    random.Random(seed).shuffle(order)
                    numbers = order[:4]
                    assert len(
                        sources(
                            store, *numbers, request=LeaseRequest(("warm", "question")[seed % 2])
                        )
                    )
                    if seed == 0:
                        store.evict(keys(*numbers))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        store.close()  # the sweep of every second borrows states, too
        assert leased(store) == set()

    def test_no_lock_is_held_while_states_are_made(self, store: KVStore) -> None:
        fill(store, 1)

        def produce(missing: Sequence[KVKey]) -> Iterator[KVStates]:
            done = threading.Event()
            threading.Thread(target=lambda: (sources(store, 1), done.set())).start()
            assert done.wait(10), "another thread can lease meanwhile"
            yield make_states(2)

        with full_lease(store, keys(2), produce) as lease:
            assert lease.source[make_key(2)] == "encoded"


def test_a_claim_of_a_process_that_died_does_not_count(
    store: KVStore, reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = reopen()
    other.ledger.locks.acquire(keys(1))
    assert store.ledger.claim(keys(1), ()) == ([], [])
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with store.ledger.database.transaction() as session:
        mine = update(SessionTable).where(SessionTable.id == other.ledger.sessions.id)
        session.execute(mine.values(pid=pid))
    assert sources(store, 1, request=INGEST) == ["encoded"]


def move_away(store: KVStore, silent: float) -> None:
    """Lets a session be one of another machine that was silent for so many seconds."""
    with store.ledger.database.transaction() as session:
        mine = update(SessionTable).where(SessionTable.id == store.ledger.sessions.id)
        heard = SessionTable.heartbeat - silent
        session.execute(mine.values(machine="another", heartbeat=heard))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened tell others nothing of themselves."""
    monkeypatch.setattr("ragcache.store.store.HEARTBEAT_SECONDS", 3600)


@pytest.mark.usefixtures("silent")
def test_a_question_waits_for_claims_of_a_silent_machine_for_its_patience(reopen: Open) -> None:
    store, other = reopen(claim_patience=0.2), reopen()
    other.ledger.locks.acquire(keys(1))
    move_away(other, DEAD_SECONDS / 2)
    assert sources(store, 1) == ["encoded"]
    assert store.counters.unclaimed == 1
    assert other.ledger.claim(keys(1), ()) == ([], keys(1)), "the claim is still the other's"
    move_away(other, DEAD_SECONDS)
    assert sources(store, 2, 1, request=INGEST) == ["encoded", "host"]


@pytest.mark.usefixtures("silent")
def test_a_session_that_was_ended_while_it_was_silent_begins_again(reopen: Open) -> None:
    store, other = reopen(), reopen()
    fill(other, 1)
    other.ledger.flush()
    move_away(other, DEAD_SECONDS + 1)
    assert store.ledger.sessions.heartbeat()
    assert other.ledger.keys("host") == set()
    other.ledger.locks.acquire(keys(2))  # it does not know yet
    store.ledger.sessions.reap_dead()
    assert store.ledger.claim(keys(2), ()) == ([], keys(2)), "no session had claimed it"
    other.heartbeat()
    other.ledger.flush()
    assert other.ledger.sessions.generation == 2
    assert other.ledger.keys("host") == set(keys(1))
    assert other.ledger.claim(keys(3), ()) == ([], keys(3))
    store.ledger.sessions.reap_dead()
    assert store.ledger.claim(keys(3), ()) == ([], [])


@pytest.mark.usefixtures("silent")
def test_a_blob_whose_claim_was_lost_is_claimed_and_written_again(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = reopen(), reopen()
    put, puts = store.disk.put, 0

    def lose_claim(key: KVKey, states: Any) -> int:
        nonlocal puts
        puts += 1
        nbytes = put(key, states)
        if puts == 1:
            move_away(store, DEAD_SECONDS + 1)
            other.ledger.sessions.reap_dead()
            store.disk.delete(key)  # as one who evicts it
        return nbytes

    monkeypatch.setattr(store.disk, "put", lose_claim)
    fill(store, 1)
    assert puts == 2
    assert verify(store).found == ()


CPU = torch.device("cpu")


def test_sizes_and_kinds_are_parsed() -> None:
    chosen = open_tiers({"disk_bytes": "8GiB", "kv_dtype": "int8"}, CPU)
    assert (chosen["disk_bytes"], chosen["kv_dtype"]) == (8 << 30, "int8")
    assert chosen["tiers"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_dtype": "int4"}, "unknown kv_dtype 'int4'"),
        ({"disk_bytes": "much"}, "cannot read the size 'much'"),
        ({"disk_size": 3}, "unknown option 'disk_size'; options of tiers: device_bytes"),
    ],
)
def test_invalid_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_tiers(options, CPU)


def test_an_answer_from_every_tier_is_the_same(tmp_path: Path, tiny_reader: LoadedModel) -> None:
    remote = f"file://{tmp_path / 'bucket'}"
    options: Any = {"remote": remote, "device_bytes": "64MiB", "max_tokens": 4}
    with RagCache.open(tmp_path / "state", tiny_reader, **options) as rag:
        rag.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
        found = {}
        for tier in ("device", "host", "disk", "remote"):
            rag.modules.move("notes", tier)
            if tier == "remote":
                rag.modules.evict("notes", tier="disk")
            answer = rag.ask("Where is the kiln?", collection="notes")
            found[answer.sources[0].tier] = answer.text
        assert set(found) == {"device", "host", "disk", "remote"}
        assert len(set(found.values())) == 1
        assert set(rag.stats().tiers) == {"device", "disk", "remote"}


def test_tier_status_counts_states_bytes_and_hits(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 1 << 20, disk_bytes=1 << 24)
    for number in range(3):
        store.put_states(make_key(number), make_states(number))
    store.pin([make_key(1)])
    store.fetch([make_key(2)]).release()
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    host, disk = tier_status(store)
    assert statements == []
    assert (host.name, host.states, host.hits, host.persistent) == ("host", 3, 1, False)
    assert (disk.name, disk.states, disk.hits, disk.persistent) == ("disk", 3, 0, True)
    assert (host.budget_bytes, disk.budget_bytes) == (1 << 20, 1 << 24)
    for tier in (host, disk):
        assert TOKEN_BYTES <= tier.pinned_bytes < tier.used_bytes
    store.evict([make_key(1)])
    assert [tier.pinned_bytes for tier in tier_status(store)] == [0, 0]
    store.close()
    database.close()
