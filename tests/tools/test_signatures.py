"""`tools/signatures.py`: changes that break a program, additions, and the stub of this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools.signatures import breakages, main, write_stub

FROZEN = """
class Cache:
    def __init__(self, folder: str) -> None: ...
    size: int = 8
    name: str
    def ask(self, question: str, k: int = 4) -> str: ...
def load(path: str) -> Cache: ...
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def load", "def read", ["load"]),
        ("    name: str\n", "", ["name"]),
        ("size: int = 8", "size: int = 9", ["size", "8", "9"]),
        (", k: int = 4", "", ["ask(k)", "removed"]),
        ("k: int = 4", "k: int = 5", ["ask(k)", "default"]),
        ("path: str", "path: str, mode: str", ["load(mode)", "required"]),
        ("question: str, k: int = 4", "question: str, *, k: int = 4", ["ask(k)", "kind"]),
    ],
)
def test_a_change_that_breaks_programs_is_told(old: str, new: str, told: list[str]) -> None:
    assert FROZEN.count(old) == 1
    [line] = breakages(FROZEN, FROZEN.replace(old, new))
    assert all(word in line for word in told), line


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k: int = 4", "k: int = 4, mode: str = 'fast'"),
        ("    name: str\n", "    name: str\n    more: int = 0\n"),
        ("def load", "def save() -> None: ...\ndef load"),
    ],
)
def test_an_addition_breaks_nothing(old: str, new: str) -> None:
    assert breakages(FROZEN, FROZEN.replace(old, new)) == []


@pytest.fixture(scope="module")
def stub() -> str:
    return write_stub(REPOSITORY)


@pytest.mark.parametrize(
    "line",
    [
        "class AskOptions:",
        "    k: int = DEFAULT_K",  # inherited, and without its checks
        "class ChatRagCache:",
        "class OpenConfig:",
        "class PMLError:",
        "    open: object",
        "    def ask(self, question: str, options: AskOptions) -> Answer: ...",
        "class StoreFull:",
    ],
)
def test_the_stub_has_what_programs_use(line: str, stub: str) -> None:
    assert line in stub.splitlines()


def test_private_names_are_no_interface(stub: str) -> None:
    assert " def _" not in stub.replace(" def __init__", "")


def test_a_broken_release_fails_the_check(
    tmp_path: Path, stub: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.signatures.write_stub", lambda _: stub)
    frozen = tmp_path / "tests" / "compatibility" / "0.0.9"
    frozen.mkdir(parents=True)
    assert main(["--write", str(frozen / "signatures.pyi")]) == 0
    assert main(["--root", str(tmp_path)]) == 0
    with (frozen / "signatures.pyi").open("a", encoding="utf-8") as file:
        file.write("def gone() -> None: ...\n")
    assert main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("0.0.9: ")
