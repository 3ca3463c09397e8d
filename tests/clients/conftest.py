"""A service over documents of the handbook, with a key, for clients that others wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app
from tests.api.http.server_process import Started, start_server
from tests.api.page.conftest import chromium  # noqa: F401
from tests.clients.environments import Environments
from tests.conftest import REPOSITORY

COLLECTIONS = {
    "handbook": ("travel", "cold-store", "annual-leave", "key-loan", "visitors"),
    "harbour": ("radios", "merganser", "workboats", "slipway"),
}
"""Documents of `examples/handbook` by collection."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    url: str
    """Address without a path."""
    key: str
    """API key of the role that asks."""
    admin_key: str
    process: Started

    @property
    def log(self) -> str:
        """The last lines that the service wrote."""
        return "".join(self.process.log[-40:])


@pytest.fixture(scope="session")
def service(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`ragcache serve` on a fresh state folder with the embedded reader."""
    state = tmp_path_factory.mktemp("service") / "state"
    with RagCache.open(state, reader) as rag:
        for collection, names in COLLECTIONS.items():
            folder = tmp_path_factory.mktemp(collection)
            for name in names:
                shutil.copy(REPOSITORY / "examples" / "handbook" / f"{name}.md", folder)
            rag.ingest(collection, folder)
    keys = make_key(state, "clients"), make_key(state, "operator", "--role", "admin")
    process = start_server(state)
    yield Service(process.url, *keys, process)
    assert process.stop() == 0


def make_key(state: Path, name: str, *options: str) -> str:
    """Make an API key, and return its secret."""
    command = ["keys", "create", name, *options, "--state", str(state)]
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    return made.stdout.split()[-1]


@pytest.fixture(scope="session")
def environments() -> Environments:
    """Environments of the clients, installed when a test asks for one."""
    return Environments.open()
