"""The command line as a program: errors, start-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.cli.conftest import QUESTION, Run, error_of


def test_named_errors_are_one_line_on_standard_error(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    message = error_of(run("ask", QUESTION, "-c", "absent", "--json"), "UnknownCollection")
    assert "absent" in message
    assert str(nowhere) in error_of(run("ingest", "notes", nowhere, "--json"), "UnreadableDocument")
    error_of(run("demo", "--handbook", nowhere, "--json"), "NoDocuments")
    error_of(run("ask", "?", "-c", "notes", "--model", nowhere), "ModelNotFound")
    error_of(run("eval", "notes", nowhere), "ConfigurationError")
    error_of(run("schema", "show", "absent"), "UnknownCollection")


def test_a_folder_with_brackets_is_shown_as_it_is(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[red]x[bold]"
    assert "[red]x[bold]" in error_of(run("modules", "ls", "--state", folder), "NoState")


@pytest.mark.slow
def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ragcache_api.cli.main", "modules", "ls"]
    done = subprocess.run(
        [*command, "--state", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("NoState: ")


def test_the_commands_are_listed_without_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "sqlalchemy", "faiss", "langchain_core", "xgrammar")
    code = f"import sys, ragcache_api.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
