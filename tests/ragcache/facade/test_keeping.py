"""What callers keep in the ledger beside documents."""

from __future__ import annotations

from pathlib import Path

from ragcache import RagCache
from ragcache.models import LoadedModel


def test_records_outlive_the_process(tmp_path: Path, reader: LoadedModel) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.records("docs").update(["a"], ["g"])
    with RagCache.open(tmp_path / "state", reader) as rag:
        assert rag.records("docs").keys(group_ids=["g"]) == ["a"]
        assert rag.records("plans").keys() == []


def test_namespaces_keep_apart(tmp_path: Path, reader: LoadedModel) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        tenant = rag.within("tenant")
        tenant.records("docs").update(["a"])
        assert rag.records("docs").keys() == []
        assert tenant.records("docs").keys() == ["a"]
