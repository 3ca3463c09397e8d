"""The examples of docs/rest.md and docs/operating.md run, against a started service."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app
from ragcache_api.http import ServiceSettings
from tests.api.http.server_process import start_server
from tests.conftest import REPOSITORY, write_notes

PAGES = ("rest.md", "operating.md")
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return [found[2] for found in _BLOCK.finditer(text) if found[1] == kind]


@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, reader: LoadedModel, tmp_path: Path) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", write_notes(tmp_path / "notes"))
    server = start_server(tmp_path / "state")
    try:
        names: dict[str, object] = {}
        examples = blocks(page, "python")
        assert len(examples) >= 4
        for example in examples:
            code = example.replace("http://127.0.0.1:8000", server.url)
            exec(compile(code, page, "exec"), names)
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists(page: str) -> None:
    lines = [line.split() for block in blocks(page, "sh") for line in block.splitlines()]
    assert lines
    for words in lines:
        command = get_command(app)
        for word in words[1:]:
            if not hasattr(command, "commands"):
                break
            command = command.commands[word]
        options = {name for each in command.params for name in each.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_the_settings_file_is_one() -> None:
    [text] = blocks("operating.md", "toml")
    ServiceSettings.read(**tomllib.loads(text))


def test_every_route_is_on_a_page() -> None:
    from fastapi.routing import APIRoute

    from ragcache_api.http.app import ROUTERS

    text = "".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            stem = re.sub(r"/\{.*", "", route.path)
            assert stem in text, route.path
