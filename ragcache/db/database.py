"""The connection to the application database: a SQLite file, or PostgreSQL."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple

from sqlalchemy import Engine, Row, Select, create_engine, event, make_url
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from ragcache.db.migrations import HEAD, migrate, revision_of
from ragcache.db.sql import NAMESPACES
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    InvalidRequest,
    LedgerUnavailable,
    MissingExtra,
    NoState,
    StoreFull,
    StoreUnwritable,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BUSY_SECONDS = 30.0  # how long a writer waits for another one of the same SQLite file
_CONNECT_SECONDS = 5
APPLICATION_NAME = "ragcache"
"""Name of the connections in `pg_stat_activity`, unless the URL has an `application_name`."""
CONNECTIONS_KEPT = 3
"""Connections to PostgreSQL that a process keeps. More are closed after their use."""
_MOST_CONNECTIONS = 15
_REST_SECONDS = 1.0  # pause before a ledger that failed is read again
_READS = {"ragcache_begin": "BEGIN"}
_ONE_READ = {"ragcache_begin": None}  # one statement is a transaction by itself
_SNAPSHOT = {"isolation_level": "REPEATABLE READ"}  # for PostgreSQL; SQLite always reads a snapshot


class Database:
    """One database, a SQLite file or PostgreSQL.

    SQLite runs in WAL mode with foreign keys enforced. Writers wait for their turn at the start of
    a transaction, so that none fails half-way.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._closed = False
        self.namespaces: dict[str, int] = {}
        """Ids of the namespaces that this process uses. `namespace_id` compares them."""
        info = {NAMESPACES: self.namespaces}
        self._writes = sessionmaker(engine, expire_on_commit=False, info=info)
        shared = engine.dialect.name == "postgresql"
        self._reading = engine.execution_options(**_READS, **(_SNAPSHOT if shared else {}))
        self._reading_once = engine.execution_options(**_ONE_READ)
        self._reads = sessionmaker(self._reading, expire_on_commit=False)
        self._watch = _Watch(None if shared else engine.url.database)
        self._compiled: dict[Any, tuple[str, Sequence[str]]] = {}  # with their parameters

    @classmethod
    def open(cls, where: Path | str, *, busy_seconds: float = BUSY_SECONDS) -> Database:
        """Open a database: a path, `sqlite:///PATH` or `postgresql://USER@HOST/NAME`.

        Creates a file that does not exist, and the tables of an empty database. Upgrades the tables
        of an earlier release.

        Raises:
            ConfigurationError: The URL names another kind of database.
            MissingExtra: PostgreSQL's driver is not installed.
            NoState: The file is not a ledger.
            LedgerOfOtherVersion: A later version of ragcache made the tables, or one of an earlier
                version has them open.
            StoreError: The database cannot be read or written.
        """
        database = cls.connect(where, busy_seconds)
        if database.engine.dialect.name == "sqlite":
            _create_private(Path(database.name))
        with _named_errors(database.name):
            with database._reading.connect() as connection:
                revision = revision_of(connection)
            if revision != HEAD:
                with database.engine.begin() as connection:
                    migrate(database.name, connection)
        return database

    @classmethod
    def connect(cls, where: Path | str, busy_seconds: float = BUSY_SECONDS) -> Database:
        """Connect as `open` does, without checking or creating tables."""
        return cls(_engine(database_url(where), busy_seconds))

    @classmethod
    def open_existing(cls, path: Path) -> Database:
        """Open an existing file. Raises `NoState`."""
        if not path.exists():
            raise NoState.in_folder(path.parent)
        return cls.open(path)

    @property
    def name(self) -> str:
        """Path of the file, or the URL without its password."""
        url = self.engine.url
        return str(url.database) if url.get_backend_name() == "sqlite" else str(url)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a session that commits at the end, or rolls back on an error.

        Raises:
            StoreError: The database cannot be written.
            EngineClosed: `close` was called.
        """
        self._check_open()
        with _named_errors(self.name), self._writes.begin() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session that reads one snapshot and waits for no writer.

        Raises as `transaction`.
        """
        self._check_open()
        with _named_errors(self.name), self._reads.begin() as session:
            yield session

    def fetch(self, statement: Select[*Ts], **parameters: object) -> Sequence[Row[*Ts]]:
        """Return the rows of one statement, in a quarter of the time of a session.

        Raises as `transaction`.
        """
        self._check_open()
        with _named_errors(self.name), self._reading_once.connect() as connection:
            return connection.execute(statement, parameters).all()

    def fetch_values(self, statement: Select[*Ts], **parameters: object) -> Sequence[Any]:
        """Return the rows of one statement whose columns are numbers and texts.

        Takes a tenth of the time of `fetch` where the ledger is a file. Raises as `transaction`.
        """
        self._check_open()
        if statement not in self._compiled:
            compiled: Any = statement.compile(self.engine)
            self._compiled[statement] = str(compiled), compiled.positiontup or ()
        text, names = self._compiled[statement]
        rows = self._watch.rows(text, [parameters[name] for name in names])
        return self.fetch(statement, **parameters) if rows is None else rows

    def changes(self) -> int | None:
        """Return a number that differs after anybody has changed the ledger.

        Takes a tenth of the time of a query. Returns None for PostgreSQL and for a file that does
        not answer: only queries tell then.
        """
        self._check_open()
        return self._watch.version()

    def close(self) -> None:
        self._closed = True
        self._watch.close()
        self.engine.dispose()

    def _check_open(self) -> None:
        if self._closed:  # SQLAlchemy would connect again
            raise EngineClosed.of_folder()


class _Watch:
    """A connection to a SQLite file that never writes, so that all changes are others'.

    Thread-safe.
    """

    def __init__(self, file: str | None) -> None:
        # rw: a file that is gone is not created again
        self._uri = None if file is None else f"{Path(file).absolute().as_uri()}?mode=rw"
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def version(self) -> int | None:
        """Return SQLite's `data_version`, or None without a file or an answer."""
        rows = self.rows("PRAGMA data_version")
        return rows[0][0] if rows else None

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Any] | None:
        """Return the rows of a statement, or None without a file or an answer."""
        if self._uri is None:
            return None
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error:
                return None

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class Unchanged:
    """Results of queries by name, valid until anybody changes the ledger. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._values: dict[Hashable, tuple[int, Any]] = {}

    def read(self, name: Hashable, query: Callable[[], T]) -> T:
        """Return the last result of this name, or else run the query. Raises its errors."""
        changes = self._database.changes()  # read before the query, which may see later changes
        known = self._values.get(name)
        if known is not None and known[0] == changes:
            value: T = known[1]
            return value
        self._values.pop(name, None)  # the query may find nothing of this name any more
        value = query()
        if changes is not None:
            self._values[name] = changes, value
        return value


class StaleCache(Generic[T]):
    """Results of queries by name, to use while the ledger does not answer. Thread-safe.

    A ledger that has just failed is not asked for a second: if it hangs, every question would wait
    for it.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        """Create an empty cache of values up to `seconds` old. With 0 it never serves a value."""
        self._seconds, self._now = seconds, now
        self._values: dict[str, tuple[float, T]] = {}
        self._failed = -math.inf
        self.answered = -math.inf
        """Time of the last query that the ledger answered."""

    @property
    def failed(self) -> float:
        """Time of the last query, if the ledger did not answer it."""
        return self._failed

    def read(self, name: str, query: Callable[[], T]) -> T:
        """Run the query. If the ledger does not answer, return the last result of this name.

        Raises the query's errors, and `LedgerUnavailable` if there is no result that is new enough.
        """
        known, now = self._values.get(name), self._now()
        fresh = known is not None and now - known[0] <= self._seconds
        if known is not None and fresh and now - self._failed < _REST_SECONDS:
            return known[1]
        try:
            value = query()
        except LedgerUnavailable:
            self._failed = self._now()
            if known is None or not fresh:
                raise
            return known[1]
        except BaseException:
            self._values.pop(name, None)
            raise
        self._values[name] = now, value
        self._failed, self.answered = -math.inf, self._now()
        return value


def database_url(where: Path | str) -> str:
    """Return the URL for SQLAlchemy. Raises `ConfigurationError` for another kind of database."""
    scheme, separator, rest = str(where).partition("://")
    if isinstance(where, Path) or not separator:
        return f"sqlite:///{where}"
    if scheme in ("postgresql", "postgres"):
        return f"postgresql+psycopg://{rest}"
    if scheme in ("sqlite", "postgresql+psycopg"):
        return where
    raise ConfigurationError(f"the ledger cannot be kept in {scheme}; use sqlite or postgresql")


def _engine(url: str, busy_seconds: float) -> Engine:
    encode = partial(json.dumps, default=str)  # metadata may hold dates and paths
    if make_url(url).get_backend_name() == "sqlite":
        arguments: dict[str, Any] = {"timeout": busy_seconds}
        engine = create_engine(url, connect_args=arguments, json_serializer=encode)
        event.listen(engine, "connect", _configure)
        event.listen(engine, "begin", _begin)
        return engine
    arguments = {"connect_timeout": _CONNECT_SECONDS, "fallback_application_name": APPLICATION_NAME}
    try:
        return create_engine(
            url,
            connect_args=arguments,
            json_serializer=encode,
            pool_pre_ping=True,
            pool_size=CONNECTIONS_KEPT,
            max_overflow=_MOST_CONNECTIONS - CONNECTIONS_KEPT,
        )
    except ModuleNotFoundError as error:
        raise MissingExtra("PostgreSQL needs psycopg: pip install 'ragcache[postgres]'") from error


def _create_private(file: Path) -> None:
    """Create a file that only its owner can read. SQLite's log gets the mode of its database."""
    with suppress(OSError):  # it exists, or SQLite names the reason that it cannot be created
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _configure(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy begins transactions: `_begin`
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin(connection: Any) -> None:
    """Begin a transaction. A writer waits for its turn here, not at its first write.

    SQLite would refuse a writer whose reads another writer has outdated.
    """
    begin = connection.get_execution_options().get("ragcache_begin", "BEGIN IMMEDIATE")
    if begin is not None:
        connection.exec_driver_sql(begin)


@contextmanager
def _named_errors(where: object) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        reason = str(error.orig)
        if isinstance(error, DataError):  # PostgreSQL's texts hold no NUL
            raise InvalidRequest(f"the ledger cannot hold a value: {reason.strip()}") from error
        if "full" in reason or "No space left" in reason:
            raise StoreFull(f"no space left for the ledger {where}; free some space") from error
        if any(sign in reason for sign in ("readonly", "read-only", "unable to open")):
            raise StoreUnwritable(f"cannot write the ledger {where}: {reason}") from error
        if "not a database" in reason or "malformed" in reason:
            raise NoState(
                f"{where} is not a ragcache ledger ({reason}); move it away and ingest again"
            ) from error
        if isinstance(error, OperationalError) or error.connection_invalidated:
            raise LedgerUnavailable(
                f"the ledger {where} does not answer ({reason.strip()}); what is in memory is "
                "served, everything else has to wait for it"
            ) from error
        raise
