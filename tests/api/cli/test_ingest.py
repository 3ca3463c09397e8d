"""`ragcache ingest`: what it reports."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ragcache.db import Database, JobRequest, Jobs
from ragcache_api.cli import ingest
from tests.api.cli.conftest import Run, error_of, json_of


def test_ingest_reports_what_it_stored(run: Run, notes: Path) -> None:
    (notes / "photo.jpg").write_bytes(b"\0")
    stored = json_of(run("ingest", "notes", notes, "--json"))
    counts = ("added", "updated", "unchanged", "modules", "encoded")
    assert [stored[name] for name in counts] == [3, 0, 0, 3, 4]
    assert stored["collection"] == "notes"
    assert stored["tokens"] > 50
    assert [Path(file["name"]).name for file in stored["skipped"]] == ["photo.jpg"]
    status, out, _ = run("ingest", "notes", notes)
    assert status == 0
    assert out.splitlines()[0] == "0 documents added, 0 updated, 3 unchanged in notes"
    assert f"skipped: {notes}/photo.jpg: .jpg is no type that is read" in out


def test_states_that_take_much_of_the_disk_bring_a_proposal(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "int8" not in run("ingest", "small", notes)[1]
    monkeypatch.setattr(ingest, "_LARGE", 1)
    assert "`ragcache plan` measures whether kv_dtype=int8" in run("ingest", "notes", notes)[1]
    assert "int8" not in run("ingest", "notes", notes)[1]


def test_old_files_of_office_get_advice(run: Run, notes: Path) -> None:
    for name in ("letter.doc", "slides.ppt", "cat.jpg"):
        (notes / name).write_bytes(b"\xd0\xcf\x11\xe0")
    out = run("ingest", "notes", notes)[1]
    assert "letter.doc: of an old Word; save it as .docx" in out
    assert "slides.ppt: of an old PowerPoint; save it as .pptx" in out


def test_jobs_are_listed_and_canceled(run: Run, notes: Path, tmp_path: Path) -> None:
    assert run("ingest", "notes", notes)[0] == 0
    with closing(Database.open(tmp_path / "state" / "ledger.sqlite")) as database:
        waiting = Jobs(database, "elsewhere").queue(JobRequest("collection plans", "x", ["a"]), 9)[
            0
        ]
    assert f"{waiting}" in run("jobs", "ls")[1]
    assert f"job {waiting} is canceled" in run("jobs", "cancel", waiting)[1]
    rows = json_of(run("jobs", "ls", "--json"))
    assert [(row["target"], row["status"]) for row in rows] == [
        ("collection plans", "canceled"),
        ("collection notes", "done"),
    ]
    error_of(run("jobs", "cancel", "99"), "UnknownJob")
    error_of(run("jobs", "cancel", waiting, "--namespace", "tenant"), "UnknownJob")
