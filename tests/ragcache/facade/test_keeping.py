"""What callers keep in the ledger beside documents."""

from __future__ import annotations

from pathlib import Path

from ragcache import RagCache
from ragcache.models import LoadedModel


def test_records_and_values_outlive_the_process(tmp_path: Path, reader: LoadedModel) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.records("docs").update(["a"], ["g"])
        rag.values("kept").put({"a": b"1"})
    with RagCache.open(tmp_path / "state", reader) as rag:
        assert rag.records("docs").keys(group_ids=["g"]) == ["a"]
        assert rag.records("plans").keys() == []
        assert rag.values("kept").get(["a"]) == [b"1"]
        assert list(rag.values("more").keys()) == []


def test_namespaces_keep_apart(tmp_path: Path, reader: LoadedModel) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        tenant = rag.within("tenant")
        tenant.records("docs").update(["a"])
        tenant.values("kept").put({"a": b"1"})
        assert rag.records("docs").keys() == []
        assert rag.values("kept").get(["a"]) == [None]
        assert tenant.values("kept").get(["a"]) == [b"1"]
