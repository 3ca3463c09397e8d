"""Examples in docstrings run: those of `RagCache` in order, in one namespace, others by module."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ragcache import RagCache, config, planning
from ragcache.pipeline.ingest import IngestionJobs
from ragcache.retrieval import filters

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


@pytest.mark.parametrize("module", [config, filters, planning], ids=lambda each: each.__name__)
def test_examples_of_functions_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
