"""`ragcache ingest`: what it reports."""

from __future__ import annotations

from pathlib import Path

from tests.api.cli.conftest import Run, json_of


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
    assert "0 documents added, 0 updated, 3 unchanged in notes: 0 modules" in out
    assert f"skipped: {notes}/photo.jpg: .jpg is no type that is read" in out
