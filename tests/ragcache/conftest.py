"""Shared by the tests of the store: small states, their keys, and an empty database."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from sqlalchemy import create_engine

from ragcache.db import Database, Ledger
from ragcache.db.state_rows import StateRow
from ragcache.db.tables import Base
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVKey, KVStates
from ragcache.states.recurrent import RecurrentStates
from ragcache.store import KVStore, Lease, LeaseRequest
from tests.tiny_models import FAMILY_PARAMS, tiny_model

TOKEN_BYTES = 64  # of one token in `make_states`: 2 sides, 2 layers, 1 head, 4 floats


Produce = Callable[[Sequence[KVKey]], Iterable[KVStates]]
"""Encodes the states of keys, in order."""


def make_key(number: int) -> KVKey:
    return KVKey(f"{number:02x}" * 32)


def make_maps(dtype: torch.dtype = torch.float32, heads: int = 2) -> RecurrentStates:
    """Maps of five recurrent layers. Without heads, the layers are convolutions alone."""
    decays, steps = torch.randn(2, 5, heads, 3, 1)
    shapes = (5, heads, 4, 4), (5, heads, 4, 7), (5, 1, 9, 3), (5, 1, 9, 4)
    transition, increment, first, last = (torch.randn(shape).to(dtype) for shape in shapes)
    return RecurrentStates(transition, increment, decays, steps, first, last)


def make_states(number: int, tokens: int = 1) -> KVStates:
    """States whose every element tells their number."""
    filled = torch.full((2, 1, tokens, 4), float(number))
    return KVStates(filled, -filled, number)


def same(found: KVStates | None, expected: KVStates) -> bool:
    return (
        found is not None
        and torch.equal(found.keys, expected.keys)
        and torch.equal(found.values, expected.values)
        and found.start == expected.start
    )


def record_row(ledger: Ledger, row: StateRow) -> None:
    """Records states as a process does that has written their blob."""
    ledger.locks.acquire([row.key])
    assert ledger.record([row], [row.key])


def encode_missing(lease: Lease, produce: Produce) -> None:
    """Drives a lease until all its states are there."""
    while missing := lease.claim():
        for key, states in zip(missing, produce(missing), strict=True):
            lease.put(key, states)


def full_lease(
    store: KVStore, keys: Sequence[KVKey], produce: Produce, request: LeaseRequest | None = None
) -> Lease:
    """Leases keys and has their missing states made, as the pipeline does."""
    lease = store.lease(keys, request)
    try:
        encode_missing(lease, produce)
    except BaseException:
        lease.release()
        raise
    return lease


def postgres_url() -> str:
    """Return the URL of a PostgreSQL to test with; without one, skip the test."""
    url = os.environ.get("RAGCACHE_TEST_POSTGRES_URL")
    if not url:
        pytest.skip("RAGCACHE_TEST_POSTGRES_URL is not set")
    return url


@contextmanager
def postgres_schema() -> Iterator[str]:
    """The URL of an empty PostgreSQL schema, which is dropped afterwards."""
    url, name = postgres_url(), f"ragcache_{uuid4().hex}"
    admin = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with admin.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    yield f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{name}"
    with admin.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
    admin.dispose()


class MigratedSchema:
    """A PostgreSQL schema with the tables of a ledger, for one test after another."""

    def __init__(self, url: str) -> None:
        self.url = url
        Database.open(url).close()
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        self._tables = Base.metadata.sorted_tables
        with self._engine.begin() as connection:
            rows = {table: connection.execute(table.select()).all() for table in self._tables}
            counters = connection.exec_driver_sql(
                "SELECT sequencename, last_value FROM pg_sequences "
                "WHERE schemaname = current_schema()"
            ).all()
        self._first_rows = {
            table: [row._asdict() for row in found] for table, found in rows.items() if found
        }
        self._reset = "SELECT " + ", ".join(
            f"setval('{name}', {last or 1}, {last is not None})" for name, last in counters
        )

    def empty(self) -> None:
        """Make the rows as migrations leave them."""
        with self._engine.begin() as connection:
            for table in reversed(self._tables):
                connection.execute(table.delete())
            for table, rows in self._first_rows.items():
                connection.execute(table.insert(), rows)
            connection.exec_driver_sql(self._reset)

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture(scope="session")
def migrated_schema() -> Iterator[MigratedSchema]:
    with postgres_schema() as url, closing(MigratedSchema(url)) as schema:
        yield schema


@pytest.fixture
def postgres_ledger(socket_enabled: None, migrated_schema: MigratedSchema) -> str:
    """The URL of an empty ledger. Emptying one takes a tenth of the time of making it; tests of
    migrations override this."""
    migrated_schema.empty()
    return migrated_schema.url


# `make test` needs no server: what differs between the databases is seen in `make test-all`.
DATABASES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.slow))


@pytest.fixture(params=DATABASES)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """The place of an empty ledger for several processes, in each kind of database."""
    if request.param == "sqlite":
        return tmp_path / "ledger.sqlite3"
    return str(request.getfixturevalue("postgres_ledger"))


@pytest.fixture(scope="module", params=DATABASES)
def shared_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """One database of each kind for all tests of a file, which only read what it is filled with.
    The file has the mark `enable_socket`."""
    with ExitStack() as stack:
        where: Path | str = tmp_path_factory.mktemp("ledger") / "ledger.sqlite3"
        if request.param == "postgresql":
            where = stack.enter_context(postgres_schema())
        yield stack.enter_context(closing(Database.open(where)))


@pytest.fixture
def database(where: Path | str) -> Iterator[Database]:
    opened = Database.open(where)
    yield opened
    opened.close()


@pytest.fixture(params=FAMILY_PARAMS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def causal() -> CausalLM:
    """A patched tiny Llama."""
    return wrap_causal(tiny_model("llama"))


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers of split models are forked, where imports of their own are not what is tested."""
    from ragcache.models.parallel import ranks
    from tests.forks import ForkedFollower  # not every system forks

    stand_in = SimpleNamespace(
        Popen=ForkedFollower,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    monkeypatch.setattr(ranks, "subprocess", stand_in)
