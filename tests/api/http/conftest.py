"""A service over three small documents, called without sockets, or started for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.engine.core import EngineCore
from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.server import GracefulServer, server_config
from tests.api.http.server_process import Started, start_server
from tests.conftest import write_notes

LEAVE = "How many days of leave does everybody have?"


@pytest.fixture(scope="module")
def rag(quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    """Three documents in the collection `notes`."""
    folder = tmp_path_factory.mktemp("service")
    with RagCache.open(folder / "state", quick_reader) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
        yield opened


@pytest.fixture(scope="module")
def client(rag: RagCache) -> Iterator[TestClient]:
    """The service as it is on a developer's machine: loopback, no key."""
    with client_of(rag) as made:
        yield made


def client_of(rag: RagCache, **settings: Any) -> TestClient:
    """A client of a service with some settings."""
    app = create_app(rag, ServiceSettings.read(**settings))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms at least: no machine is so quick that a long answer ends before its time."""
    step = EngineCore.step

    def slow_step(core: EngineCore) -> None:
        time.sleep(0.01)
        step(core)

    monkeypatch.setattr(EngineCore, "step", slow_step)


@contextmanager
def serving(rag: RagCache, **settings: Any) -> Iterator[tuple[GracefulServer, str]]:
    """A server in a thread of this process, which starts in no time, and its URL."""
    chosen = ServiceSettings.read(port=0, **settings)
    app = create_app(rag, chosen)
    requests = app.state.service.requests
    config = server_config(app, chosen)
    server = GracefulServer(config, requests, chosen.grace, lame_duck=0.0, page=False)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    yield server, f"http://{host}:{port}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(rag: RagCache) -> Iterator[str]:
    """The URL of a server that the tests of a file share."""
    with serving(rag) as (_, url):
        yield url


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    servers: list[Started] = []

    def begin(state: Path | None = None, *options: str, **environment: str) -> Started:
        servers.append(start_server(state or tmp_path / "state", *options, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.join()


@pytest.fixture(scope="module")
def state(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the notes, closed."""
    folder = tmp_path_factory.mktemp("served")
    with RagCache.open(folder / "state", reader) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
    return folder / "state"


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[Started]:
    """A server that the tests of a file share."""
    started = start_server(state)
    yield started
    started.stop()
