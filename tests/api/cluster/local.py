"""Replicas within the test's process: real services over one ledger, which can be lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from ragcache import RagCache
from ragcache.db import Database
from ragcache.models import LoadedModel
from ragcache.retrieval import Retriever
from ragcache_api.cluster.gateway import create_gateway
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
    """loses: after how many messages it is lost, for the next request that is posted, since a page
    may still fetch a file; None for never.
    halted: it takes requests, and sends nothing after those messages."""

    name: str
    rag: RagCache
    loses: int | None = None
    halted: bool = False
    page: bool = False
    running: int = 0
    draining: bool = False
    seen: list[ForwardedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = create_app(self.rag, ServiceSettings.read(page=self.page))

    @property
    def session(self) -> str:
        return self.rag.internals.shared.store.ledger.sessions.id

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.name, self.session, self.running, self.draining)


async def _messages(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
    async with aclosing(run_app(app, request)) as batches:
        async for batch in batches:
            for message in batch:
                yield message


@dataclass
class LocalReplicas:
    """A `ReplicaSet`. encoded: all that any of them had to encode."""

    replicas: list[LocalReplica]
    table: RoutingTable
    gone: Counter[str] = field(default_factory=Counter)

    async def open(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        name = self.table.choose(request.reads.located, [each.status() for each in self.replicas])
        replica = next(each for each in self.replicas if each.name == name)
        replica.seen.append(request)
        request.route.sessions = frozenset((replica.session,))
        replica.running += 1
        left = None
        if request.scope["method"] == "POST":
            left, replica.loses = replica.loses, None
        try:
            async with aclosing(_messages(replica.app, request)) as messages:
                if left == 0:
                    await self._lose(replica)
                async for message in messages:
                    yield message
                    left = None if left is None else left - 1
                    if left == 0:
                        self.gone[name] += 1
                        await self._lose(replica)
        finally:
            replica.running -= 1

    async def _lose(self, replica: LocalReplica) -> NoReturn:
        if replica.halted:
            await asyncio.Event().wait()
        raise ReplicaLost("it has ended")

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
            answered[each.name] = [message async for message in _messages(each.app, request)]
        return answered

    @property
    def encoded(self) -> int:
        return sum(each.rag.stats().encoded for each in self.replicas)


class LocalCluster:
    """Two replicas behind a gateway."""

    def __init__(self, folder: Path, reader: LoadedModel) -> None:
        ledger = f"sqlite:///{folder / 'ledger.sqlite'}"
        self.database = Database.open(ledger)
        self.rags = [
            RagCache.open(
                folder / name, reader, embedding="none", ledger=ledger,
                remote=f"file://{folder / 'remote'}",
            )
            for name in "ab"
        ]  # fmt: skip
        self.folder = folder

    def replicas(self, *, page: bool = False) -> LocalReplicas:
        pairs = zip("ab", self.rags, strict=True)
        return LocalReplicas([LocalReplica(*pair, page=page) for pair in pairs], RoutingTable())

    def gateway(self, replicas: LocalReplicas, **settings: Any) -> ASGIApp:
        chosen = ServiceSettings.read(**({"embedding": "none", "page": False} | settings))
        return create_gateway(self.database, replicas, replicas.table, chosen)

    def client(self, replicas: LocalReplicas, **settings: Any) -> TestClient:
        return TestClient(self.gateway(replicas, **settings), base_url="http://localhost")

    def close(self) -> None:
        for rag in self.rags:
            rag.close()
        self.database.close()


@contextmanager
def serving(app: ASGIApp) -> Iterator[int]:
    """The port at which a thread of this process serves an app."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def flush(cluster: LocalCluster) -> None:
    """Memory rows are written now instead of within a second."""
    for rag in cluster.rags:
        rag.internals.shared.store.sweep()


def recorded_searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries of all retrievals from now on, in replicas and before them."""
    searched: list[str] = []
    retrieve = Retriever.retrieve

    def recorded(self: Retriever, query: str, *others: Any) -> Any:
        searched.append(query)
        return retrieve(self, query, *others)

    monkeypatch.setattr(Retriever, "retrieve", recorded)
    return searched
