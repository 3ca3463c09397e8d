"""Who calls: API keys with roles and namespaces."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from ragcache.config import NAMESPACE
from ragcache.store import Keys
from ragcache_api.http.errors import Refusal


@dataclass(frozen=True, slots=True)
class Caller:
    """name: of the key, "" where none is needed. bucket: what rate limits count under."""

    name: str
    role: str
    namespace: str
    bucket: str

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see what all namespaces share."""
        return self.role == "admin" and self.namespace == NAMESPACE


@dataclass(frozen=True, slots=True)
class Doorkeeper:
    """Checks keys. They stay in memory; now and then they are read again, which may wait."""

    keys: Keys

    async def caller(self, authorization: str | None, address: str) -> Caller:
        """Raises `Refusal` (401). Until a first key is made everybody is an administrator: the
        service listens on loopback alone then."""
        return await run_in_threadpool(self._caller, authorization, address)

    def _caller(self, authorization: str | None, address: str) -> Caller:
        if not self.keys.any():
            return Caller("", "admin", NAMESPACE, address)
        scheme, _, secret = (authorization or "").partition(" ")
        row = self.keys.check(secret.strip()) if scheme.lower() == "bearer" else None
        if row is None:
            raise Refusal(
                401, "unauthorised",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )  # fmt: skip
        return Caller(row.name, row.role, row.namespace, f"key {row.id}")
