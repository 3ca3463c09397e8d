"""The Python of the README, of docs/langchain.md and docs/structured.md, and of the docstrings of
`RagCache` runs as it stands, in order."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ragcache import RagCache, config, planning
from ragcache.pipeline.ingest import IngestionJobs
from ragcache.retrieval import filters
from ragcache.structured import ToolStyle
from ragcache_connectors.langchain import ChatRagCache, close_shared
from tests.conftest import REPOSITORY
from tests.connectors.langchain.scripted import STRING, scripted

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


def test_every_docstring_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


LANGCHAIN = (REPOSITORY / "docs/langchain.md").read_text(encoding="utf-8")
LANGCHAIN_BLOCKS = re.findall(
    r"^```python( no-run)?\n(.*?)^```$", LANGCHAIN, re.MULTILINE | re.DOTALL
)


def test_the_python_of_the_langchain_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "langchain_doc"}
    for skipped, code in LANGCHAIN_BLOCKS:
        if not skipped:
            exec(compile(code, "docs/langchain.md", "exec"), names)
    assert len(LANGCHAIN_BLOCKS) > 8


def test_what_needs_another_model_runs_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted model stands in for one that writes JSON."""
    with RagCache.open(tmp_path, model=scripted()) as rag:
        names = {"model": ChatRagCache(rag=rag, max_tokens=200), "note": "x", "__name__": "doc"}
        [code] = [code for skipped, code in LANGCHAIN_BLOCKS if skipped]
        *lines, last = code.rstrip().splitlines()
        exec(compile("\n".join(lines), "docs/langchain.md", "exec"), names)
        assert eval(last, names) == names["Berth"](boat=STRING, quay=STRING)


def test_every_link_of_the_langchain_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", LANGCHAIN)
    assert links
    for link in links:
        assert (REPOSITORY / "docs" / link).exists(), link


STRUCTURED = REPOSITORY / "docs/structured.md"
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_of_structured_output_print_what_the_page_says(
    notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(notes.parent)
    blocks = _BLOCK.findall(STRUCTURED.read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} == {"python", "text"}
    names: dict[str, Any] = {}
    shown = 0
    try:
        for (kind, text), (following, printed) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if kind == "python":
                capsys.readouterr()
                exec(compile(text, STRUCTURED.name, "exec"), names)
                expected = printed if following == "text" else ""
                assert capsys.readouterr().out == expected
                shown += bool(expected)
    finally:
        names["rag"].close()
    assert shown == 2


def test_every_style_of_tool_calls_is_described() -> None:
    page = STRUCTURED.read_text(encoding="utf-8")
    assert all(f"| `{style}` |" in page for style in ToolStyle)
