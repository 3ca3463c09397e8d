"""Plans of small corpora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError, NoDocuments, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.planning import (
    Budgets,
    Corpus,
    corpus_of_collection,
    corpus_of_sources,
    make_plan,
)
from ragcache.planning.measuring import spread
from ragcache.store import Database


def test_files_are_split_as_ingestion_splits_them(
    reader: LoadedModel, notes: Path, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []
    planned = corpus_of_sources(reader, notes, 32, lambda *now: done.append(now))
    assert done[-1] == (3, 3)
    with RagCache.open(tmp_path / "state", reader, module_tokens=32) as rag:
        ingestion = rag.ingest("notes", notes)
    assert (planned.documents, len(planned.modules), planned.tokens) == (
        3, ingestion.modules, ingestion.tokens
    )  # fmt: skip
    database = Database.open_existing(tmp_path / "state" / "ledger.sqlite")
    try:
        stored = corpus_of_collection(reader, database, "notes", lambda *_: None)
        with pytest.raises(UnknownCollection):
            corpus_of_collection(reader, database, "other", lambda *_: None)
    finally:
        database.close()
    assert sorted(map(tuple, stored.modules)) == sorted(map(tuple, planned.modules))
    assert stored.documents == 3


def test_a_plan_says_what_was_measured_and_what_is_extrapolated(
    reader: LoadedModel, tmp_path: Path
) -> None:
    corpus = Corpus(2, tuple([7] * n for n in (8, 16, 24, 40)))
    folder = tmp_path / "not" / "there"
    said: list[str] = []
    plan = make_plan(
        reader, corpus, Budgets(10**9, disk_bytes=10), folder, sample=2, progress=said.append
    )
    assert (plan.documents, plan.modules, plan.tokens, plan.longest) == (2, 4, 88, 40)
    assert (plan.measured.modules, plan.measured.tokens) == (2, 16 + 40)
    assert [cut.tokens for cut in plan.measured.cuts] == [5, 10, 20, 40]
    assert plan.encode_s == pytest.approx(plan.measured.encode_s * 88 / 56)
    assert not folder.exists()
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert said
    facts = json.loads(json.dumps(plan.facts()))
    assert facts["extrapolated"] == {"encode_s": plan.encode_s}
    assert "encode_s" not in facts
    assert facts["measured"]["encode_s"] == plan.measured.encode_s
    disk = plan.size("disk", "model")
    assert disk is not None
    assert 0 < disk.share < 0.01
    assert plan.size("device", "model") is None


def test_a_corpus_without_text_or_with_long_modules_is_named(
    reader: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(NoDocuments):
        make_plan(reader, Corpus(1, ()), Budgets(1), tmp_path)
    long = Corpus(1, ([7] * reader.causal.window,))
    with pytest.raises(ConfigurationError, match="module_tokens"):
        make_plan(reader, long, Budgets(1), tmp_path)


def test_a_sample_is_spread_over_the_lengths() -> None:
    assert spread([30, 10, 20], 3) == [1, 2, 0]
    assert spread([30, 10, 20], 9) == [1, 2, 0]
    assert spread([5, 1, 4, 2, 3, 6], 2) == [3, 0]
    assert spread(list(range(100)), 4) == [12, 37, 62, 87]
