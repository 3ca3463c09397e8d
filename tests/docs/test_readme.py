"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragcache_connectors.langchain import close_shared
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
    finally:
        close_shared()
    assert "cold-store.md" in capsys.readouterr().out


def test_every_command_that_the_readme_names_exists() -> None:
    from typer.main import get_command

    from ragcache_api.cli.main import app

    commands = get_command(app)
    for name in re.findall(r"^\| `ragcache (\w+)", README, re.MULTILINE):
        assert name in commands.commands


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (REPOSITORY / link).exists(), link
