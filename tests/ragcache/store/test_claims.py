"""Leases and claims: what is encoded once by whom, among threads and processes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import update

from ragcache.db.sessions import DEAD_SECONDS
from ragcache.db.tables import SessionTable
from ragcache.states import KVKey, KVStates
from ragcache.store import KVStore, LeaseRequest, Origin
from ragcache.store.verify import verify
from tests.ragcache.conftest import encode_missing, full_lease, make_key, make_states
from tests.ragcache.store.conftest import (
    INGEST,
    Open,
    Producer,
    fill,
    keys,
    leased,
    nothing,
    sources,
)


def test_leases_are_released_when_producing_fails(store: KVStore) -> None:
    fill(store, 1)

    def fail(missing: Sequence[KVKey]) -> Iterator[KVStates]:
        yield make_states(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        full_lease(store, keys(1, 2, 3), fail, INGEST)
    assert leased(store) == set()
    assert sources(store, 2, 3) == ["host", "encoded"], "what was made before is kept"


def test_states_that_are_put_are_there_for_others_at_once(store: KVStore) -> None:
    with store.lease(keys(1, 2), INGEST) as lease:
        assert lease.claim() == keys(1, 2)
        lease.put(make_key(1), make_states(1))
        found: list[str] = []
        other = threading.Thread(target=lambda: found.extend(sources(store, 1)))
        other.start()
        other.join(10)
        assert found == ["host"]
        assert lease.missing == keys(2)


def test_all_claimed_states_are_put_before_the_next_claim(store: KVStore) -> None:
    fill(store, 1)
    with store.lease(keys(1, 2, 3)) as lease:
        assert lease.claim() == keys(2, 3)
        for number in (1, 4):
            with pytest.raises(ValueError, match="is not claimed by this lease"):
                lease.put(make_key(number), make_states(number))
        lease.put(make_key(2), make_states(2))
        with pytest.raises(ValueError, match="1 claimed states are not put yet"):
            lease.claim()
    assert leased(store) == set()
    assert store.ledger.locks.acquire(keys(2, 3)) == keys(2, 3)


def test_claims_end_with_their_lease_for_threads_and_processes(
    store: KVStore, reopen: Open
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


def test_a_thread_that_would_wait_for_its_own_claim_is_told(store: KVStore) -> None:
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


def test_a_lease_that_another_thread_releases_ends_its_claims(store: KVStore) -> None:
    lease = store.lease(keys(1))
    assert lease.claim() == keys(1)
    other = threading.Thread(target=lease.release)
    other.start()
    other.join(10)
    lease.release()
    assert leased(store) == set()
    assert sources(store, 1) == ["encoded"]


def test_modules_are_leased_after_their_preamble(store: KVStore, reopen: Open) -> None:
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


def test_two_threads_that_miss_a_key_encode_it_once(store: KVStore) -> None:
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


def test_another_thread_encodes_what_one_fails_to_encode(store: KVStore) -> None:
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
def test_threads_that_lease_in_other_orders_do_not_deadlock(reopen: Open) -> None:
    store = reopen(40)
    failures: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            order = list(range(12))
            for _ in range(20):
                random.Random(seed).shuffle(order)
                numbers = order[:4]
                origin: Origin = ("warm", "question")[seed % 2]
                assert sources(store, *numbers, request=LeaseRequest(origin))
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
def test_a_question_waits_for_a_silent_machine_for_its_patience(reopen: Open) -> None:
    store, other = reopen(claim_patience=0.2), reopen()
    other.ledger.locks.acquire(keys(1))
    move_away(other, DEAD_SECONDS / 2)
    assert sources(store, 1) == ["encoded"]
    assert store.counters.unclaimed == 1
    assert other.ledger.claim(keys(1), ()) == ([], keys(1)), "the claim is still the other's"
    move_away(other, DEAD_SECONDS)
    assert sources(store, 2, 1, request=INGEST) == ["encoded", "host"]


@pytest.mark.usefixtures("silent")
def test_a_session_that_was_ended_while_silent_begins_again(reopen: Open) -> None:
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
def test_a_blob_whose_claim_was_lost_is_written_again(
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
