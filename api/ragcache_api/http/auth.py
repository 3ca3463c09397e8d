"""Who may call, how often and with how much: checked before anything of a request is read.

An API key gives a caller a role and a namespace. Until the first key exists the service is open to
this machine, and guards itself against pages of other sites that a browser here shows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from anyio import CapacityLimiter, to_thread
from limits import RateLimitItem, parse_many
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from limits.errors import ConfigurationError as PackageMissing
from limits.errors import StorageError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeys
from ragcache.errors import MissingExtra, RagCacheError
from ragcache_api.http.errors import HTTPProblem, error_response, logged_error

logger = logging.getLogger(__name__)

_THREADS = 4  # wait for keys; one of them reads, for all
_STORAGE_SECONDS = 1.0  # that a request waits for the storage of limits
_REST_SECONDS = 5.0  # in which a storage that failed is not asked again
TIMEOUT_HEADER = "x-request-timeout"
_UPLOAD = re.compile(r"/v1/collections/[^/]+/documents$")
_OPEN = frozenset(("/health/live", "/health/ready"))
_ADMIN = re.compile(r"/(admin|metrics)(/|$)")
_OWN_SITES = ("same-origin", "none")  # none: typed or opened by the user


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. name, key: those of the API key, "" and None where none is needed.
    bucket: what rate limits count under."""

    name: str
    role: str
    namespace: str
    bucket: str
    key: int | None = None

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see what all namespaces share."""
        return self.role == "admin" and self.namespace == NAMESPACE

    def require_operator(self) -> None:
        """Raise `HTTPProblem` (403) unless the caller may see what all namespaces share."""
        if not self.is_operator:
            text = "this concerns all namespaces: it takes a key of the role `admin` in `default`"
            raise HTTPProblem(403, "forbidden", text)


@dataclass(frozen=True, slots=True)
class APIKeyAuth:
    """Checks API keys from memory, in the event loop. Now and then the keys are read again, in
    threads that no other work can take."""

    keys: ApiKeys
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_THREADS))

    async def identify_caller(self, authorization: str | None, address: str) -> Caller:
        """The caller of a request. Before the first key, an administrator: the service listens
        only on loopback then. Raises `HTTPProblem` (401)."""
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
        return Caller(row.name, row.role, row.namespace, f"key {row.id}", row.id)


@dataclass(frozen=True, slots=True)
class AccessMiddleware:
    """ASGI middleware that denies by default: once a key exists, every path needs one but health
    and the page's files (`open_paths`), and the operator's paths need the role `admin`. It puts the
    `caller` and the `end` of the request, at most `deadline` seconds off, in `scope["state"]`."""

    app: ASGIApp
    auth: APIKeyAuth
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
            check_length(headers.get("content-length"), most)
        except (HTTPProblem, RagCacheError) as problem:  # the ledger may be away for long
            error = logged_error(problem, f"{scope['method']} {path}")
            await error_response(error, path)(scope, receive, send)
            return
        await self.app(scope, bounded_receive(receive, most, end), send)

    async def _admit(self, scope: Scope, headers: Headers, path: str) -> Caller:
        client = scope.get("client")
        address = client[0] if client else "unknown"
        caller = await self.auth.identify_caller(headers.get("authorization"), address)
        if not caller.name:
            self._check_origin(headers)
        if _ADMIN.match(path) and caller.role != "admin":
            raise HTTPProblem(403, "forbidden", "this key's role is not `admin`")
        await self.rate.hit(caller.bucket)
        return caller

    def _check_origin(self, headers: Headers) -> None:
        """Without keys, another site's page in a browser on this machine could call the service,
        by DNS rebinding or by a form. Raises `HTTPProblem` (403)."""
        name = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if name not in self.allowed_hosts:
            raise HTTPProblem(
                403, "unknown-host",
                "a service without keys answers to its own names alone (setting allowed_hosts); "
                "make a key with `ragcache keys create`",
            )  # fmt: skip
        site = headers.get("sec-fetch-site", "none").lower()
        if site not in _OWN_SITES or not _is_own_origin(headers):
            raise HTTPProblem(
                403, "cross-site",
                "a service without keys takes no calls of other sites' pages, nor of those on "
                "other ports; make a key with `ragcache keys create`",
            )  # fmt: skip


def _is_own_origin(headers: Headers) -> bool:
    """Whether the calling page, if any, came from here. The scheme may be a proxy's."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers["host"].lower()


class RateLimit:
    """Counts the requests of each bucket in moving windows: of this process, or of all that share
    a Redis. While that does not answer, each process counts for itself."""

    def __init__(self, rate: str | None, storage: str | None = None) -> None:
        """rate: as `100/minute`; storage: the URL of a Redis. Raises `MissingExtra`."""
        self._items: list[RateLimitItem] = parse_many(rate) if rate else []
        self._own = MovingWindowRateLimiter(MemoryStorage())
        self._shared = None if storage is None else MovingWindowRateLimiter(_redis(storage))
        self._asked_from = 0.0

    async def hit(self, bucket: str) -> None:
        """Counts a request. Raises `HTTPProblem` (429), whose `Retry-After` is in seconds."""
        for item in self._items:
            until = await self._count(item, bucket)
            if until is not None:
                wait = max(1, math.ceil(until - time.time()))
                raise HTTPProblem(
                    429, "rate-limited", f"more than {item} requests; try again in {wait} s",
                    {"Retry-After": str(wait)},
                )  # fmt: skip

    async def _count(self, item: RateLimitItem, bucket: str) -> float | None:
        """When the next request may come, in Unix seconds, if this one is too much."""
        if self._shared is not None and time.monotonic() >= self._asked_from:
            try:
                return await _hit(self._shared, item, bucket)
            except StorageError as error:
                self._asked_from = time.monotonic() + _REST_SECONDS
                reason = error.storage_error
                logger.warning("rates are counted by this process alone for a while: %s", reason)
        return await _hit(self._own, item, bucket)


async def _hit(limiter: MovingWindowRateLimiter, item: RateLimitItem, bucket: str) -> float | None:
    if await limiter.hit(item, bucket):
        return None
    return (await limiter.get_window_stats(item, bucket)).reset_time


def _redis(url: str) -> RedisStorage:
    try:
        return RedisStorage(
            f"async+{url}", wrap_exceptions=True, implementation="redispy",
            key_prefix="ragcache", socket_timeout=_STORAGE_SECONDS,
            socket_connect_timeout=_STORAGE_SECONDS,
        )  # fmt: skip
    except PackageMissing as error:
        raise MissingExtra("rates in Redis need redis: pip install 'ragcache[redis]'") from error


def check_length(declared: str | None, most: int) -> None:
    """Checks a declared `Content-Length`. Raises `HTTPProblem` (400, 413)."""
    try:
        length = int(declared or 0)
    except ValueError:
        raise HTTPProblem(400, "bad-length", "Content-Length is not a number") from None
    if length > most:
        raise _too_large(most)


def end_of(wanted: str | None, most: float) -> float:
    """The end, on `time.monotonic`, of a request that arrives now. wanted: the seconds that it asks
    for. most: those of the settings. Raises `HTTPProblem` (400)."""
    try:
        seconds = most if wanted is None else float(wanted)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise HTTPProblem(400, "bad-timeout", "X-Request-Timeout is not a positive time in seconds")
    return time.monotonic() + min(seconds, most)


def bounded_receive(receive: Receive, most: int, end: float) -> Receive:
    """Counts the bytes of a body as they come, which must be before `end`. What it returns raises
    `HTTPProblem` (413, 408)."""
    taken, more = 0, True

    async def receive_body() -> Message:
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

    return receive_body


def _too_large(most: int) -> HTTPProblem:
    detail = f"the body has more than the {most:,} bytes that are allowed here"
    return HTTPProblem(413, "body-too-large", detail, {"Connection": "close"})
