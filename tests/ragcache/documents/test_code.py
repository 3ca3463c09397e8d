"""Reading folders of source code."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache.documents.code import read_code
from ragcache.errors import NoDocuments, UnreadableDocument


def test_files_come_by_their_paths_and_hidden_ones_stay(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.rs", ".git/x.py", "a/__pycache__/y.py", "notes.bin"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}", encoding="utf-8")
    assert read_code(tmp_path) == {"a/c.rs": "# a/c.rs", "b.py": "# b.py"}
    assert list(read_code(tmp_path, [".bin"])) == ["notes.bin"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(NoDocuments, match="holds no source code"):
        read_code(tmp_path)
    (tmp_path / "x.py").write_bytes(b"\xff\xff")
    with pytest.raises(UnreadableDocument, match=r"x\.py"):
        read_code(tmp_path)
