"""Questions to a state folder whose disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_api.cli import console
from tests.api.cli.conftest import QUESTION, Run, json_of


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_copy_answers_where_the_disk_is_full(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "is_full", lambda _: True)
    before = contents(ingested)
    asked = ("ask", QUESTION, "-c", "notes", "-k", 1)
    answer = json_of(run(*asked, "--json"))
    assert [source["tier"] for source in answer["sources"]] == ["disk"]
    status, _, err = run(*asked, "--mode", "isolated")
    assert status == 0
    assert "the disk is full: a copy of the ledger answers, nothing is kept" in err
    assert contents(ingested) == before


def test_an_overlay_is_made_only_where_there_is_room(ingested: Path) -> None:
    assert console.place_with_room(2**62) is None
    with console.overlay_of(ingested) as folder:
        assert folder is not None
        blobs = [file for file in folder.rglob("*.safetensors") if file.is_symlink()]
        assert len(blobs) == 4
    assert not folder.exists()
    assert not console.is_full(ingested / "absent")
