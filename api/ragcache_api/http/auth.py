"""The access check: keys, rates, sizes and deadlines, before any part of a body is read.

An API key gives a caller a role and a namespace. Until the first key exists, the service is open to
its own machine, and refuses calls that pages of other sites make in a browser there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from dataclasses import dataclass

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
from ragcache_api.http.browser import open_paths
from ragcache_api.http.errors import HTTPProblem, error_response, logged_error
from ragcache_api.settings import ServiceSettings

logger = logging.getLogger(__name__)

_THREADS = 4  # that check keys; one at a time reads them from the ledger
_STORAGE_SECONDS = 1.0  # timeout of the storage of rates
_REST_SECONDS = 5.0  # pause after a failure of that storage
TIMEOUT_HEADER = "x-request-timeout"
UPLOADS = re.compile(r"/v1/collections/[^/]+/documents$")
_OPEN = ("/health/live", "/health/ready")
_ADMIN = re.compile(r"/(admin|metrics)(/|$)")
_OWN_SITES = ("same-origin", "none")  # `none`: the user typed or opened the address


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    role: str
    """`user` or `admin`."""
    namespace: str
    bucket: str
    """Name under which the caller's requests are counted against the rate."""
    key: int | None = None
    """Id of the API key. Unset while no key exists."""

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see what all namespaces share."""
        return self.role == "admin" and self.namespace == NAMESPACE

    def require_operator(self) -> None:
        """Raise `HTTPProblem` (403) unless the caller may see what all namespaces share."""
        if not self.is_operator:
            text = "this concerns all namespaces: it takes a key of the role `admin` in `default`"
            raise HTTPProblem(403, "forbidden", text)


class AccessMiddleware:
    """ASGI middleware that denies by default.

    Once a key exists, every path needs one, except health checks and the files of the operator's
    page. The operator's paths need the role `admin`. `scope["state"]` gets the `caller`, and the
    `end` of the request on `time.monotonic`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, settings: ServiceSettings) -> None:
        self._app, self._keys, self._settings = app, keys, settings
        self._rate = RateLimit(settings.rate, settings.rate_storage)
        self._open = {*_OPEN, *(open_paths() if settings.page else ())}
        self._threads = CapacityLimiter(_THREADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        settings = self._settings
        try:
            headers, state = Headers(scope=scope), scope.setdefault("state", {})
            if path not in self._open:
                state["caller"] = await self._admit(scope, headers, path)
            end = state["end"] = end_of(headers.get(TIMEOUT_HEADER), settings.deadline)
            limit = settings.upload_bytes if UPLOADS.match(path) else settings.body_bytes
            check_length(headers.get("content-length"), limit)
        except (HTTPProblem, RagCacheError) as problem:  # the ledger may be away for long
            error = logged_error(problem, f"{scope['method']} {path}")
            await error_response(error, path)(scope, receive, send)
            return
        await self._app(scope, bounded_receive(receive, limit, end), send)

    async def _admit(self, scope: Scope, headers: Headers, path: str) -> Caller:
        client = scope.get("client")
        address = client[0] if client else "unknown"
        caller = await self._identify(headers.get("authorization"), address)
        if caller.key is None:
            self._check_origin(headers)
        if _ADMIN.match(path) and caller.role != "admin":
            raise HTTPProblem(403, "forbidden", "this key's role is not `admin`")
        await self._rate.hit(caller.bucket)
        return caller

    async def _identify(self, authorization: str | None, address: str) -> Caller:
        """Find the caller of a request from the keys in memory. Raises `HTTPProblem` (401).

        Now and then the keys are read again, in threads that no other work can take. Before the
        first key every caller is an administrator: the service then listens on loopback only.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        verdict = self._keys.check_in_memory(secret)
        if verdict is None:
            verdict = await to_thread.run_sync(self._keys.check, secret, limiter=self._threads)
        if not verdict.exist:
            return Caller("admin", NAMESPACE, address)
        row = verdict.key
        if row is None:
            raise HTTPProblem(
                401,
                "unauthorized",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )
        return Caller(row.role, row.namespace, f"key {row.id}", row.id)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse calls of other sites' pages while no key exists. Raises `HTTPProblem` (403).

        A browser on this machine would send them, after DNS rebinding or from a form.
        """
        name = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if name not in (*self._settings.allowed_hosts, self._settings.host):
            raise HTTPProblem(
                403,
                "unknown-host",
                "a service without keys answers to its own names alone (setting allowed_hosts); "
                "make a key with `ragcache keys create`",
            )
        site = headers.get("sec-fetch-site", "none").lower()
        origin = headers.get("origin", f"://{headers['host']}").partition("://")[2]
        if site not in _OWN_SITES or origin.lower() != headers["host"].lower():
            raise HTTPProblem(
                403,
                "cross-site",
                "a service without keys takes no calls of other sites' pages, nor of those on "
                "other ports; make a key with `ragcache keys create`",
            )


class RateLimit:
    """Counts the requests of each caller in moving windows.

    Processes that share a Redis count together. While it does not answer, each counts for itself.
    """

    def __init__(self, rate: str | None, storage: str | None = None) -> None:
        """Set up the counters.

        Args:
            rate: Such as `100/minute`. Without one, nothing is counted.
            storage: URL of a Redis. By default this process counts for itself.

        Raises:
            MissingExtra: The package redis is not installed.
        """
        self._items: list[RateLimitItem] = parse_many(rate) if rate else []
        self._own = MovingWindowRateLimiter(MemoryStorage())
        self._shared: MovingWindowRateLimiter | None = None
        self._asked_from = 0.0
        if storage is not None:
            try:
                redis = RedisStorage(
                    f"async+{storage}",
                    wrap_exceptions=True,
                    implementation="redispy",
                    key_prefix="ragcache",
                    socket_timeout=_STORAGE_SECONDS,
                    socket_connect_timeout=_STORAGE_SECONDS,
                )
            except PackageMissing as error:
                text = "rates in Redis need redis: pip install 'ragcache[redis]'"
                raise MissingExtra(text) from error
            self._shared = MovingWindowRateLimiter(redis)

    async def hit(self, bucket: str) -> None:
        """Count a request of a caller. Raises `HTTPProblem` (429) with `Retry-After` in seconds."""
        for item in self._items:
            until = await self._count(item, bucket)
            if until is not None:
                wait = max(1, math.ceil(until - time.time()))
                raise HTTPProblem(
                    429,
                    "rate-limited",
                    f"more than {item} requests; try again in {wait} s",
                    {"Retry-After": str(wait)},
                )

    async def _count(self, item: RateLimitItem, bucket: str) -> float | None:
        """Count a request, and return the next possible time in Unix seconds if it is too many."""
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


def check_length(declared: str | None, limit: int) -> None:
    """Check the value of `Content-Length` against a limit. Raises `HTTPProblem` (400, 413)."""
    try:
        length = int(declared or 0)
    except ValueError:
        raise HTTPProblem(400, "bad-length", "Content-Length is not a number") from None
    if length > limit:
        raise _too_large(limit)


def end_of(wanted: str | None, limit: float) -> float:
    """Return the end of a request that arrives now, on `time.monotonic`.

    Args:
        wanted: `X-Request-Timeout`, the seconds that the caller asks for.
        limit: The most seconds, from the settings.

    Raises:
        HTTPProblem: (400) The header is not a positive number.
    """
    try:
        seconds = limit if wanted is None else float(wanted)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise HTTPProblem(400, "bad-timeout", "X-Request-Timeout is not a positive time in seconds")
    return time.monotonic() + min(seconds, limit)


def bounded_receive(receive: Receive, limit: int, end: float) -> Receive:
    """Wrap `receive` to count the bytes of the body.

    The wrapper raises `HTTPProblem`: 413 for more bytes than the limit, and 408 if the body is not
    complete at `end`, on `time.monotonic`.
    """
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
            if taken > limit:
                raise _too_large(limit)
        return message

    return receive_body


async def wait_for_disconnect(receive: Receive) -> None:
    """Receive messages until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> HTTPProblem:
    detail = f"the body has more than the {limit:,} bytes that are allowed here"
    return HTTPProblem(413, "body-too-large", detail, {"Connection": "close"})
