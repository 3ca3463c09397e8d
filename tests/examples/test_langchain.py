"""The programs in examples/langchain run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.langchain.scripted import AFTER_TOOL, STRING, scripted

FOLDER = Path(__file__).resolve().parents[2] / "examples/langchain"
HANDBOOK = FOLDER.parent / "handbook"


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / name))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Four documents of the handbook: the scripted model's tokens are bytes."""
    for name in ("cold-store.md", "key-loan.md", "dogs.md", "post.md"):
        (tmp_path / name).write_bytes((HANDBOOK / name).read_bytes())
    return tmp_path


def test_the_chain_hits_the_cache_where_it_recognizes(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program("lcel_chain.py")["main"](small)
    with_cache, without = capsys.readouterr().out.splitlines()
    read, whole = map(int, re.findall(r"(\d+) of (\d+) tokens", with_cache)[0])
    assert read > 0.8 * whole
    assert "recognized:rooted" in with_cache
    assert ": 0 of" in without
    assert "exact" in without


def test_tokens_stream_with_usage_and_sources_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program("streaming.py")["main"]()
    out = capsys.readouterr().out
    assert out.splitlines()[0].count("|") >= 2
    assert "['cold-store.md']" in out
    assert "[0]" in out
    assert "[1]" in out


def test_answers_cite_documents_of_their_prompt(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = program("citations.py")["main"]
    main.__globals__["HANDBOOK"] = small
    main(scripted())
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  read from ") for line in lines) >= 1
    assert re.fullmatch(rf"'{STRING}' \[.*\.md\]", lines[-1])


def test_the_agent_searches_and_answers(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = program("agent.py")["main"]
    main.__globals__["HANDBOOK"] = small
    main.__globals__["QUESTION"] = "Where is the key?"
    main(scripted())
    out = capsys.readouterr().out
    assert "calls search_handbook({'query':" in out
    assert f"ai: {AFTER_TOOL}" in out


def test_the_agent_asks_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["agent.py"])
    with pytest.raises(SystemExit, match="MODEL is a folder"):
        runpy.run_path(str(FOLDER / "agent.py"), run_name="__main__")
