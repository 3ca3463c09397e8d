"""A service over three small documents, called without sockets, or started for real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings, create_app
from tests.conftest import write_notes

LEAVE = "How many days of leave does everybody have?"
_LISTENING = re.compile(r"running on http://([\d.]+):(\d+)")


@pytest.fixture(scope="module")
def rag(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    """Three documents in the collection `notes`."""
    folder = tmp_path_factory.mktemp("service")
    with RagCache.open(folder / "state", reader) as opened:
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


@dataclass
class Started:
    """A server process. log: what it wrote."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, seconds: float = 60) -> int:
        """Ends it as an operator would; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


Start = Callable[..., Started]


def start_server(state: Path, *options: str, **environment: str) -> Started:
    """`ragcache serve` on a free port of loopback."""
    command = [sys.executable, "-m", "ragcache_api.cli.main", "serve"]
    process = subprocess.Popen(
        [*command, "--state", str(state), "--port", "0", *options],
        stderr=subprocess.PIPE, text=True, cwd=state.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    started = Started(process, "")
    assert process.stderr is not None
    for line in process.stderr:
        started.log.append(line)
        if found := _LISTENING.search(line):
            started.url = f"http://{found[1]}:{found[2]}"
            break
    else:
        process.wait(10)
        raise AssertionError("".join(started.log))
    rest = process.stderr
    threading.Thread(target=lambda: started.log.extend(rest), daemon=True).start()
    return started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    servers: list[Started] = []

    def begin(state: Path | None = None, *options: str, **environment: str) -> Started:
        servers.append(start_server(state or tmp_path / "state", *options, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


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
