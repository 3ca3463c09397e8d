"""Every Python example in docs/langchain.md runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/langchain.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python( no-run)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "langchain_doc"}
    for skipped, code in BLOCKS:
        if not skipped:
            exec(compile(code, "docs/langchain.md", "exec"), names)
    assert len(BLOCKS) > 8


def test_what_needs_another_model_runs_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted model stands in for one that writes JSON."""
    from ragcache import RagCache
    from ragcache_connectors.langchain import ChatRagCache
    from tests.connectors.langchain.scripted import STRING, scripted

    with RagCache.open(tmp_path, model=scripted()) as rag:
        names = {"model": ChatRagCache(rag=rag, max_tokens=200), "note": "x", "__name__": "doc"}
        [code] = [code for skipped, code in BLOCKS if skipped]
        *lines, last = code.rstrip().splitlines()
        exec(compile("\n".join(lines), "docs/langchain.md", "exec"), names)
        assert eval(last, names) == names["Berth"](boat=STRING, quay=STRING)


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    for link in links:
        assert (REPOSITORY / "docs" / link).exists(), link
