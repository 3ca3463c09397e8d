"""Replicas within the test's process: real services over one ledger, which can be lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.types import Message

from ragcache import RagCache
from ragcache_api.cluster.replicas import (
    ForwardedRequest,
    ReplicaLost,
    ReplicaStatus,
    RoutingTable,
    run_app,
)
from ragcache_api.http import ServiceSettings, create_app


@dataclass
class LocalReplica:
    """loses: after how many messages it is lost, for the next request; None for never."""

    name: str
    rag: RagCache
    loses: int | None = None
    running: int = 0
    draining: bool = False
    seen: list[ForwardedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = create_app(self.rag, ServiceSettings.read(page=False))

    @property
    def session(self) -> str:
        return self.rag.internals.shared.store.ledger.sessions.id

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.name, self.session, self.running, self.draining)


@dataclass
class LocalReplicas:
    """A `ReplicaSet`. encoded: all that any of them had to encode."""

    replicas: list[LocalReplica]
    table: RoutingTable
    gone: Counter[str] = field(default_factory=Counter)

    async def open(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        name = self.table.choose(request.located, [each.status() for each in self.replicas])
        replica = next(each for each in self.replicas if each.name == name)
        replica.seen.append(request)
        replica.running += 1
        left, replica.loses = replica.loses, None
        try:
            async with aclosing(run_app(replica.app, request)) as messages:
                if left == 0:
                    raise ReplicaLost("it has ended")
                async for message in messages:
                    yield message
                    left = None if left is None else left - 1
                    if left == 0:
                        self.gone[name] += 1
                        raise ReplicaLost("it has ended")
        finally:
            replica.running -= 1

    async def statuses(self) -> list[ReplicaStatus]:
        await asyncio.sleep(0)
        return [each.status() for each in self.replicas]

    async def drain(self, name: str, *, draining: bool) -> bool:
        found = [each for each in self.replicas if each.name == name]
        for each in found:
            each.draining = draining
        return bool(found)

    async def call_all(self, request: ForwardedRequest) -> dict[str, list[Message]]:
        answered = {}
        for each in self.replicas:
            answered[each.name] = [message async for message in run_app(each.app, request)]
        return answered

    @property
    def encoded(self) -> int:
        return sum(each.rag.stats().encoded for each in self.replicas)
