"""Runs of the command line, and a state folder to run it on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

from ragcache import RagCache, opening
from ragcache.models import LoadedModel
from ragcache_api.cli.main import main
from tests.conftest import write_notes

QUESTION = "Where does the spare key of the boathouse hang?"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Typer makes all commands anew for every run of one."""
    made = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ragcache ARGUMENTS`; gives exit status, standard output and standard error."""
    monkeypatch.setenv("RAGCACHE_STATE", str(tmp_path / "state"))

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ragcache", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return command


def json_of(result: tuple[int, str, str]) -> Any:
    """The JSON that a successful command printed."""
    status, out, err = result
    assert status == 0, err
    return json.loads(out)


def error_of(result: tuple[int, str, str], name: str) -> str:
    """The message of a command that failed with this error and printed nothing else."""
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith(f"{name}: ")
    assert "Traceback" not in err
    return err


@pytest.fixture(autouse=True)
def _default_is_quick(quick_reader: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without `--model` open the session's `quick_reader`."""
    load = opening.load_model

    def load_default(name: str | Path | None = None, **options: Any) -> LoadedModel:
        return quick_reader if name is None else load(name, **options)

    monkeypatch.setattr(opening, "load_model", load_default)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, quick_reader: LoadedModel) -> Path:
    """A state folder into which the notes were ingested."""
    folder = tmp_path_factory.mktemp("library")
    with RagCache.open(folder / "state", quick_reader) as opened:
        opened.ingest("notes", [write_notes(folder / "notes")])
    return folder / "state"


@pytest.fixture
def ingested(library: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(library, tmp_path / "state"))
