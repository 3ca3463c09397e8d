"""Replicas as the gateway sees them: they take an ASGI request and return ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from ragcache.db import LocatedStates
from ragcache.retrieval import Selection
from ragcache.routing import RoutingCosts, choose_replica, held_bytes
from ragcache_api.http.errors import HTTPProblem

_PASSED_ON = (
    "method",
    "path",
    "raw_path",
    "query_string",
    "http_version",
    "scheme",
    "client",
    "server",
    "root_path",
)
_WAITING_MESSAGES = 64  # for a slow client, until the app of the replica waits


class ReplicaLost(HTTPProblem):
    """A replica ended before its response did."""

    def __init__(self, detail: str) -> None:
        super().__init__(503, "replica-lost", detail, {"Retry-After": "2"})


@dataclass(frozen=True, slots=True)
class RequestReads:
    """The states that a request reads."""

    located: LocatedStates = field(default_factory=LocatedStates)
    selection: Selection | None = None
    """Selection of the gateway, if it has retrieved for the request."""


@dataclass(slots=True)
class Route:
    """The replica that a request was sent to. The router sets it in the gateway's process."""

    sessions: frozenset[str] = frozenset()
    """Session of the replica that has the request. Several until one of them takes it."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request on its way to a replica.

    It travels only between processes of the service, so that no client can set its `reads`.
    """

    scope: Mapping[str, Any]
    """Plain values of the ASGI scope."""
    body: bytes
    reads: RequestReads = field(default_factory=RequestReads)
    route: Route = field(default_factory=Route, compare=False)

    @classmethod
    def of(
        cls,
        scope: Scope,
        body: bytes = b"",
        reads: RequestReads = RequestReads(),
        headers: Sequence[tuple[bytes, bytes]] | None = None,
    ) -> ForwardedRequest:
        """Make the request from an ASGI scope. `headers` replace the scope's."""
        kept = {name: scope[name] for name in _PASSED_ON if name in scope}
        sent = scope["headers"] if headers is None else headers
        return cls({**kept, "headers": list(sent)}, body, reads)

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica and its load."""

    name: str
    session: str
    """Session under which the ledger lists the replica's memory."""
    requests: int
    """Number of open requests."""
    draining: bool = False
    """Whether the replica gets no more requests."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Measured fields of `RoutingCosts`."""


class ReplicaSet(Protocol):
    """The replicas of a service, chosen by a `RoutingTable`."""

    def open(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Send a request to the best replica. Closing the generator cancels the request.

        Raises:
            HTTPProblem: (503) No replica takes requests.
            ReplicaLost: The replica has ended, possibly after some messages.
        """
        ...

    async def statuses(self) -> list[ReplicaStatus]:
        """List the replicas by name."""
        ...

    async def drain(self, name: str, *, draining: bool) -> bool:
        """Keep new requests from a replica, or allow them. Returns whether the replica exists."""
        ...

    async def call_all(self, request: ForwardedRequest) -> dict[str, list[Message]]:
        """Send a request to all replicas, and return the messages of each that answers."""
        ...


@dataclass(slots=True)
class RoutingTable:
    """Chooses replicas, and counts requests and bytes of modules."""

    rng: Random = field(default_factory=Random)
    """Breaks ties."""
    routed_bytes: dict[str, int] = field(default_factory=lambda: {"held": 0, "moved": 0})
    """Bytes of modules that the chosen replicas `held`, and that were `moved` to them."""
    routed: dict[str, int] = field(default_factory=dict)
    """Number of requests by replica."""
    silent: frozenset[str] = frozenset()
    """Sessions of replicas that have ended or are halted. They get requests only if all are."""
    list_replicas: Callable[[], list[ReplicaStatus]] | None = None
    """Lists the replicas. Set by the router that knows them."""

    def available(self, replicas: Sequence[ReplicaStatus]) -> Sequence[ReplicaStatus]:
        """Return the replicas that take requests.

        Draining replicas take requests only if all others are silent, and silent ones only if all
        are.
        """
        heard = [each for each in replicas if each.session not in self.silent] or replicas
        return [each for each in heard if not each.draining] or heard

    def choose(self, located: LocatedStates, replicas: Sequence[ReplicaStatus]) -> str:
        """Return the name of the best replica for a request, among the available ones.

        While the ledger does not answer, only replicas that hold all of the states are asked, if
        there are any: others could not fetch the states.

        Raises:
            HTTPProblem: (503) There is no replica.
        """
        open_ones = self.available(replicas)
        if not open_ones:
            text = "no replica of the service takes requests now; try again"
            raise HTTPProblem(503, "no-replica", text, {"Retry-After": "2"})
        by_session = {each.session: each for each in open_ones}
        if located.away and (holders := _holders(located) & by_session.keys()):
            by_session = {session: by_session[session] for session in holders}
        loads = {session: each.requests for session, each in by_session.items()}
        costs = self._measured_costs(list(by_session.values()))
        session = choose_replica(located.modules, loads, located.holds, costs, self.rng)
        held, moved = held_bytes(located.modules, located.holds, session)
        self.routed_bytes["held"] += held
        self.routed_bytes["moved"] += moved
        name = by_session[session].name
        self.routed[name] = self.routed.get(name, 0) + 1
        return name

    def _measured_costs(self, replicas: Sequence[ReplicaStatus]) -> RoutingCosts:
        """Return costs with medians of the replicas' measurements, and defaults for the rest."""
        measured: dict[str, list[float]] = {}
        for replica in replicas:
            for name, value in replica.costs.items():
                measured.setdefault(name, []).append(value)
        medians: dict[str, Any] = {name: median(each) for name, each in measured.items()}
        return RoutingCosts(**medians)


def _holders(located: LocatedStates) -> set[str]:
    """Return the sessions that hold all states of a request in memory."""
    held = [set(located.holds.get(module.key, {})) for module in located.modules]
    return set.intersection(*held) if held else set()


PROCESS_TABLE = RoutingTable()
"""The table of the current process. Ray copies the router and its arguments into the gateway's
process, so that the two can share only a module."""


async def run_app(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Run a request through an app, and yield its messages in lists.

    Each list has all messages that are ready, and is one call between processes. Closing the
    generator disconnects the client.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING_MESSAGES)
    gone, given = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal given
        if given:
            await gone.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def run() -> None:
        state = {"selection": request.reads.selection}
        scope = {**request.scope, "type": "http", "asgi": {"version": "3.0"}, "state": state}
        try:
            await app(scope, receive, messages.put)
        finally:
            await messages.put(None)

    task = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            sent = [await messages.get()]
            while not messages.empty():
                sent.append(messages.get_nowait())
            ended = sent[-1] is None
            if batch := [message for message in sent if message is not None]:
                yield batch
        await task
    finally:
        gone.set()
        if not task.done():
            await _end(task, messages)


async def _end(task: asyncio.Task[None], messages: asyncio.Queue[Message | None]) -> None:
    """Wait until an app notices that its client is gone, and cancel it if it does not."""
    for _ in range(100):
        while not messages.empty():
            messages.get_nowait()
        await asyncio.wait((task,), timeout=0.01)
        if task.done():
            break
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
