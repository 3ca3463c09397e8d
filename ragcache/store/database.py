"""The connection to the ledger's database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session, sessionmaker

from ragcache.errors import NoState, StoreFull, StoreUnwritable
from ragcache.store.tables import Base

CHUNK = 500  # values in one statement, below SQLite's limit on variables


class Database:
    """One SQLite file in WAL mode, with foreign keys enforced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    @classmethod
    def open(cls, path: Path) -> Database:
        """Opens or creates the file. Raises `StoreUnwritable`, `StoreFull` or `NoState`."""
        engine = create_engine(
            f"sqlite:///{path}",
            connect_args={"timeout": 30},
            json_serializer=partial(json.dumps, default=str),  # metadata may hold dates and paths
        )
        event.listen(engine, "connect", _configure)
        database = cls(engine)
        with _named_errors(path):
            Base.metadata.create_all(engine)
        return database

    @classmethod
    def open_existing(cls, path: Path) -> Database:
        """Opens a file that is there already. Raises `NoState`."""
        if not path.exists():
            raise NoState(
                f"there is no ragcache state in {path.parent}; make one with "
                f"`ragcache ingest COLLECTION PATH --state {path.parent}`"
            )
        return cls.open(path)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session that commits at the end, or rolls back on an error."""
        with _named_errors(self.engine.url.database), self._sessions.begin() as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()


def _configure(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


@contextmanager
def _named_errors(where: object) -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        text = str(error.orig)
        if "full" in text:
            raise StoreFull(f"no space left for the ledger {where}; free some space") from error
        if "readonly" in text or "unable to open" in text:
            raise StoreUnwritable(f"cannot write the ledger {where}: {text}") from error
        if "not a database" in text or "malformed" in text:
            raise NoState(
                f"{where} is not a ragcache ledger ({text}); move it away and ingest again"
            ) from error
        raise
