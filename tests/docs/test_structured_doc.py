"""Every example in docs/structured.md runs, in order, and prints what the block after it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOC = Path(__file__).resolve().parents[2] / "docs/structured.md"
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run_and_print_what_they_say(
    notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(notes.parent)
    blocks = _BLOCK.findall(DOC.read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} == {"python", "text"}
    names: dict[str, Any] = {}
    shown = 0
    try:
        for (kind, text), (following, printed) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if kind == "python":
                capsys.readouterr()
                exec(compile(text, DOC.name, "exec"), names)
                expected = printed if following == "text" else ""
                assert capsys.readouterr().out == expected
                shown += bool(expected)
    finally:
        names["rag"].close()
    assert shown == 2


def test_every_style_is_described() -> None:
    from ragcache.structured import ToolStyle

    page = DOC.read_text(encoding="utf-8")
    assert all(f"| `{style}` |" in page for style in ToolStyle)
