"""Every example in the docstrings of `RagCache` runs, in order, in one namespace."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.pipeline.ingest import IngestionJobs

MAIN = {"open", "ingest", "ask", "stream", "chat", "add_schema", "prompt", "retrieve", "within"}


def examples() -> dict[str, doctest.DocTest]:
    """The examples by method, in the order of the source."""
    parser = doctest.DocTestParser()
    methods = {**vars(RagCache), "submit": IngestionJobs.submit}
    found = {
        name: parser.get_doctest(inspect.getdoc(method) or "", {}, name, None, None)
        for name, method in methods.items()
    }
    return {name: test for name, test in found.items() if test.examples}


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "boats.md").write_text("The survey boat is moored at the north quay.")
    names: dict[str, Any] = {"__name__": "docstrings"}
    runner = doctest.DocTestRunner()
    try:
        for test in examples().values():
            test.globs = names
            report: list[str] = []
            failed, _ = runner.run(test, out=report.append, clear_globs=False)
            assert failed == 0, "".join(report)
    finally:
        if "rag" in names:
            names["rag"].close()


def test_every_main_method_has_an_example() -> None:
    assert examples().keys() >= MAIN | {"submit"}
