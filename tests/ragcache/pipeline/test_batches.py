"""The engine's batch as an operator sees it."""

from __future__ import annotations

from pathlib import Path

from ragcache.engine.core import BatchSnapshot, SegmentUse
from ragcache.pipeline.batches import batch_of
from ragcache.store import Catalogue, Database, NewDocument, NewModule
from tests.ragcache.store.conftest import make_key


def test_segments_have_the_names_of_the_namespaces_modules(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    for number, namespace in enumerate(("default", "tenant")):
        modules = [NewModule(f"{namespace}#1", "text", [1], make_key(number))]
        document = NewDocument(namespace, "", "", modules)
        Catalogue(database, "t", None, namespace).replace("notes", [document])
    uses = tuple(
        SegmentUse(f"{make_key(n)}{part}", 3, 2, 4) for n, part in enumerate(("", "[1:3]"))
    )
    view = BatchSnapshot(5, 2, 0, (*uses, SegmentUse("f" * 64, 1, 2, 4)))
    mine, theirs = (batch_of(view, database, name) for name in ("default", "tenant"))
    assert [segment.module for segment in mine.segments] == ["default#1", None, None]
    assert [(s.module, s.tokens, s.rows) for s in theirs.segments] == [("tenant#1", 3, 4)]
    assert (mine.rows, mine.requests) == (theirs.rows, theirs.requests) == (5, 2)
    assert batch_of(BatchSnapshot(), database, "default").segments == ()
    database.close()
