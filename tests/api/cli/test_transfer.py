"""`ragcache export` and `import`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.cli.conftest import QUESTION, Run, error_of, json_of


def test_a_collection_travels_to_another_folder(run: Run, ingested: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "notes.tar", ("--state", tmp_path / "other")
    done = json_of(run("export", "notes", file, "--json"))
    assert done["nbytes"] == file.stat().st_size
    assert (done["documents"], done["states"], done["missing"]) == (3, 3, 0)
    imported = json_of(run("import", file, "--as", "copy", *other, "--json"))
    assert imported == {
        "collection": "copy",
        "documents": 3,
        "modules": 3,
        "states": 3,
        "known": 0,
        "encoded": 0,
        "missing": 0,
    }
    assert json_of(run("verify", *other, "--json"))["clean"]
    answer = json_of(run("ask", QUESTION, "-c", "copy", *other, "--json"))
    assert answer["sources"]


@pytest.mark.slow
def test_both_commands_say_what_they_did(run: Run, ingested: Path, tmp_path: Path) -> None:
    status, out, _ = run("export", "notes", tmp_path / "notes.tar")
    assert status == 0
    assert "3 documents of notes with 3 modules and 3 states written to" in " ".join(out.split())
    error_of(run("import", tmp_path / "notes.tar"), "CollectionExists")
    status, out, _ = run("import", tmp_path / "notes.tar", "--namespace", "tenant")
    assert status == 0
    assert "3 states stored, 0 there already, 0 encoded" in " ".join(out.split())
    status, out, _ = run("import", tmp_path / "notes.tar", "--replace")
    assert "0 states stored, 3 there already" in " ".join(out.split())


def test_wrong_arguments_are_named(run: Run, ingested: Path, tmp_path: Path) -> None:
    error_of(run("export", "absent", tmp_path / "a.tar"), "UnknownCollection")
    assert "ragcache export" in error_of(run("import", tmp_path / "a.tar"), "UnreadableDocument")
    (tmp_path / "b.tar").write_bytes(b"no archive")
    error_of(run("import", tmp_path / "b.tar"), "ArchiveDamaged")
    assert not list(tmp_path.glob("*.part"))
