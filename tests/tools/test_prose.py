"""The prose checker finds every kind of place that it counts."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "prose.py"))

BAD = '''"""What a queue holds."""

class Entry:
    """An entry. size: bytes; None is that of all.

    Example:
        >>> Entry(size=1)
    """

    size: int | None
    name: str
    """Name of the entry, which is what the user gave."""

def drop():
    """Those of the queue that end."""

ROWS = ((1, 2),
        (3, 4))  # fmt: skip
'''
GOOD = '''"""Entries of a queue."""

class Entry:
    """An entry."""

    size: int | None
    """Size in bytes. Defaults to the size of the queue."""
'''


def write(root: Path, source: str) -> Path:
    file = root / "ragcache" / "queue.py"
    for package in ("ragcache", "schemas", "connectors", "api"):
        (root / package).mkdir()
        (root / package / "__init__.py").write_text("")
    (root / "docs" / "adr").mkdir(parents=True)
    for folder in TOOL["SCRIPTS"]:
        (root / folder).mkdir()
    (root / "README.md").write_text("# Queue\n")
    file.write_text(source)
    return file


def test_findings_name_their_places(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    found = TOOL["find"]([file])
    lines = [int(each.removeprefix(f"{file}:").partition(":")[0]) for each in found.pronouns]
    assert lines == [1, 3, 3, 12, 14]
    assert found.subjectless == [
        f"{file}:1: What a queue holds.",
        f"{file}:14: Those of the queue that end.",
    ]
    assert found.run_on == [f"{file}:3: size"]
    assert found.skips == [f"{file}:18"]
    assert found.per_thousand == pytest.approx(1000 * 5 / found.words)


SCRIPT = '"""What a queue costs."""\n'


@pytest.mark.parametrize(
    ("source", "script", "code"), [(BAD, "", 1), (GOOD, SCRIPT, 1), (GOOD, "", 0)]
)
def test_exit_code_tells_whether_limits_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, script: str, code: int
) -> None:
    write(tmp_path, source)
    (tmp_path / "benchmarks" / "queue.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert TOOL["main"]([]) == code


def test_paragraphs_leave_out_tables_code_and_decision_records(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    page = (
        "# Title\n\none two\n\n- three\n- four five six\n\n```\na b c d e\n```\n\n| a b c d e f |\n"
    )
    (tmp_path / "docs" / "page.md").write_text(page)
    (tmp_path / "docs" / "adr" / "0001.md").write_text("a long paragraph of an old decision\n")
    assert TOOL["longest_paragraph"](tmp_path) == (4, "docs/page.md: - four five six")
