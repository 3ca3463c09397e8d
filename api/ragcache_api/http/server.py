"""The server process, which listens and ends gracefully on a signal.

Running requests have `grace` seconds (a setting) to finish. Then they end with an error.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import time
from socket import AF_INET, AF_INET6, create_server, socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ragcache import RagCache
from ragcache.db import ApiKeys
from ragcache.errors import ConfigurationError
from ragcache.machine import frozen_heap, release_freed_memory_regularly
from ragcache_api.http.app import create_app
from ragcache_api.http.connection import ServiceProtocol
from ragcache_api.http.requests import RequestRegistry
from ragcache_api.settings import ServiceSettings

logger = logging.getLogger("uvicorn.error")  # where uvicorn logs its own address
_TICK_SECONDS = 0.05  # between two checks for the end of the lame-duck period
_LAST_EVENTS_SECONDS = 5.0  # to send the error events of requests that `grace` was too short for
_YOUNG_OBJECTS = 700
"""New objects between two collections of garbage: Python's default, even if a command has raised
it. Requests leave garbage for as long as the service runs."""


class KeyRequired(ConfigurationError):
    """The service cannot listen on a public address while no key exists."""


class GracefulServer(uvicorn.Server):
    """A server that stops in three steps after SIGTERM.

    For `lame_duck` seconds it reports itself as not ready but accepts requests, until load
    balancers have noticed. Then it accepts no more. After `grace` seconds it cancels the requests
    that still run.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        requests: RequestRegistry,
        grace: float,
        lame_duck: float,
        *,
        page: bool,
    ) -> None:
        super().__init__(config)
        self._requests, self._grace, self._page = requests, grace, page
        self._lame_duck = lame_duck
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. SIGINT and a second signal skip the lame-duck period."""
        self._signals += 1
        if sig == signal.SIGINT:
            self._lame_duck = 0.0
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        """Serve until a signal and for the lame-duck period after it."""
        await super().main_loop()
        self._requests.leaving = True
        until, signals = time.monotonic() + self._lame_duck, self._signals
        while time.monotonic() < until and self._signals == signals and self._lame_duck:
            await asyncio.sleep(_TICK_SECONDS)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to listen, and log the addresses of the two pages."""
        await super().startup(sockets)
        if self._page and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            address = f"http://{name}:{port}/"
            logger.info("page: %s (operators: %sadmin/)", address, address)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """End the running requests, then the server."""
        self._requests.drain()
        stopping = asyncio.get_running_loop().call_later(self._grace, self._requests.stop)
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()


def serve(rag: RagCache, settings: ServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT. The caller closes the state folder.

    Both signals are ignored in this process from then on: uvicorn raises its signal once more when
    it has ended, and impatient senders repeat theirs while the folder is being closed.

    Raises:
        KeyRequired: The address is public, and no key exists.
    """
    check_exposure(rag.keys, settings)
    app = create_app(rag, settings)
    rag.collections.prepare_indexes()
    config = server_config(app, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    release_freed_memory_regularly()
    requests = app.state.service.requests
    with frozen_heap(_YOUNG_OBJECTS):
        GracefulServer(
            config, requests, settings.grace, settings.lame_duck, page=settings.page
        ).run()


def server_config(app: FastAPI, settings: ServiceSettings) -> uvicorn.Config:
    """Return uvicorn's configuration. Only proxies that the settings name may set the client."""
    return uvicorn.Config(
        app,
        http=ServiceProtocol,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        timeout_graceful_shutdown=int(settings.grace + _LAST_EVENTS_SECONDS) or 1,
        access_log=settings.log_level == "debug",
        lifespan="on",
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections in their pools
        limit_concurrency=settings.connections,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
    )


def check_address(settings: ServiceSettings) -> None:
    """Check that this process may listen on the address, before a model is loaded for it.

    Raises:
        ConfigurationError: Another process listens there, or the address is not this machine's.
    """
    family = AF_INET6 if ":" in settings.host else AF_INET
    try:
        create_server((settings.host, settings.port), family=family).close()
    except OSError as error:
        raise ConfigurationError(
            f"{settings.host}, port {settings.port}: {error.strerror}; choose another address with "
            "--host and --port"
        ) from error


def check_exposure(keys: ApiKeys, settings: ServiceSettings) -> None:
    """Check that a public address has a key. Raises `KeyRequired`."""
    if not is_loopback(settings.host) and not keys.any():
        raise KeyRequired(
            f"{settings.host} can be reached by others, and no key exists: make one with "
            "`ragcache keys create NAME --role admin`, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
