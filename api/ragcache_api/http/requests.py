"""Requests under way: listed for the operator, given up when their client goes, told at the end."""

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

from ragcache import Answer, AsyncAnswerStream
from ragcache.errors import DeadlineExceeded, RequestCancelled
from ragcache_api.http.errors import HTTPProblem

T = TypeVar("T")
_STATES = ("generating", "computing", "waiting")


@dataclass(slots=True)
class ActiveRequest:
    """A request that runs. started: `time.monotonic`, in seconds. outcome: `finished`, `failed` or
    `cancelled` once it has ended, "" before. late: its time was over before it ended. context: of
    the call that made it."""

    id: str
    kind: str
    namespace: str
    collection: str
    running: RequestRegistry
    started: float = field(default_factory=time.monotonic)
    streams: list[AsyncAnswerStream] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    outcome: str = ""
    late: bool = False
    context: Context = field(default_factory=copy_context)

    def attach(self, stream: AsyncAnswerStream) -> AsyncAnswerStream:
        """Takes a stream, to be given up if the request is. Raises `HTTPProblem` (503) where the
        service ends by now."""
        if self.running.stopped:
            stream.close()
            raise stopping()
        self.streams.append(stream)
        return stream

    def give_up(self) -> None:
        for stream in self.streams:
            stream.close()

    def expire(self) -> None:
        """Gives it up because its time is over."""
        self.late = True
        self.give_up()

    def named(self, error: Exception) -> Exception:
        """A cancellation that the service itself caused, under its right name."""
        if isinstance(error, RequestCancelled) and self.late:
            return too_late()
        if isinstance(error, RequestCancelled) and self.running.stopped:
            return stopping()
        return error

    @property
    def read_tokens(self) -> list[Mapping[str, int]]:
        """Of each answer's prompt, the tokens whose states were read, by tier."""
        return [stream.read_tokens for stream in self.streams[: len(self.answers)]]

    @property
    def prompt_tokens(self) -> int:
        """As far as they are known: once the states are leased."""
        return sum(stream.prompt_tokens for stream in self.streams)

    @property
    def generated(self) -> int:
        """Pieces of text of all answers so far."""
        return sum(stream.generated for stream in self.streams)

    @property
    def state(self) -> str:
        """`retrieving` until its states are leased, then what the engine does with it: `waiting`,
        `computing` its prompt, or `generating`. Of several answers, the furthest."""
        states = {stream.state for stream in self.streams}
        return next((each for each in _STATES if each in states), "retrieving")

    @property
    def computes(self) -> bool:
        """Whether the engine has begun with it."""
        return self.state in ("computing", "generating")


class RequestRegistry:
    """All entries. drain: no more begin. stop: those that are left are told and end."""

    def __init__(self) -> None:
        self.entries: dict[str, ActiveRequest] = {}
        self.draining = False
        self.stopped = False
        self.ended: list[Callable[[ActiveRequest], None]] = []
        self._watchers: set[Callable[[], None]] = set()

    @contextmanager
    def entry(self, kind: str, namespace: str, collection: str = "") -> Iterator[ActiveRequest]:
        """A request for as long as the block runs."""
        entry = self.begin(kind, namespace, collection)
        try:
            yield entry
        except BaseException as error:
            self.end(entry, error)
            raise
        self.end(entry)

    def begin(self, kind: str, namespace: str, collection: str = "") -> ActiveRequest:
        """Raises `HTTPProblem` (503) once the service is ending."""
        if self.draining:
            raise stopping()
        entry = ActiveRequest(f"{kind}-{token_urlsafe(16)}", kind, namespace, collection, self)
        self.entries[entry.id] = entry
        return entry

    def end(self, entry: ActiveRequest, error: BaseException | None = None) -> None:
        """Ends an entry once; later calls change nothing."""
        if self.entries.pop(entry.id, None) is None:
            return
        entry.give_up()
        gone = isinstance(error, asyncio.CancelledError | RequestCancelled | GeneratorExit)
        gone = gone or (isinstance(error, HTTPProblem) and error.status_code == 499)
        entry.outcome = "finished" if error is None else "cancelled" if gone else "failed"
        for tell in self.ended:
            tell(entry)

    def drain(self) -> None:
        """Lets nothing begin any longer, and ends what would go on for ever."""
        self.draining = True
        for wake in list(self._watchers):
            wake()

    def stop(self) -> None:
        """Gives up what runs; its clients are told that the service ends."""
        self.drain()
        self.stopped = True
        for entry in list(self.entries.values()):
            entry.give_up()

    @contextmanager
    def watching(self, wake: Callable[[], None]) -> Iterator[None]:
        """wake: called when the service begins to end."""
        self._watchers.add(wake)
        try:
            yield
        finally:
            self._watchers.discard(wake)


def stopping() -> HTTPProblem:
    return HTTPProblem(
        503, "stopping", "the service is being stopped; try again", {"Retry-After": "5"}
    )


def too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was over before it ended; give it more")


async def cancel_on_disconnect(request: Request, awaited: Awaitable[T], seconds: float) -> T:
    """What is awaited, which is cancelled if the client goes away or the time is over. The body
    must have been read.

    Raises `DeadlineExceeded`, or `HTTPProblem` (499), which nobody reads.
    """
    task = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        ended, _ = await asyncio.wait(
            (task, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended:
            raise too_late()
        if not task.done():
            raise HTTPProblem(499, "client-gone", "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
