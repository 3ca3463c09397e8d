"""API keys of the service. The database keeps digests; a secret is shown once."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from ragcache.config import NAMESPACE, check_namespace
from ragcache.db.database import Database, StaleCache
from ragcache.db.sql import namespace_id
from ragcache.db.tables import ApiKeyTable, NamespaceTable
from ragcache.errors import ConfigurationError, StoreError, UnknownKey

logger = logging.getLogger(__name__)

ROLES = ("user", "admin")

_MARK = "rc-"
_SECRET_BYTES = 32
_SHOWN = 9  # characters of a secret that stay readable: 36 of its 256 bits
_NAME = 100  # characters
_AGE = 10.0  # seconds after which keys are read again
_UNKNOWN_AGE = 1.0  # where a secret is not known: another process may just have made it


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """A key. prefix: the first characters of its secret. Times in Unix seconds."""

    id: int
    name: str
    role: str
    namespace: str
    prefix: str
    created_at: float
    last_used: float | None
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Result of checking a secret."""

    exist: bool
    """Whether a key was ever made. Then every request needs one, even if all are revoked."""
    key: ApiKeyRow | None
    """Key of the secret. None for an unknown or a revoked one."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The keys in memory."""

    read_at: float
    exist: bool
    active: dict[str, ApiKeyRow]
    """Keys that are not revoked, by digest."""


class ApiKeys:
    """The keys of all namespaces. Thread-safe.

    A check reads no row: all keys stay in memory for ten seconds, after which a key that another
    process has revoked is refused. One that is revoked here is refused at once.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float] = time.monotonic,
        stale_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """stale_seconds: how old the keys may be while the ledger does not answer."""
        self._read_keys = StaleCache[_Known](stale_seconds, clock)
        self._database, self._clock = database, clock
        self._known: _Known | None = None
        self._used: dict[int, float] = {}
        self._lock = threading.Lock()

    def create(
        self, name: str, role: str = "user", namespace: str = NAMESPACE
    ) -> tuple[ApiKeyRow, str]:
        """Return a new key and its secret. Raises `ConfigurationError`."""
        if role not in ROLES:
            raise ConfigurationError(f"unknown role {role!r}; roles: {', '.join(ROLES)}")
        if not name.strip() or len(name) > _NAME:
            raise ConfigurationError(f"a key needs a name of 1 to {_NAME} characters")
        check_namespace(namespace)
        secret = _MARK + secrets.token_urlsafe(_SECRET_BYTES)
        prefix, now = secret[:_SHOWN], time.time()
        with self._database.transaction() as session:
            row = ApiKeyTable(
                name=name, role=role, namespace_id=namespace_id(session, namespace), prefix=prefix,
                digest=_digest(secret), created_at=now,
            )  # fmt: skip
            session.add(row)
            session.flush()
            made = ApiKeyRow(row.id, name, role, namespace, prefix, now, None, None)
        self._forget()
        return made, secret

    def list(self) -> list[ApiKeyRow]:
        """Return all keys, the revoked ones too, the oldest first."""
        self.flush()
        with self._database.reading() as session:
            return [_row(*found) for found in session.execute(_select())]

    def revoke(self, key: int) -> None:
        """Refuse a key from now on; one that is revoked stays so. Raises `UnknownKey`."""
        with self._database.transaction() as session:
            row = session.get(ApiKeyTable, key)
            if row is None:
                raise UnknownKey(f"there is no key {key}; `ragcache keys ls` lists them")
            row.revoked_at = row.revoked_at or time.time()
        self._forget()

    def any(self) -> bool:
        """Whether a key was ever made."""
        return self._current(_AGE).exist

    def check(self, secret: str) -> KeyCheck:
        """Find the key of a secret. May read rows. Only digests are compared, in constant time."""
        found = self.check_in_memory(secret)
        if found is None:
            known = self._current(_UNKNOWN_AGE)
            found = KeyCheck(known.exist, self._find(known, secret))
        return found

    def check_in_memory(self, secret: str) -> KeyCheck | None:
        """Check without waiting. Returns None if rows must be read first."""
        known = self._known
        if known is None or self._age(known) > _AGE:
            return None
        found = self._find(known, secret)
        if found is None and secret.startswith(_MARK) and self._age(known) > _UNKNOWN_AGE:
            return None
        return KeyCheck(known.exist, found)

    def flush(self) -> None:
        """Write when keys were last used; where that fails, only these times are lost."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            with self._database.transaction() as session:
                for key, at in used.items():
                    row = update(ApiKeyTable).where(ApiKeyTable.id == key)
                    session.execute(row.values(last_used=at))
        except StoreError as error:
            logger.warning("%s; the last use of %s keys is not noted", error, len(used))

    def _current(self, age: float) -> _Known:
        known = self._known
        if known is not None and self._age(known) <= age:
            return known
        with self._lock:  # threads that come at once read once
            known = self._known
            if known is None or self._age(known) > age:
                self.flush()
                known = self._known = self._read_keys.read("", self._read)
            return known

    def _age(self, known: _Known) -> float:
        return self._clock() - known.read_at

    def _find(self, known: _Known, secret: str) -> ApiKeyRow | None:
        """Compare all digests, each as a whole, so that the time reveals nothing of either."""
        digest, found = _digest(secret), None
        for each, row in known.active.items():
            if hmac.compare_digest(each, digest):
                found = row
        if found is not None:
            self._used[found.id] = time.time()
        return found

    def _forget(self) -> None:
        with self._lock:  # after a thread that is reading the keys of before
            self._known = None

    def _read(self) -> _Known:
        now = self._clock()
        with self._database.reading() as session:
            rows = [(key.digest, _row(key, name)) for key, name in session.execute(_select())]
        active = {digest: row for digest, row in rows if row.revoked_at is None}
        return _Known(now, bool(rows), active)


def _digest(secret: str) -> str:
    """Secrets are random numbers of 256 bits, which need no slow hash."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _select() -> Any:
    joined = select(ApiKeyTable, NamespaceTable.name).join(NamespaceTable)
    return joined.order_by(ApiKeyTable.id)


def _row(key: ApiKeyTable, namespace: str) -> ApiKeyRow:
    return ApiKeyRow(
        key.id, key.name, key.role, namespace, key.prefix, key.created_at, key.last_used,
        key.revoked_at,
    )  # fmt: skip
