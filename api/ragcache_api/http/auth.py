"""Who calls: API keys with roles and namespaces."""

# MERGED ragcache_api.http.gate: The gate: who calls, how often and with how much, before
#   anything of the request is read.
# MERGED ragcache_api.http.limits: Limits before a request is read: how large it is, how long
#   it takes, and how many come.

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from anyio import CapacityLimiter, to_thread
from limits import RateLimitItem, parse_many
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeys
from ragcache_api.http.errors import HTTPProblem, fault_of, fault_response

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
class APIKeyAuth:
    """Checks keys from memory, in the event loop. Now and then they are read again, in threads that
    no other work can take."""

    keys: ApiKeys
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_THREADS))

    async def caller(self, authorization: str | None, address: str) -> Caller:
        """Raises `HTTPProblem` (401). Until a first key is made everybody is an administrator: the
        service listens on loopback alone then."""
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        verdict = self.keys.check_in_memory(secret)
        if verdict is None:
            verdict = await to_thread.run_sync(self.keys.check, secret, limiter=self.threads)
        if not verdict.exist:
            return Caller("", "admin", NAMESPACE, address)
        row = verdict.key
        if row is None:
            raise HTTPProblem(
                401, "unauthorized",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )  # fmt: skip
        return Caller(row.name, row.role, row.namespace, f"key {row.id}")


_UPLOAD = re.compile(r"/v1/collections/[^/]+/documents$")
_OPEN = frozenset(("/health/live", "/health/ready"))
_ADMIN = re.compile(r"/(admin|metrics)(/|$)")
TIMEOUT_HEADER = "x-request-timeout"
_OWN_SITES = ("same-origin", "none")  # none: typed or opened by the user


@dataclass(frozen=True, slots=True)
class Gate:
    """ASGI middleware. Denies by default: but for health and the page's files, every path asks for
    a key as soon as one exists, and those of the operator for one with the role `admin`.

    The caller stands in `scope["state"]["caller"]`, and in `["end"]` when the request is to have
    ended. deadline: the most seconds until then. open_paths: of the page's files.
    """

    app: ASGIApp
    doorkeeper: APIKeyAuth
    rate: RateLimit
    body_bytes: int
    upload_bytes: int
    deadline: float
    allowed_hosts: Collection[str]
    open_paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        try:
            headers, state = Headers(scope=scope), scope.setdefault("state", {})
            if path not in _OPEN and path not in self.open_paths:
                state["caller"] = await self._admit(scope, headers, path)
            end = state["end"] = end_of(headers.get(TIMEOUT_HEADER), self.deadline)
            most = self.upload_bytes if _UPLOAD.match(path) else self.body_bytes
            length = headers.get("content-length")
            check_length(None if length is None else length.encode(), most)
        except HTTPProblem as refusal:
            fault = fault_of(refusal)
            assert fault is not None
            await fault_response(fault, path)(scope, receive, send)
            return
        await self.app(scope, bounded(receive, most, end), send)

    async def _admit(self, scope: Scope, headers: Headers, path: str) -> Caller:
        client = scope.get("client")
        address = client[0] if client else "unknown"
        caller = await self.doorkeeper.caller(headers.get("authorization"), address)
        if not caller.name:
            self._check_origin(headers)
        if _ADMIN.match(path) and caller.role != "admin":
            raise HTTPProblem(403, "forbidden", "this key's role is not `admin`")
        self.rate.hit(caller.bucket)
        return caller

    def _check_origin(self, headers: Headers) -> None:
        """Without keys, pages of other sites that a browser on this machine shows could call the
        service, by a name of theirs that leads here or by a form. A key they do not have."""
        name = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if name not in self.allowed_hosts:
            raise HTTPProblem(
                403, "unknown-host",
                "a service without keys answers to its own names alone (setting allowed_hosts); "
                "make a key with `ragcache keys create`",
            )  # fmt: skip
        site = headers.get("sec-fetch-site", "none").lower()
        if site not in _OWN_SITES or not _of_own_page(headers):
            raise HTTPProblem(
                403, "cross-site",
                "a service without keys takes no calls of other sites' pages, nor of those on "
                "other ports; make a key with `ragcache keys create`",
            )  # fmt: skip


def _of_own_page(headers: Headers) -> bool:
    """Whether the page that calls, if one does, came from here. Its scheme may be a proxy's."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers["host"].lower()


class RateLimit:
    """Counts requests of each bucket in moving windows."""

    def __init__(self, rate: str | None) -> None:
        self._items: list[RateLimitItem] = parse_many(rate) if rate else []
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def hit(self, bucket: str) -> None:
        """Raises `HTTPProblem` (429) with the seconds after which there is room again."""
        for item in self._items:
            if not self._limiter.hit(item, bucket):
                until = self._limiter.get_window_stats(item, bucket).reset_time
                wait = max(1, math.ceil(until - time.time()))
                raise HTTPProblem(
                    429, "rate-limited", f"more than {item} requests; try again in {wait} s",
                    {"Retry-After": str(wait)},
                )  # fmt: skip


def check_length(declared: bytes | None, most: int) -> None:
    """Refuses by the declared length, before anything is read. Raises `HTTPProblem`."""
    if declared is None:
        return
    try:
        length = int(declared)
    except ValueError:
        raise HTTPProblem(400, "bad-length", "Content-Length is not a number") from None
    if length > most:
        raise _too_large(most)


def end_of(asked: str | None, most: float) -> float:
    """When a request that comes now is to have ended, on `time.monotonic`: after the seconds that
    it asks for, at most those of the settings. Raises `HTTPProblem` (400)."""
    try:
        seconds = most if asked is None else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise HTTPProblem(400, "bad-timeout", "X-Request-Timeout is not a positive time in seconds")
    return time.monotonic() + min(seconds, most)


def bounded(receive: Receive, most: int, end: float) -> Receive:
    """A body without a declared length is counted while it comes, and it comes in time. Raises
    `HTTPProblem` (413, 408)."""
    taken, more = 0, True

    async def receive_bounded() -> Message:
        nonlocal taken, more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                message = await receive()
        except TimeoutError:
            detail = "the body has not come within the time of the request"
            raise HTTPProblem(408, "body-too-slow", detail, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            more = message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > most:
                raise _too_large(most)
        return message

    return receive_bounded


def _too_large(most: int) -> HTTPProblem:
    detail = f"the body has more than the {most:,} bytes that are allowed here"
    return HTTPProblem(413, "body-too-large", detail, {"Connection": "close"})
