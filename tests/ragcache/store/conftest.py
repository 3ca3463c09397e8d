"""Fixtures and helpers of the store's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragcache.db import Database
from ragcache.db.jobs import Jobs
from ragcache.errors import RemoteUnavailable
from ragcache.states import KVKey, KVStates
from ragcache.store import HostTier, KVStore, LeaseRequest
from tests.ragcache.conftest import full_lease, make_key, make_states, same

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
