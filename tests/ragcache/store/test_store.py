"""The store: what a lease finds, opening, upkeep, prefetching and options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import delete, event
from sqlalchemy.exc import IntegrityError

from ragcache import RagCache, SourceDocument
from ragcache.db import Database
from ragcache.db.references import retire
from ragcache.db.sessions import KeyLocks
from ragcache.db.tables import JobStateTable
from ragcache.errors import StoreFull
from ragcache.models import LoadedModel
from ragcache.params import OpenConfig
from ragcache.states import KVKey, KVStates
from ragcache.store import KVStore, LeaseRequest, open_tiers, tier_status
from ragcache.tiers import persistent_tiers
from tests.ragcache.conftest import (
    TOKEN_BYTES,
    encode_missing,
    full_lease,
    make_key,
    make_states,
    same,
)
from tests.ragcache.store.conftest import (
    STATE_BYTES,
    Open,
    Producer,
    failing,
    fill,
    in_host,
    keys,
    leased,
    nothing,
    sources,
)


def test_a_lease_names_the_tier_of_each_state(store: KVStore, reopen: Open) -> None:
    fill(store, 1)
    other = reopen()
    fill(other, 2)
    produce = Producer()
    with full_lease(other, keys(3, 2, 1, 1), produce) as lease:
        assert produce.asked == keys(3)
        assert [lease.source[key] for key in lease.keys] == ["encoded", "host", "disk", "disk"]
        expected = [make_states(n) for n in (3, 2, 1, 1)]
        assert all(map(same, lease.states, expected))
        assert lease.moved == {"disk": make_states(1).nbytes}
    assert sources(other, 1, 2, 3) == ["host"] * 3


@pytest.mark.parametrize("origin", ["ingest", "warm"])
def test_ingested_states_are_on_disk_for_the_next_process(
    store: KVStore, reopen: Open, origin: Any
) -> None:
    sources(store, 1, 2, request=LeaseRequest(origin))
    with full_lease(reopen(), keys(2, 1), nothing) as lease:
        assert set(lease.source.values()) == {"disk"}


def break_checksum(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize("lose", [Path.unlink, break_checksum], ids=["vanished", "corrupt"])
def test_a_blob_that_is_lost_is_produced_again_and_replaced(
    store: KVStore, reopen: Open, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], None]
) -> None:
    fill(store, 1, 2)
    other = reopen()
    lose(other.disk.path(make_key(1)))
    assert sources(other, 1, 2) == ["encoded", "disk"]
    assert (other.counters.corrupt, other.counters.encoded) == (1, 1)
    assert "the states are encoded again" in caplog.text
    assert store.ledger.evictions()["disk"] == {"corrupt": 1}
    assert same(other.disk.get(make_key(1)), make_states(1))
    assert sources(reopen(), 1) == ["disk"]


def test_opening_makes_rows_blobs_and_owners_agree(store: KVStore, reopen: Open) -> None:
    fill(store, 1, 2)
    store.disk.path(make_key(1)).unlink()
    for number in (3, 4):
        store.disk.put(make_key(number), make_states(number))
    store.ledger.locks.acquire(keys(4))
    root, unowned = keys(254, 255)  # preambles belong to the store
    with full_lease(store, [root], Producer(), LeaseRequest("ingest", "root")) as lease:
        lease.extend([unowned], LeaseRequest("ingest", root=root))
        encode_missing(lease, Producer())
    part = store.disk.path(make_key(2)).with_name("x.safetensors.1.part")
    part.write_bytes(b"half")
    again = reopen()
    assert again.ledger.keys("disk") == {*keys(2), root}
    assert set(again.disk.keys()) == {*keys(2, 4), root}, "another process is writing a blob"
    assert part.exists(), "the first process may be writing it"
    again.close()
    store.close()
    reopen()
    assert not part.exists()


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


def test_a_closing_store_waits_for_claims_on_what_it_deletes(
    reopen: Open, tmp_path: Path, database: Database
) -> None:
    other = reopen()
    store = KVStore.open(tmp_path, database, 10 * STATE_BYTES)
    fill(store, 1)
    with database.transaction() as session:
        session.execute(delete(JobStateTable).where(JobStateTable.key.in_(keys(1))))
        gone = retire(session, keys(1))
    assert other.ledger.locks.acquire(gone) == keys(1)
    store.discard(gone)
    assert set(other.disk.scan()) == set(keys(1))
    release = threading.Timer(0.3, other.ledger.locks.release, [gone])
    release.start()
    store.close()
    release.join()
    assert set(other.disk.scan()) == set()


def test_a_store_that_discards_waits_for_no_flight_of_its_own(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()

    def wait_for(_locks: KeyLocks, _keys: Sequence[KVKey], seconds: float) -> bool:
        waits.append(seconds)
        return True

    monkeypatch.setattr(KeyLocks, "wait_for", wait_for)
    with store.persistent._flights.begin(keys(1)):
        store.discard(keys(1))
        store.persistent.discard_at_end()
    assert len(waits) == 1
    store.persistent.discard_at_end()
    assert store.persistent._later == set()


def test_states_removed_while_leased_can_still_be_read(store: KVStore) -> None:
    fill(store, 1)
    with full_lease(store, keys(1), nothing) as lease:
        store.evict(keys(1))
        assert same(lease.states[0], make_states(1))
        assert in_host(store) == set(keys(1)), "until the last lease is released"
    assert in_host(store) == set()
    assert sources(store, 1) == ["encoded"]


def test_prefetching_brings_states_to_memory(reopen: Open, store: KVStore) -> None:
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


def test_a_configuration_opens_the_tiers_that_it_asks_for() -> None:
    asked = OpenConfig(device_bytes="1MiB", remote="memory://far", kv_dtype="int8")
    device, remote = open_tiers(asked, torch.device("cpu"))
    assert (device.name, device.budget_bytes, device.kv_dtype) == ("device", 1 << 20, "model")
    assert (remote.name, remote.budget_bytes, remote.kv_dtype) == ("remote", None, "int8")
    [remote] = open_tiers(asked, torch.device("cpu"), persistent_tiers())
    assert remote.name == "remote"
    assert open_tiers(OpenConfig(), torch.device("cpu")) == []


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
