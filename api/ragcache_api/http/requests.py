"""Running requests, and the registry that lists, cancels and ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from secrets import token_urlsafe
from typing import TypeVar

from fastapi import Request

from ragcache import Answer, AsyncAnswerStream
from ragcache.errors import DeadlineExceeded, NamespaceDeleted, RequestCancelled
from ragcache_api.http.admission import AdmissionQueue, Ticket
from ragcache_api.http.auth import Caller
from ragcache_api.http.envelope import request_id
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.incoming import wait_for_disconnect

T = TypeVar("T")
_STATES = ("generating", "computing", "waiting")


@dataclass(slots=True)
class ActiveRequest:
    """A request that is being answered."""

    id: str
    kind: str
    """`answer`, `prompt`, `chat` or `completion`."""
    namespace: str
    collection: str
    """Collection of the question, or empty."""
    registry: RequestRegistry
    request: str | None = field(default_factory=request_id)
    """Id of the HTTP request."""
    started: float = field(default_factory=time.monotonic)
    """Start on `time.monotonic`, in seconds."""
    streams: list[AsyncAnswerStream] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """Complete answers of the first streams."""
    outcome: str = ""
    """`finished`, `failed` or `cancelled`. Empty until the request ends."""
    ticket: Ticket | None = None
    """Place in the queue of requests. A request without one may run."""
    waited: float = 0.0
    """Seconds that the request has waited for its turn."""
    expired: bool = False
    """Whether its deadline has passed."""
    deleted: bool = False
    """Whether its namespace was deleted."""
    context: Context = field(default_factory=copy_context)
    """Context variables of the HTTP request, for its trace."""

    def attach(self, stream: AsyncAnswerStream) -> AsyncAnswerStream:
        """Add a stream, which is cancelled with the request.

        Raises:
            HTTPProblem: (503) The service has stopped.
            NamespaceDeleted: The namespace of the request was deleted.
        """
        if self.registry.stopped or self.deleted:
            stream.close()
            raise namespace_deleted() if self.deleted else stopping()
        self.streams.append(stream)
        return stream

    def add_answer(self, answer: Answer) -> None:
        """Add a complete answer. Its durations then begin when the request arrived."""
        self.answers.append(replace(answer, timings=answer.timings.after_wait(self.waited)))

    async def wait_for_turn(self) -> None:
        """Wait until the queue lets the request in."""
        if self.ticket is not None:
            await self.ticket.started.wait()
            self.waited = time.monotonic() - self.started

    def cancel(self) -> None:
        for stream in self.streams:
            stream.close()

    def expire(self) -> None:
        """Cancel the request because its deadline has passed."""
        self.expired = True
        self.cancel()

    def cause_of(self, error: Exception) -> Exception:
        """Return the reason of an error: a cancellation may come from the service itself."""
        if isinstance(error, RequestCancelled) and self.expired:
            return deadline_exceeded()
        if isinstance(error, RequestCancelled) and self.deleted:
            return namespace_deleted()
        if isinstance(error, RequestCancelled) and self.registry.stopped:
            return stopping()
        return error

    @property
    def read_tokens(self) -> list[Mapping[str, int]]:
        """Number of prompt tokens whose states were read, by tier, for each answer."""
        return [stream.read_tokens for stream in self.streams[: len(self.answers)]]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts. 0 until the states are leased."""
        return sum(stream.prompt_tokens for stream in self.streams)

    @property
    def generated(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(stream.generated for stream in self.streams)

    @property
    def state(self) -> str:
        """`waiting` for its turn, `retrieving`, again `waiting`, `computing` and `generating`.

        A request with several answers has the furthest state of any of them.
        """
        states = {stream.state for stream in self.streams}
        if self.ticket is not None and not self.ticket.started.is_set():
            return "waiting"
        return next((each for each in _STATES if each in states), "retrieving")

    @property
    def computes(self) -> bool:
        """Whether the engine has begun to compute an answer."""
        return self.state in ("computing", "generating")


class RequestRegistry:
    """The running requests, and how the service ends.

    Attributes:
        active: Running requests by id.
        leaving: The service ends soon, and load balancers should send no more requests.
        draining: No new request is accepted.
        stopped: The running requests have been cancelled.
        on_end: Functions that are called with each request that has ended.
        admission: The queue that lets requests in.
    """

    def __init__(self, admission: AdmissionQueue | None = None) -> None:
        self.admission = admission or AdmissionQueue()
        self.active: dict[str, ActiveRequest] = {}
        self.leaving = self.draining = self.stopped = False
        self.on_end: list[Callable[[ActiveRequest], None]] = []
        self._on_drain: set[Callable[[], None]] = set()

    @contextmanager
    def track_request(
        self, kind: str, caller: Caller, collection: str = "", choices: int = 1
    ) -> Iterator[ActiveRequest]:
        """Begin a request that ends with the block."""
        active = self.begin_request(kind, caller, collection, choices)
        try:
            yield active
        except BaseException as error:
            self.end_request(active, error)
            raise
        self.end_request(active)

    def begin_request(
        self, kind: str, caller: Caller, collection: str = "", choices: int = 1
    ) -> ActiveRequest:
        """Begin a request, which may have to wait for its turn.

        Args:
            kind: `answer`, `prompt`, `chat` or `completion`.
            caller: The sender.
            collection: Collection of the question.
            choices: Number of choices of all prompts.

        Raises:
            HTTPProblem: (503) The service is ending, or the request would wait too long.
            QueueFull: Too many requests wait.
        """
        if self.draining:
            raise stopping()
        ticket = self.admission.enter(caller.bucket, choices)
        name = f"{kind}-{token_urlsafe(16)}"
        active = ActiveRequest(name, kind, caller.namespace, collection, self, ticket=ticket)
        self.active[active.id] = active
        return active

    def end_request(self, active: ActiveRequest, error: BaseException | None = None) -> None:
        """End a request and record its outcome. Later calls change nothing."""
        if self.active.pop(active.id, None) is None:
            return
        active.cancel()
        if active.ticket is not None:
            self.admission.leave(active.ticket)
        gone = isinstance(error, asyncio.CancelledError | RequestCancelled | GeneratorExit)
        gone = gone or (isinstance(error, HTTPProblem) and error.status_code == 499)
        active.outcome = "finished" if error is None else "cancelled" if gone else "failed"
        for record in self.on_end:
            record(active)

    def end_namespace(self, namespace: str) -> None:
        """Cancel the running requests of a deleted namespace."""
        for active in list(self.active.values()):
            if active.namespace == namespace:
                active.deleted = True
                active.cancel()

    def drain(self) -> None:
        """Refuse new requests, and end streams that have no end of their own."""
        self.draining = True
        for wake in list(self._on_drain):
            wake()

    def stop(self) -> None:
        """Cancel the running requests. Their clients get an error that says why."""
        self.drain()
        self.stopped = True
        for active in list(self.active.values()):
            active.cancel()

    @contextmanager
    def on_drain(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` if the service begins to drain within the block."""
        self._on_drain.add(wake)
        try:
            yield
        finally:
            self._on_drain.discard(wake)


def stopping() -> HTTPProblem:
    """Return the error of requests that arrive or run while the service ends."""
    text = "the service is being stopped; try again"
    return HTTPProblem(503, "stopping", text, {"Retry-After": "5"})


def namespace_deleted() -> NamespaceDeleted:
    """Return the error of requests that run while their namespace is deleted."""
    return NamespaceDeleted("the namespace was deleted while the request ran")


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was over before it ended; give it more")


async def cancel_on_disconnect(request: Request, awaited: Awaitable[T], seconds: float) -> T:
    """Await a result, and cancel the work if its client disconnects or its time is over.

    The body of the request must have been read.

    Raises:
        HTTPProblem: (499) The client has disconnected.
        DeadlineExceeded: The time is over.
    """
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
