"""Databases and disks that fail while a store is open."""

from __future__ import annotations

import errno
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

from ragcache.db import Catalog, Database
from ragcache.errors import LedgerUnavailable, StoreFull, StoreUnwritable
from ragcache.store import KVStore, LeaseRequest
from ragcache.store.tiers import base
from ragcache.store.verify import verify
from tests.ragcache.conftest import full_lease, postgres_schema, same
from tests.ragcache.store.store_fixture import Library, key_of, states_of

PORT = 5432  # of PostgreSQL where a URL has none


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    opened = Library(tmp_path, tmp_path / "ledger.sqlite")
    opened.put("ash", 1)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("number", "named"), [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreUnwritable)]
)
def test_a_disk_that_takes_no_more_stops_ingestion_only(
    library: Library, monkeypatch: pytest.MonkeyPatch, number: int, named: type[Exception]
) -> None:
    def refuse(path: Path, parts: list[memoryview]) -> None:
        path.write_bytes(bytes(parts[0])[:10])
        raise OSError(number, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(base, "write_through", refuse)
        with pytest.raises(named):
            library.put("elm", 1)
        assert set(library.read("ash")) == {"host"}
        assert library.versions() == {"ash": 1}
    assert not list(library.store.disk.folder.glob("??/*.part"))
    assert verify(library.store).found == ()
    library.put("elm", 1)
    assert library.versions() == {"ash": 1, "elm": 1}


def test_a_disk_that_cannot_be_read_costs_an_encoding(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache.errors import StoreUnreadable

    def refuse(*_: object) -> None:
        raise StoreUnreadable("I/O error")

    library.store.evict(library.keys("ash"), "host")
    with monkeypatch.context() as patched:
        for name in ("get", "load"):
            patched.setattr(library.store.disk, name, refuse)
        assert set(library.read("ash")) == {"encoded"}
    assert library.store.counters.unreadable > 0
    assert library.store.counters.corrupt == 0
    assert set(library.store.disk.keys()) == library.store.ledger.keys("disk")


def test_a_locked_ledger_serves_what_is_in_memory(tmp_path: Path, library: Library) -> None:
    database = Database.open(tmp_path / "ledger.sqlite", busy_seconds=0.05)
    store = KVStore.open(tmp_path, database, 1 << 20)
    keys = library.keys("ash")
    store.fetch(keys).release()
    locker = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    with store.fetch(keys) as lease:
        assert set(lease.source.values()) == {"host"}
    store.sweep()
    assert store.ledger.failures > 0
    assert Catalog(database, "tokenizer", None).modules("library"), "readers do not wait"
    with pytest.raises(LedgerUnavailable):
        store.jobs.begin("collection x", 0)
    new = key_of("new")
    with full_lease(store, [new], lambda _: [states_of(new)]) as lease:
        assert same(lease.states[0], states_of(new)), "a question does without the ledger"
    with pytest.raises(LedgerUnavailable):
        full_lease(store, [key_of("newer")], library.produce, LeaseRequest("ingest"))
    locker.execute("ROLLBACK")
    locker.close()
    store.sweep()
    assert {row.hits for row in store.ledger.find(keys)} == {2}
    store.close()
    database.close()


class Switch:
    """A socket before PostgreSQL's that can be closed and opened again."""

    def __init__(self, folder: Path, url: URL) -> None:
        self.path = folder / f".s.PGSQL.{url.port or PORT}"
        self._target = connector(url)
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None

    def through(self, url: str) -> str:
        """The URL of the same database through the switch."""
        given = make_url(url)
        other = given.set(query={**given.query, "host": str(self.path.parent)})
        return other.render_as_string(hide_password=False)

    def on(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def off(self) -> None:
        assert self._listener is not None
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()
        self.path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = self._target()
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            sink.sendall(content)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def connector(url: URL) -> Callable[[], socket.socket]:
    """Connects to the PostgreSQL of a URL."""
    host = str(url.host or url.query.get("host") or "/var/run/postgresql")
    port = url.port or PORT

    def connect() -> socket.socket:
        if host.startswith("/"):
            found = socket.socket(socket.AF_UNIX)
            found.connect(f"{host}/.s.PGSQL.{port}")
            return found
        return socket.create_connection((host, port))

    return connect


@pytest.mark.slow
@pytest.mark.usefixtures("socket_enabled")
def test_postgresql_goes_away_and_comes_back(tmp_path: Path) -> None:
    with postgres_schema() as text:
        switch = Switch(tmp_path, make_url(text))
        switch.on()
        library = Library(tmp_path, switch.through(text))
        library.put("ash", 1)
        keys = library.keys("ash")
        library.store.fetch(keys).release()
        switch.off()
        with library.store.fetch(keys) as lease:
            assert set(lease.source.values()) == {"host"}
        with pytest.raises(LedgerUnavailable):
            library.put("elm", 1)
        with pytest.raises(LedgerUnavailable):
            library.versions()
        library.store.sweep()
        assert library.store.ledger.failures > 0
        switch.on()
        library.put("elm", 2)
        assert library.versions() == {"ash": 1, "elm": 2}
        library.store.sweep()
        assert max(row.hits for row in library.store.ledger.find(keys)) >= 2
        assert verify(library.store).found == ()
        library.close()
        switch.off()
