"""Every test here is over one PostgreSQL with real processes; `.ci/run` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machines
from tests.cluster.services import Services
from tests.ragcache.conftest import postgres_schema

Measured = Callable[[str, object], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They wait for seconds until processes count as dead."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def machines(socket_enabled: None, tmp_path: Path) -> Iterator[Machines]:
    """Machines that end with the test."""
    with postgres_schema() as url:
        made = Machines(tmp_path, url)
        made.database().close()  # migrated
        yield made
        made.end()


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measured:
    """Prints a figure beside the test's name."""

    def show(name: str, value: object) -> None:
        with capsys.disabled():
            print(f"\n    {name}: {value}", end="", flush=True)

    return show


@pytest.fixture
def services(socket_enabled: None, tmp_path: Path) -> Iterator[Services]:
    """Services that end with the test."""
    with postgres_schema() as url:
        made = Services(tmp_path, url)
        yield made
        made.end()
