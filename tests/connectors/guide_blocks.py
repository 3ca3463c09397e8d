"""The blocks of the guide to frameworks, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragcache_connectors.langchain import close_shared
from tests.conftest import REPOSITORY

_GUIDE = REPOSITORY / "docs" / "guides" / "frameworks.md"


def check_block(
    framework: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run the guide's block that imports a framework, in a folder with the examples beside it.

    It must print something, and make a state folder.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", _GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    [block] = [each for each in blocks if f"from {framework}" in each]
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(folder)
    try:
        exec(compile(block, str(_GUIDE), "exec"), {"__name__": framework})
    finally:
        close_shared()
    assert capsys.readouterr().out.strip()
    assert (folder / "state").is_dir()
