"""Who calls: API keys with roles and namespaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyio import CapacityLimiter, to_thread

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeys
from ragcache_api.http.errors import Refusal

_THREADS = 4  # that wait for keys; one of them reads, for all


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
    """Checks keys from memory, in the event loop. Now and then they are read again, in threads that
    no other work can take."""

    keys: ApiKeys
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_THREADS))

    async def caller(self, authorization: str | None, address: str) -> Caller:
        """Raises `Refusal` (401). Until a first key is made everybody is an administrator: the
        service listens on loopback alone then."""
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        verdict = self.keys.recall(secret)
        if verdict is None:
            verdict = await to_thread.run_sync(self.keys.judge, secret, limiter=self.threads)
        if not verdict.exist:
            return Caller("", "admin", NAMESPACE, address)
        row = verdict.key
        if row is None:
            raise Refusal(
                401, "unauthorized",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )  # fmt: skip
        return Caller(row.name, row.role, row.namespace, f"key {row.id}")
