"""Blobs of what a GPU has computed: written from a copy in main memory, beside what comes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ragcache.db import Database
from ragcache.errors import StoreFull
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store import DeviceTier, DiskTier, HostTier, KVStore
from tests.ragcache.conftest import make_key, make_states, same
from tests.ragcache.store.conftest import INGEST, keys
from tests.ragcache.store.played_streams import Streams

TOKENS = 20


class GatedDisk:
    """Holds what is written back until the test opens the gate, or fails it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.fails, self.threads = threading.Event(), False, set[str]()
        self._put = DiskTier.put
        monkeypatch.setattr(DiskTier, "put", lambda tier, *args: self.put(tier, *args))

    def put(self, tier: DiskTier, key: KVKey, states: StoredStates) -> int:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(10)
        if self.fails:
            raise StoreFull("no space left")
        return self._put(tier, key, states)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> GatedDisk:
    return GatedDisk(monkeypatch)


def open_store(folder: Path, host_bytes: int = 10**6, **options: Any) -> KVStore:
    device = DeviceTier(10**6, "cpu", streams=Streams(holds_all=True))
    database = Database.open(folder / "ledger.sqlite")
    return KVStore.open(folder, database, host_bytes, tiers=[device], **options)


@pytest.fixture
def store(tmp_path: Path, disk: GatedDisk) -> Iterator[KVStore]:
    store = open_store(tmp_path)
    yield store
    disk.gate.set()
    store.close()


def rows(store: KVStore) -> set[KVKey]:
    """The keys whose blobs have a row."""
    return {row.key for row in store.ledger.load() if row.tier == "disk"}


def put_all(store: KVStore, numbers: range) -> Any:
    lease = store.lease(keys(*numbers), INGEST)
    for key, number in zip(lease.claim(), numbers, strict=True):
        lease.put(key, make_states(number, TOKENS))
    return lease


def test_states_are_used_while_their_blobs_are_written(store: KVStore, disk: GatedDisk) -> None:
    lease = put_all(store, range(3))
    assert lease.is_writing
    assert not lease.missing
    assert rows(store) == set()
    with store.lease(keys(1, 9)) as other:
        assert other.source == {make_key(1): "device"}
        assert other.claim() == keys(9)
        other.put(make_key(9), make_states(9, TOKENS))
        assert not other.is_writing, "states of questions stay in memory"
    disk.gate.set()
    lease.release()
    assert rows(store) == set(keys(0, 1, 2))
    assert all(name.startswith("ragcache-writer") for name in disk.threads)
    for number in range(3):
        found = store.disk.get(make_key(number))
        assert same(found.restore(), make_states(number, TOKENS))


def test_the_copy_stays_in_the_host_tier_until_room_is_needed(
    store: KVStore, disk: GatedDisk
) -> None:
    disk.gate.set()
    put_all(store, range(2)).release()
    assert set(store.host.keys()) == set(keys(0, 1))
    store.evict([make_key(0)], "device")
    with store.lease([make_key(0)]) as lease:
        assert lease.source == {make_key(0): "host"}
        assert same(lease.states[0].restore(), make_states(0, TOKENS))


def test_a_lease_ends_with_the_failure_of_a_write(store: KVStore, disk: GatedDisk) -> None:
    lease = put_all(store, range(2))
    disk.fails = True
    disk.gate.set()
    with pytest.raises(StoreFull, match="no space left"):
        lease.release()
    assert rows(store) == set()
    assert not [*store.disk.keys()]
    disk.fails = False
    store.evict([make_key(0)])
    put_all(store, range(1)).release()
    assert rows(store) == {make_key(0)}, "its claim has ended"


def test_a_later_put_raises_what_failed_before(store: KVStore, disk: GatedDisk) -> None:
    disk.fails = True
    disk.gate.set()
    lease = store.lease(keys(*range(40)), INGEST)
    with pytest.raises(StoreFull):  # noqa: PT012
        for number, key in enumerate(lease.claim()):
            lease.put(key, make_states(number, TOKENS))
    assert lease.missing, "it did not go on to the end"
    with suppress(StoreFull):  # others failed as well, or had not begun
        lease.release()


def test_copies_that_wait_are_bounded(store: KVStore, disk: GatedDisk) -> None:
    lease = store.lease(keys(*range(20)), INGEST)
    done: list[int] = []

    def put() -> None:
        for number, key in enumerate(lease.claim()):
            lease.put(key, make_states(number, TOKENS))
            done.append(number)

    thread = threading.Thread(target=put)
    thread.start()
    thread.join(0.3)
    assert len(done) == 8
    disk.gate.set()
    thread.join(10)
    lease.release()
    assert len(rows(store)) == 20


def test_the_same_thread_may_need_states_that_are_being_written(
    store: KVStore, disk: GatedDisk
) -> None:
    lease = put_all(store, range(1))
    store.memory.drop(make_key(0), "manual")
    lease.found.clear()
    threading.Timer(0.1, disk.gate.set).start()
    with store.fetch([make_key(0)]) as other:
        assert same(other.states[0].restore(), make_states(0, TOKENS))
    lease.release()


def test_without_room_in_the_host_tier_blobs_are_written_at_once(
    tmp_path: Path, disk: GatedDisk
) -> None:
    disk.gate.set()
    store = open_store(tmp_path, host_bytes=100)
    lease = put_all(store, range(2))
    assert not lease.is_writing
    assert rows(store) == set(keys(0, 1))
    lease.release()
    store.close()


def test_quantized_copies_become_the_blob(tmp_path: Path, disk: GatedDisk) -> None:
    disk.gate.set()
    store = open_store(tmp_path, kv_dtype="int8")
    put_all(store, range(1)).release()
    on_disk, on_host = store.disk.get(make_key(0)), store.host.get(make_key(0))
    assert same(on_disk.restore(), on_host.restore())
    assert isinstance(store.host, HostTier)
    store.close()
