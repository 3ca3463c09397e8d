"""The command line as a program: errors, start-up."""

from __future__ import annotations

import ast
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from ragcache import RagCache, __version__
from ragcache_api.cli.main import load_command
from tests.api.cli.conftest import QUESTION, Run, error_of


def test_named_errors_are_one_line_on_standard_error(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    message = error_of(run("ask", QUESTION, "-c", "absent", "--json"), "UnknownCollection")
    assert "absent" in message
    message = error_of(run("ingest", "notes", nowhere, "--json"), "UnreadableDocument")
    assert f"there is no file or folder {nowhere}" in message
    error_of(run("demo", "--handbook", nowhere, "--json"), "NoDocuments")
    error_of(run("ask", "?", "-c", "notes", "--model", nowhere), "ModelNotFound")
    error_of(run("eval", "notes", nowhere), "ConfigurationError")
    error_of(run("schema", "show", "absent"), "UnknownCollection")
    error_of(run("chat", "-c", "absent"), "UnknownCollection")


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        (None, ""),
        ("1234567890ab" + 28 * "c", " (1234567890ab)"),
        ("1234567890ab" + 28 * "c" + "+changed", " (1234567890ab, changed)"),
    ],
)
def test_the_version_is_printed_with_its_commit(
    commit: str | None, told: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_api.cli.main.find_commit", lambda: commit)
    assert run("--version")[:2] == (0, f"ragcache {__version__}{told}\n")


def test_paragraphs_of_help_wrap_on_narrow_terminals() -> None:
    assert "or questions encode them again." in load_command("priming").help
    [shown] = [each for each in load_command("keys").commands.values() if each.name == "create"]
    assert "\n" not in shown.help.replace("\n\n", "")


def test_a_full_disk_is_named(run: Run, ingested: Path) -> None:
    def fail(_cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO sessions"):
            raise sqlite3.OperationalError("database or disk is full")

    event.listen(Engine, "do_execute", fail)
    try:
        message = error_of(run("ask", QUESTION, "-c", "notes", "--json"), "StoreFull")
    finally:
        event.remove(Engine, "do_execute", fail)
    assert f"no space left for the ledger {ingested / 'ledger.sqlite'}" in message


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


HEAVY = ("torch", "transformers", "langchain_text_splitters", "fastapi")
LIBRARIES = (
    *HEAVY, "sqlalchemy", "numpy", "faiss", "langchain_core", "lxml", "llguidance",
    "ragcache_schemas",
)  # fmt: skip


def imported_by(*commands: list[object], status: int, among: tuple[str, ...]) -> list[list[str]]:
    """Return the imports of a new process after its start and after each command that it runs."""
    code = (
        "import sys\n"
        "from ragcache_api.cli.main import main\n"
        f"print('IMPORTED', [m for m in {among} if m in sys.modules])\n"
        f"for arguments in {[list(map(str, each)) for each in commands]}:\n"
        "    sys.argv = ['ragcache', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as left:\n"
        f"        assert (left.code or 0) == {status}, arguments\n"
        f"        print('\\nIMPORTED', [m for m in {among} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED ")]
    assert len(found) == 1 + len(commands), done.stdout
    return [ast.literal_eval(line.partition(" ")[2]) for line in found]


def test_wrong_arguments_fail_before_anything_is_imported(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    commands: list[list[object]] = [
        ["ask", "?", "-c", "notes", "--mode", "fast"],
        ["ask", "?", "-c", "notes", "--state", nowhere],
        ["ask", "?", "-c", "notes", "--model", nowhere],
        ["ingest", "notes", nowhere],
        ["prompt", nowhere],
        ["schema", "add", nowhere],
        ["eval", "notes", nowhere],
        ["plan", nowhere],
        ["verify", "--state", nowhere],
    ]
    assert imported_by(*commands, status=1, among=LIBRARIES) == [[]] * (1 + len(commands))


@pytest.mark.slow
def test_a_collection_is_checked_before_torch_is_imported(ingested: Path) -> None:
    asked: list[object] = ["ask", "?", "-c", "absent", "--state", ingested]
    assert imported_by(asked, status=1, among=HEAVY) == [[], []]


@pytest.mark.slow
def test_commands_that_compute_nothing_do_without_torch(ingested: Path) -> None:
    commands = [["stats"], ["documents", "notes"], ["retrieve", "key", "-c", "notes"]]
    found = imported_by(*([*each, "--state", ingested] for each in commands), status=0, among=HEAVY)
    assert found == [[]] * 4


def test_an_interrupted_command_says_what_is_kept(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RagCache, "ingest", interrupt)
    monkeypatch.setattr(RagCache, "stream", interrupt)
    status, _, err = run("ingest", "notes", ingested / "ledger.sqlite")
    assert status == 130
    assert "interrupted: what was encoded is kept" in err
    assert "the same command goes on" in err
    status, _, err = run("ask", QUESTION, "-c", "notes")
    assert (status, "the state folder is as it was" in err) == (130, True)
