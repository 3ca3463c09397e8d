"""The gate: who calls, how often and with how much, before anything of the request is read."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_api.http.auth import Caller, Doorkeeper
from ragcache_api.http.errors import Refusal, fault_of
from ragcache_api.http.faults import fault_response
from ragcache_api.http.limits import RateLimit, bounded, check_length, end_of

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
    doorkeeper: Doorkeeper
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
        except Refusal as refusal:
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
            raise Refusal(403, "forbidden", "this key's role is not `admin`")
        self.rate.hit(caller.bucket)
        return caller

    def _check_origin(self, headers: Headers) -> None:
        """Without keys, pages of other sites that a browser on this machine shows could call the
        service, by a name of theirs that leads here or by a form. A key they do not have."""
        name = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if name not in self.allowed_hosts:
            raise Refusal(
                403, "unknown-host",
                "a service without keys answers to its own names alone (setting allowed_hosts); "
                "make a key with `ragcache keys create`",
            )  # fmt: skip
        site = headers.get("sec-fetch-site", "none").lower()
        if site not in _OWN_SITES or not _of_own_page(headers):
            raise Refusal(
                403, "cross-site",
                "a service without keys takes no calls of other sites' pages, nor of those on "
                "other ports; make a key with `ragcache keys create`",
            )  # fmt: skip


def _of_own_page(headers: Headers) -> bool:
    """Whether the page that calls, if one does, came from here. Its scheme may be a proxy's."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers["host"].lower()
