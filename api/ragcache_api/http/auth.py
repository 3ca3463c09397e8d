"""Who calls: API keys with roles and namespaces."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ragcache_api.http.errors import Refusal

Role = Literal["user", "admin"]


class KeyRow(Protocol):
    """What the service needs to know of a key."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def namespace(self) -> str: ...


class Keys(Protocol):
    """The part of `rag.keys` that checks."""

    def check(self, secret: str) -> KeyRow | None: ...
    def any(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """name: of the key, "" where none is needed. bucket: what rate limits count under."""

    name: str
    role: str
    namespace: str
    bucket: str


@dataclass(slots=True)
class Doorkeeper:
    """Checks keys in the ledger, and believes what it saw for `seconds`."""

    keys: Keys
    seconds: float
    _seen: dict[bytes, tuple[float, KeyRow | None]] = field(default_factory=dict)
    _any: tuple[float, bool] = (-1e9, False)

    async def caller(self, authorization: str | None, address: str) -> Caller:
        """Raises `Refusal` (401). Without any key in the ledger everybody is an administrator: the
        service listens on loopback alone then."""
        if not await self.locked():
            return Caller("", "admin", "default", address)
        scheme, _, secret = (authorization or "").partition(" ")
        row = await self._check(secret.strip()) if scheme.lower() == "bearer" else None
        if row is None:
            raise Refusal(
                401, "unauthorised",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )  # fmt: skip
        return Caller(row.name, row.role, row.namespace, f"key {row.id}")

    async def locked(self) -> bool:
        """Whether a key exists."""
        at, known = self._any
        if time.monotonic() - at > self.seconds:
            known = await asyncio.to_thread(self.keys.any)
            self._any = (time.monotonic(), known)
        return known

    async def _check(self, secret: str) -> KeyRow | None:
        digest = hashlib.sha256(secret.encode()).digest()
        at, row = self._seen.get(digest, (-1e9, None))
        if time.monotonic() - at > self.seconds:
            row = await asyncio.to_thread(self.keys.check, secret)
            if len(self._seen) > 10_000:
                self._seen.clear()
            self._seen[digest] = (time.monotonic(), row)
        return row
