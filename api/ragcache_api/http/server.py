"""Serving until a signal: requests that run get their time, then are told, and all is written."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from fastapi import FastAPI

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache_api.http.app import create_app
from ragcache_api.http.requests import RequestRegistry
from ragcache_api.settings import ServiceSettings

logger = logging.getLogger("uvicorn.error")  # beside the server's own line of its address
_TOLD_SECONDS = 5.0  # for the last events of those that were given up
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class KeyNeeded(ConfigurationError):
    """The service may not listen where others reach it before there is a key."""


class GracefulServer(uvicorn.Server):
    """Stops accepting on SIGTERM, gives what runs `grace` seconds, then tells it to end."""

    def __init__(
        self, config: uvicorn.Config, running: RequestRegistry, grace: float, *, page: bool
    ) -> None:
        super().__init__(config)
        self._running, self._grace, self._page = running, grace, page

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listens, and tells where the operator's page is."""
        await super().startup(sockets)
        if self._page and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            logger.info("operator's page: http://%s:%d/admin/", name, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Ends what runs, and then the server."""
        self._running.drain()
        telling = asyncio.create_task(self._tell())
        try:
            await super().shutdown(sockets)
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        await asyncio.sleep(self._grace)
        self._running.stop()


def serve(rag: RagCache, settings: ServiceSettings) -> None:
    """Serves until SIGTERM or SIGINT; the state folder stays the caller's to close. From then on
    both signals do nothing in this process: uvicorn raises the one it got once more when it has
    ended, and impatient senders theirs, while the folder is being closed. Raises `KeyNeeded`."""
    check_reach(rag, settings)
    app = create_app(rag, settings)
    config = server_config(app, settings)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    server = GracefulServer(config, app.state.service.running, settings.grace, page=settings.page)
    with long_lived():
        server.run()


@contextmanager
def long_lived() -> Iterator[None]:
    """Whatever stands now is taken to stay, so that no full garbage collection goes through it
    again: half a million objects of the libraries, over which every stream would wait 0.26 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def server_config(app: FastAPI, settings: ServiceSettings) -> uvicorn.Config:
    """How the server listens. Who calls is told by proxies that the settings name, else by the
    connection alone."""
    return uvicorn.Config(
        app, host=settings.host, port=settings.port, log_level=settings.log_level,
        timeout_graceful_shutdown=int(settings.grace + _TOLD_SECONDS) or 1, server_header=False,
        access_log=settings.log_level == "debug", lifespan="on",
        timeout_keep_alive=75,  # clients that keep connections must not meet their end
        limit_concurrency=settings.connections,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
    )  # fmt: skip


def check_reach(rag: RagCache, settings: ServiceSettings) -> None:
    """Raises `KeyNeeded` for an address that others reach while no key exists."""
    if not is_loopback(settings.host) and not rag.keys.any():
        raise KeyNeeded(
            f"{settings.host} can be reached by others, and no key exists: make one with "
            "`ragcache keys create NAME --role admin`, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
