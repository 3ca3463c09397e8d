"""The guide to clients shows the table and the scripts that `make test-clients` runs."""

from __future__ import annotations

import pytest

from tests.clients.guide import PAGE
from tests.clients.table import CLIENTS, KEY, QUESTION, SCRIPTS, SERVICE, Client


def test_guide_shows_the_scripts_that_are_tested() -> None:
    assert PAGE.stored == PAGE.written, f"run {PAGE.command}"


def test_every_folder_of_scripts_is_a_client() -> None:
    assert sorted(client.name for client in CLIENTS) == sorted(
        path.name for path in SCRIPTS.iterdir()
    )


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_scripts_name_service_and_question(client: Client) -> None:
    texts = "".join(file.read_text(encoding="utf-8") for file in client.files)
    assert SERVICE in texts
    assert KEY in texts
    assert QUESTION in texts
    assert all(client.package)
