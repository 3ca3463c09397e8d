"""The latest warnings and errors of the process, kept in memory for operators, and the ids of
requests by which these are found."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from secrets import token_urlsafe
from traceback import format_exception

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "X-Request-ID"
KEPT = 500
_MESSAGE, _TRACEBACK = 2_000, 10_000  # characters
_USABLE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_SECRETS = re.compile(
    r"\brc-[\w-]{9,}"
    r"|(?<=://)[^/\s:@]*:(?:(?!://)\S)+(?=@)"  # a password, which may hold slashes
    r"|(?<=://)[^/\s:@]+(?=@)"  # a token in the place of the user
)
_UVICORN = "uvicorn"  # passes nothing on to the root
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """The id of the request that this code runs for; None outside of any."""
    return _request_id.get()


@dataclass(frozen=True, slots=True)
class RequestIds:
    """ASGI middleware that names each request: as its client does in `X-Request-ID`, or at random.
    The response carries the name."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = wanted if _USABLE.fullmatch(wanted) else token_urlsafe(12)
        _request_id.set(name)  # to the end of the task, in which the server logs, too

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name
            await send(message)

        await self.app(scope, receive, send_named)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A warning or an error. number: counts them since the process began. at: Unix seconds.
    request: the id of the request that it concerns, if any. traceback: "" without an exception."""

    number: int
    at: float
    level: str
    logger: str
    message: str
    request: str | None
    traceback: str


class EventLog(logging.Handler):
    """Keeps the latest records from the level `WARNING` on, with secrets masked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._entries: deque[LogEntry] = deque(maxlen=KEPT)
        self._number = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record; `logging` holds the handler's lock."""
        try:
            self._keep(record)
        except Exception:  # as logging has it: a record that cannot be written ends no request
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        traceback = "".join(format_exception(*record.exc_info)) if record.exc_info else ""
        if traceback and record.name.startswith(_UVICORN) and self._is_known(request_id()):
            return  # the service has logged it, and raised it again
        self._number += 1
        self._entries.append(LogEntry(
            self._number, record.created, record.levelname.lower(), record.name,
            _masked(record.getMessage())[:_MESSAGE], request_id(),
            _masked(traceback)[-_TRACEBACK:],
        ))  # fmt: skip

    def entries(self, level: str | None = None) -> list[LogEntry]:
        """The newest first; those of a level, or all."""
        self.acquire()
        try:
            kept = list(self._entries)
        finally:
            self.release()
        return [entry for entry in reversed(kept) if level in (None, entry.level)]

    def _is_known(self, request: str | None) -> bool:
        known = (entry for entry in self._entries if entry.traceback)
        return request is not None and any(entry.request == request for entry in known)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the records of all loggers within the block. Where nothing else listens, what
        Python would have written to standard error is written on."""
        root = logging.getLogger()
        missing = [] if root.handlers or logging.lastResort is None else [logging.lastResort]
        added: list[tuple[logging.Logger, logging.Handler]] = [
            (root, self), (logging.getLogger(_UVICORN), self),
            *((root, handler) for handler in missing),
        ]  # fmt: skip
        for logger, handler in added:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger, handler in added:
                logger.removeHandler(handler)


def _masked(text: str) -> str:
    """Text without keys of the service, and without users and passwords of addresses."""
    return _SECRETS.sub("***", text)
