"""API keys of the service. The database keeps digests; a secret is shown once."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from ragcache.db.database import Database, StaleCache
from ragcache.db.sql import insert_new, namespace_id
from ragcache.db.tables import ApiKeyTable, NamespaceTable
from ragcache.errors import (
    ConfigurationError,
    LedgerUnavailable,
    StoreError,
    UnknownKey,
)
from ragcache.params import KeyParams, TakesOptions

logger = logging.getLogger(__name__)

_MARK = "rc-"
_SECRET_BYTES = 32
_SECRET = re.compile(rf"{_MARK}[A-Za-z0-9_-]{{32,200}}")
_SHOWN = 9  # readable characters of a secret: 36 of its 256 bits
_NAME = 100  # maximum characters of a name
_AGE = 10.0  # seconds after which keys are read again
_SEARCH_SECONDS = 1.0  # between two searches for secrets that are not among the keys in memory


class ApiKeyRow(KeyParams):
    """An API key, without its secret. Times are Unix seconds."""

    id: int
    name: str
    prefix: str
    """First characters of the secret."""
    created_at: float
    last_used: float | None = None
    """Unset until the key is used."""
    revoked_at: float | None = None
    """Unset while the key is valid."""


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Result of checking a secret."""

    exist: bool
    """Whether a key was ever made. Every request then needs one, even if all are revoked."""
    key: ApiKeyRow | None
    """Key of the secret, unless it is unknown or revoked."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The keys in memory."""

    read_at: float
    exist: bool
    active: dict[str, ApiKeyRow]
    """Keys that are not revoked, by digest."""


class ApiKeys:
    """The keys of all namespaces. Thread-safe.

    All keys stay in memory for ten seconds, so that a check reads no row. A key that another
    process has revoked is refused after that time, one revoked by this process at once. An unknown
    secret may be a key that another process has just made: once a second the keys are read again.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.monotonic,
        stale_seconds: float = 0.0,
    ) -> None:
        """Read keys that are up to `stale_seconds` old while the ledger does not answer."""
        self._read_keys = StaleCache[_Known](stale_seconds, clock)
        self._database, self._clock = database, clock
        self._known: _Known | None = None
        self._search_from = -math.inf
        self._used: dict[int, float] = {}
        self._lock = threading.Lock()

    @TakesOptions(KeyParams)
    def create(self, name: str, options: KeyParams) -> tuple[ApiKeyRow, str]:
        """Create a key, and return it with its secret.

        Args:
            name: Name to list the key under.
            options: The options of the key.

        Raises:
            ConfigurationError: The name or an option cannot be used.

        Example:
            >>> from ragcache import RagCache
            >>> with RagCache.open("state") as rag:
            ...     key, secret = rag.keys.create("page", role="admin")
        """
        secret = _MARK + secrets.token_urlsafe(_SECRET_BYTES)
        return self.register(name, secret, **options.given()), secret

    @TakesOptions(KeyParams)
    def register(self, name: str, secret: str, options: KeyParams) -> ApiKeyRow:
        """Create a key with a secret that exists elsewhere, such as in a Secret of Kubernetes.

        Args:
            name: Name to list the key under.
            secret: `rc-` and 32 to 200 letters, digits, `-` and `_`, chosen at random.
            options: The options of the key.

        Returns:
            The key. A key that has this secret already stays as it is.

        Raises:
            ConfigurationError: The name, the secret or an option cannot be used, or the key of this
                secret is revoked.

        Example:
            >>> import secrets
            >>> from ragcache import RagCache
            >>> secret = "rc-" + secrets.token_urlsafe(32)
            >>> with RagCache.open("state") as rag:
            ...     key = rag.keys.register("page", secret, role="admin")
        """
        if not name.strip() or len(name) > _NAME:
            raise ConfigurationError(f"a key needs a name of 1 to {_NAME} characters")
        if not _SECRET.fullmatch(secret):
            raise ConfigurationError(
                "the secret of a key is `rc-` and 32 to 200 random letters, digits, `-` and `_`; "
                f"this one has {len(secret)} characters in all"
            )
        digest = _digest(secret)
        with self._database.transaction() as session:
            row = {
                "name": name,
                "namespace_id": namespace_id(session, options.namespace),
                "prefix": secret[:_SHOWN],
                "digest": digest,
                "created_at": time.time(),
                **options.model_dump(exclude={"namespace"}),
            }
            insert_new(session, ApiKeyTable, [row])
            found = session.execute(_select().where(ApiKeyTable.digest == digest)).one()
            made = _row(*found)
        self.forget()
        if made.revoked_at is not None:
            raise ConfigurationError(
                f"key {made.id} has this secret and is revoked; choose another secret"
            )
        return made

    def list(self) -> list[ApiKeyRow]:
        """Return all keys, including revoked ones, the oldest first."""
        self.flush()
        with self._database.reading() as session:
            return [_row(*found) for found in session.execute(_select())]

    def revoke(self, key: int) -> None:
        """Refuse a key from now on. Does nothing if it is revoked. Raises `UnknownKey`."""
        with self._database.transaction() as session:
            row = session.get(ApiKeyTable, key)
            if row is None:
                raise UnknownKey(f"there is no key {key}; `ragcache keys ls` lists them")
            row.revoked_at = row.revoked_at or time.time()
        self.forget()

    def any(self) -> bool:
        """Whether a key was ever made."""
        return self._current().exist

    def check(self, secret: str) -> KeyCheck:
        """Look up the key of a secret. May read rows. Compares digests in constant time.

        While the ledger does not answer, a service that has read of no key is open to requests
        without a key only. A secret in the form of a key may belong to the first one.

        Raises:
            LedgerUnavailable: The keys cannot be read, or not whether the secret is a key.
        """
        entered = self._clock()
        found = self.check_in_memory(secret)
        if found is not None:
            return found
        with self._lock:  # concurrent threads read once
            found = self.check_in_memory(secret)
            if found is None:
                known = self._known
                if known is None or known.read_at <= entered:
                    known = self._reload()
                self._check_certain(known, secret)
                found = KeyCheck(known.exist, self._find(known, secret))
                if found.key is None and secret.startswith(_MARK):
                    self._search_from = self._clock() + _SEARCH_SECONDS
        return found

    def check_in_memory(self, secret: str) -> KeyCheck | None:
        """Check without waiting. Returns None when rows must be read first."""
        known = self._known
        if known is None or self._is_old(known):
            return None
        found = self._find(known, secret)
        if found is None and secret.startswith(_MARK) and self._may_search(known):
            return None
        return KeyCheck(known.exist, found)

    def flush(self) -> None:
        """Write the times of last use. If that fails, only these times are lost."""
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

    def _current(self) -> _Known:
        known = self._known
        if known is not None and not self._is_old(known):
            return known
        with self._lock:  # concurrent threads read once
            known = self._known
            return self._reload() if known is None or self._is_old(known) else known

    def _reload(self) -> _Known:
        self.flush()
        known = self._known = self._read_keys.read("", self._read)
        return known

    def _check_certain(self, known: _Known, secret: str) -> None:
        """Raise `LedgerUnavailable` for the secret of a key if no key was there at the last read.

        Its holder would be taken for a caller of a service without keys, who is an operator.
        """
        if not known.exist and secret.startswith(_MARK) and self._read_keys.failed > -math.inf:
            raise LedgerUnavailable(
                "the ledger does not answer, and this service has not read of any key yet; "
                "try again, or leave the key out if the service has none"
            )

    def _is_old(self, known: _Known) -> bool:
        return self._clock() - known.read_at > _AGE

    def _may_search(self, known: _Known) -> bool:
        """Whether the keys are read again for an unknown secret.

        Always while there is no key: the secret may belong to the first one, and its holder is not
        an operator.
        """
        return not known.exist or self._clock() >= self._search_from

    def _find(self, known: _Known, secret: str) -> ApiKeyRow | None:
        """Compare all digests, each as a whole, so that the time reveals nothing."""
        digest, found = _digest(secret), None
        for each, row in known.active.items():
            if hmac.compare_digest(each, digest):
                found = row
        if found is not None:
            self._used[found.id] = time.time()
        return found

    def forget(self) -> None:
        """Read the keys again at the next check: some have been created, revoked or deleted."""
        with self._lock:  # waits for a thread that reads the old keys
            self._known = None

    def _read(self) -> _Known:
        now = self._clock()
        with self._database.reading() as session:
            found = session.execute(_select()).all()
        for key, name in found:  # callers of a deleted namespace are known by its id
            self._database.namespaces.setdefault(name, key.namespace_id)
        rows = [(key.digest, _row(key, name)) for key, name in found]
        active = {digest: row for digest, row in rows if row.revoked_at is None}
        return _Known(now, bool(rows), active)


def _digest(secret: str) -> str:
    """Return the SHA-256 of a secret. A random number of 256 bits needs no slow hash."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _select() -> Any:
    joined = select(ApiKeyTable, NamespaceTable.name).join(NamespaceTable)
    return joined.order_by(ApiKeyTable.id)


def _row(key: ApiKeyTable, namespace: str) -> ApiKeyRow:
    names = ApiKeyRow.model_fields.keys() - {"namespace"}
    return ApiKeyRow(namespace=namespace, **{name: getattr(key, name) for name in names})
