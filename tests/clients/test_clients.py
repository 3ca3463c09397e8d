"""Every client asks a real service by nothing but its own setting of a base URL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Service
from tests.clients.environments import Environments, prepare_scripts
from tests.clients.table import CLIENTS, Client

pytestmark = [
    pytest.mark.clients,
    pytest.mark.enable_socket,
    pytest.mark.allow_hosts(["127.0.0.1"]),
]
RUNNERS = {".py": "python", ".mjs": "node", ".sh": "bash"}


def each_client(client: Client) -> Any:
    """A client as a parameter, with the mark of the ones that `make test-all` runs."""
    marks = [pytest.mark.official] if client.official else []
    return pytest.param(client, id=client.name, marks=marks)


@pytest.mark.parametrize("client", [each_client(client) for client in CLIENTS])
def test_client_answers_from_the_collection(
    client: Client, service: Service, environments: Environments, tmp_path: Path
) -> None:
    environment = environments.install(client)
    script = prepare_scripts(client, environment, tmp_path, service.url, service.key)
    code, printed = environment.run(
        RUNNERS[script.suffix], script, home=tmp_path, seconds=client.seconds
    )
    sys.stdout.write(f"{printed}\n{service.log}")
    worked = code == 0 and printed_in_order(printed, client.expects)
    assert worked != bool(client.fails), client.fails or client.expects


def printed_in_order(text: str, expected: tuple[str, ...]) -> bool:
    """Whether the texts are in the output, each after the one before."""
    place = 0
    for each in expected:
        place = text.find(each, place) + len(each)
        if place < len(each):
            return False
    return True
