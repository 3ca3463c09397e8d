"""Requests under way: the registry lists them, cancels them and knows when each has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import TypeVar

from fastapi import Request
from starlette.types import Receive

from ragcache import Answer, AsyncAnswerStream
from ragcache.errors import DeadlineExceeded, RequestCancelled
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.request_ids import request_id

T = TypeVar("T")
_STATES = ("generating", "computing", "waiting")


@dataclass(slots=True)
class ActiveRequest:
    """A request under way. request: the id of its call. started: `time.monotonic`, in seconds.
    outcome: `finished`, `failed` or `cancelled`; "" before the end. expired: its deadline passed.
    context: of the call."""

    id: str
    kind: str
    namespace: str
    collection: str
    registry: RequestRegistry
    request: str | None = field(default_factory=request_id)
    started: float = field(default_factory=time.monotonic)
    streams: list[AsyncAnswerStream] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    outcome: str = ""
    expired: bool = False
    context: Context = field(default_factory=copy_context)

    def attach(self, stream: AsyncAnswerStream) -> AsyncAnswerStream:
        """Adds a stream, which is cancelled with the request. Raises `HTTPProblem` (503) once the
        service has stopped."""
        if self.registry.stopped:
            stream.close()
            raise stopping()
        self.streams.append(stream)
        return stream

    def cancel(self) -> None:
        for stream in self.streams:
            stream.close()

    def expire(self) -> None:
        """Cancels the request because its deadline has passed."""
        self.expired = True
        self.cancel()

    def cause_of(self, error: Exception) -> Exception:
        """The reason for an error: of a cancellation, the deadline or the service's end."""
        if isinstance(error, RequestCancelled) and self.expired:
            return deadline_exceeded()
        if isinstance(error, RequestCancelled) and self.registry.stopped:
            return stopping()
        return error

    @property
    def read_tokens(self) -> list[Mapping[str, int]]:
        """Of each answer's prompt, the tokens whose states were read, by tier."""
        return [stream.read_tokens for stream in self.streams[: len(self.answers)]]

    @property
    def prompt_tokens(self) -> int:
        """Known once the states are leased; 0 before."""
        return sum(stream.prompt_tokens for stream in self.streams)

    @property
    def generated(self) -> int:
        """Token deltas of all answers so far."""
        return sum(stream.generated for stream in self.streams)

    @property
    def state(self) -> str:
        """`retrieving` until the states are leased, then `waiting`, `computing` (the prompt) or
        `generating`. Of several answers, the furthest."""
        states = {stream.state for stream in self.streams}
        return next((each for each in _STATES if each in states), "retrieving")

    @property
    def computes(self) -> bool:
        """Whether the engine has begun with it."""
        return self.state in ("computing", "generating")


class RequestRegistry:
    """The requests under way, by id. leaving: the service ends soon, and no more is to be sent.
    draining: no request begins any longer. stopped: those that were left have been cancelled.
    on_end: called with every request that has ended."""

    def __init__(self) -> None:
        self.active: dict[str, ActiveRequest] = {}
        self.leaving = False
        self.draining = False
        self.stopped = False
        self.on_end: list[Callable[[ActiveRequest], None]] = []
        self._on_drain: set[Callable[[], None]] = set()

    @contextmanager
    def track_request(
        self, kind: str, namespace: str, collection: str = ""
    ) -> Iterator[ActiveRequest]:
        """A request that ends with the block."""
        active = self.begin_request(kind, namespace, collection)
        try:
            yield active
        except BaseException as error:
            self.end_request(active, error)
            raise
        self.end_request(active)

    def begin_request(self, kind: str, namespace: str, collection: str = "") -> ActiveRequest:
        """Raises `HTTPProblem` (503) once the service is ending."""
        if self.draining:
            raise stopping()
        active = ActiveRequest(f"{kind}-{token_urlsafe(16)}", kind, namespace, collection, self)
        self.active[active.id] = active
        return active

    def end_request(self, active: ActiveRequest, error: BaseException | None = None) -> None:
        """Ends a request once; later calls change nothing."""
        if self.active.pop(active.id, None) is None:
            return
        active.cancel()
        gone = isinstance(error, asyncio.CancelledError | RequestCancelled | GeneratorExit)
        gone = gone or (isinstance(error, HTTPProblem) and error.status_code == 499)
        active.outcome = "finished" if error is None else "cancelled" if gone else "failed"
        for record in self.on_end:
            record(active)

    def drain(self) -> None:
        """Refuses new requests, and ends streams that would go on for ever."""
        self.draining = True
        for wake in list(self._on_drain):
            wake()

    def stop(self) -> None:
        """Cancels the requests under way; their clients get an error that says why."""
        self.drain()
        self.stopped = True
        for active in list(self.active.values()):
            active.cancel()

    @contextmanager
    def on_drain(self, wake: Callable[[], None]) -> Iterator[None]:
        """Calls `wake` if the service begins to end within the block."""
        self._on_drain.add(wake)
        try:
            yield
        finally:
            self._on_drain.discard(wake)


def stopping() -> HTTPProblem:
    """The error of requests that come or run while the service ends."""
    text = "the service is being stopped; try again"
    return HTTPProblem(503, "stopping", text, {"Retry-After": "5"})


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was over before it ended; give it more")


async def cancel_on_disconnect(request: Request, awaited: Awaitable[T], seconds: float) -> T:
    """Awaits, and cancels it if the client disconnects (`HTTPProblem`, 499) or the time is over
    (`DeadlineExceeded`). The request's body must have been read."""
    task = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        first = asyncio.FIRST_COMPLETED
        ended, _ = await asyncio.wait((task, gone), timeout=seconds, return_when=first)
        if not ended:
            raise deadline_exceeded()
        if not task.done():
            raise HTTPProblem(499, "client-gone", "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Takes messages until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
