"""The access check: keys and rates, before any part of a body is read.

An API key gives a caller a role and a namespace. Until the first key exists, the service is open to
its own machine, and refuses calls that pages of other sites make in a browser there.
"""

from __future__ import annotations

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
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache.config import NAMESPACE
from ragcache.db import ApiKeys
from ragcache.errors import MissingExtra
from ragcache.params import KeyParams
from ragcache_api.http.browser import open_paths
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.incoming import (
    TIMEOUT_HEADER,
    bounded_receive,
    check_length,
    end_of,
    gunzipped,
    is_packed,
    unpacked_scope,
)
from ragcache_api.settings import ServiceSettings

logger = logging.getLogger(__name__)

_THREADS = 4  # that check keys; one at a time reads them from the ledger
_STORAGE_SECONDS = 1.0  # timeout of the storage of rates
_REST_SECONDS = 5.0  # pause after a failure of that storage
UPLOADS = re.compile(r"/v1/collections/[^/]+/documents/?$")
_LARGE = re.compile(rf"{UPLOADS.pattern}|/v1/files/?$")
ARCHIVES = re.compile(r"/admin/collections/[^/]+/archive/?$")
_ARCHIVE_SECONDS = 86_400.0  # in which an archive must have come
_OPEN = ("/health", "/health/live", "/health/ready")
KEY_HEADERS = ("x-api-key", "api-key")
_ADMIN = re.compile(r"/(admin|metrics)(/|$)")
_OWN_SITES = ("same-origin", "none")  # `none`: the user typed or opened the address


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    options: KeyParams
    """Options of the request's key."""
    bucket: str
    """Name under which the caller's requests are counted against the rate."""
    key: int | None = None
    """Id of the API key. Unset while no key exists."""

    @property
    def namespace(self) -> str:
        """The namespace that the caller works in."""
        return self.options.namespace

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see what all namespaces share."""
        return self.options.role == "admin" and self.namespace == NAMESPACE

    def require_operator(self) -> None:
        """Raise `HTTPProblem` (403) unless the caller may see what all namespaces share."""
        if not self.is_operator:
            text = "this concerns all namespaces: it takes a key of the role `admin` in `default`"
            raise HTTPProblem(403, "forbidden", text)


class AccessMiddleware:
    """ASGI middleware that denies by default.

    Once a key exists, every path needs one, except health checks and the files of the operator's
    page. The operator's paths need the role `admin`. `scope["state"]` gets the `caller`, and the
    `end` of the request on `time.monotonic`. Raises `HTTPProblem` and the ledger's errors.
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
        settings, headers = self._settings, Headers(scope=scope)
        state = scope.setdefault("state", {})
        if path not in self._open:
            state["caller"] = await self._admit(scope, headers, path)
        limit, seconds = settings.body_bytes, settings.deadline
        if _LARGE.match(path):
            limit = settings.upload_bytes
        elif ARCHIVES.match(path):
            limit, seconds = settings.import_bytes, _ARCHIVE_SECONDS
        end = state["end"] = end_of(headers.get(TIMEOUT_HEADER), seconds)
        check_length(headers.get("content-length"), limit)
        if is_packed(headers.get("content-encoding")):
            scope, receive = unpacked_scope(scope), gunzipped(receive)
        await self._app(scope, bounded_receive(receive, limit, end), send)

    async def _admit(self, scope: Scope, headers: Headers, path: str) -> Caller:
        client = scope.get("client")
        address = client[0] if client else "unknown"
        caller = await self._identify(secret_of(headers), address)
        if caller.key is None:
            self._check_origin(headers)
        if _ADMIN.match(path) and caller.options.role != "admin":
            raise HTTPProblem(403, "forbidden", "this key's role is not `admin`")
        await self._rate.hit(caller.bucket)
        return caller

    async def _identify(self, secret: str, address: str) -> Caller:
        """Find the caller of a request from the keys in memory. Raises `HTTPProblem` (401).

        Now and then the keys are read again, in threads that no other work can take. Before the
        first key every caller is an administrator: the service then listens on loopback only.
        """
        verdict = self._keys.check_in_memory(secret)
        if verdict is None:
            verdict = await to_thread.run_sync(self._keys.check, secret, limiter=self._threads)
        if not verdict.exist:
            return Caller(KeyParams(role="admin"), address)
        row = verdict.key
        if row is None:
            raise HTTPProblem(
                401,
                "unauthorized",
                "give a key of this service: Authorization: Bearer KEY "
                "(`ragcache keys create` makes one)",
                {"WWW-Authenticate": 'Bearer realm="ragcache"'},
            )
        return Caller(row, f"key {row.id}", row.id)

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
        if headers.get("origin") in self._settings.cors_origins:  # by name: `*` opens no service
            return
        site = headers.get("sec-fetch-site", "none").lower()
        origin = headers.get("origin", f"://{headers['host']}").partition("://")[2]
        if site not in _OWN_SITES or origin.lower() != headers["host"].lower():
            raise HTTPProblem(
                403,
                "cross-site",
                "a service without keys takes no calls of other sites' pages, nor of those on "
                "other ports; make a key with `ragcache keys create`",
            )


def secret_of(headers: Headers) -> str:
    """Return the secret of a request: `Authorization: Bearer`, or else `x-api-key` or `api-key`.

    Anthropic's clients send the second, Azure's the third. The result is empty without any.
    """
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    return next((headers[name].strip() for name in KEY_HEADERS if name in headers), "")


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
