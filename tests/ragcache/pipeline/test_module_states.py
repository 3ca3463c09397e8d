"""Scaffolds of collections: which modules are encoded together, and what that changes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.db import CollectionVersion, Members, ScaffoldRows
from ragcache.errors import ConfigurationError, PromptTooLong, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.pipeline.module_states import Scaffolds
from ragcache.states import KVKey
from ragcache.store.verify import verify
from tests.ragcache.pipeline.test_ask import DOCUMENTS, QUESTION


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=8, private_bytes="8MiB") as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def blobs(tmp_path: Path) -> int:
    return len(list((tmp_path / "state" / "states").glob("??/*.safetensors")))


@dataclass
class FakeRows:
    """Rows of a ledger."""

    kept: dict[str, dict[Members, KVKey]] = field(default_factory=dict)

    def read_scaffolds(self, collection: str) -> set[tuple[Members, KVKey]]:
        return set(self.kept.get(collection, {}).items())

    def add_scaffold(self, collection: str, members: Members, key: KVKey) -> None:
        self.kept.setdefault(collection, {})[members] = key


def known(*scaffolds: Members) -> Scaffolds:
    rows = FakeRows({"c": {members: KVKey(f"{n:064}") for n, members in enumerate(scaffolds)}})
    made = Scaffolds(cast("ScaffoldRows", rows))
    made.follow("c", CollectionVersion(1, 1, len(scaffolds)))
    made.follow("other", CollectionVersion(2, 1))
    return made


def test_a_selection_is_split_at_its_scaffolds_the_longest_first() -> None:
    scaffolds = known((1, 2), (1, 2, 3), (4, 5))
    assert scaffolds.runs("c", [1, 2, 3, 4, 5]) == [(0, 3), (3, 5)]
    assert scaffolds.runs("c", [9, 1, 2, 4]) == [(0, 1), (1, 3), (3, 4)]
    assert scaffolds.runs("c", [2, 1, 4, 5]) == [(0, 1), (1, 2), (2, 4)]
    assert scaffolds.runs("other", [1, 2]) == [(0, 1), (1, 2)]
    assert scaffolds.runs("c", []) == []


def test_scaffolds_are_read_when_the_collection_changes() -> None:
    rows, key = FakeRows(), KVKey("a" * 64)
    here, there = (Scaffolds(cast("ScaffoldRows", rows)) for _ in range(2))
    here.follow("c", CollectionVersion(1, 1))
    there.keep("c", [3, 1], key)
    assert rows.kept == {"c": {(3, 1): key}}
    here.follow("c", CollectionVersion(1, 1))
    assert here.runs("c", [3, 1]) == [(0, 1), (1, 2)]
    here.follow("c", CollectionVersion(1, 1, 7))
    assert here.runs("c", [3, 1]) == [(0, 2)]
    rows.kept.clear()
    here.keep("c", [3, 1], key)
    assert rows.kept == {}, "what was read is not written again"
    here.follow("c", CollectionVersion(1, 2))
    assert here.runs("c", [3, 1]) == [(0, 1), (1, 2)]


def test_a_kept_key_takes_little_more_than_its_tokens(rag: RagCache) -> None:
    encoder = rag.internals.ask.encoder
    encoder.key(range(1000, 1512))
    tracemalloc.start()
    kept = [encoder.key([ids * 1000 + n for n in range(512)]) for ids in range(2, 34)]
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(kept)) == 32
    assert traced < 32 * (512 * 4 + 1024)  # a tuple of Python's integers takes 18 KiB


def test_a_scaffold_over_all_that_is_read_loses_nothing(rag: RagCache) -> None:
    """Encoded together after the preamble, the modules are what an ordinary prefill makes them."""
    exact = rag.ask(QUESTION, collection="notes", k=2, mode="exact")
    order = [source.document for source in exact.sources]
    assert rag.collections.add_scaffold("notes", order) == tuple(s.module for s in exact.sources)
    encoded = rag.stats().encoded
    answer = rag.ask(QUESTION, collection="notes", k=2)
    assert answer.choices[0].token_ids == exact.choices[0].token_ids
    together = " ".join(source.module for source in exact.sources)
    assert [(s.tier, s.scaffold) for s in answer.sources] == [("host", together)] * 2
    assert {source.scaffold for source in exact.sources} == {""}
    assert rag.stats().encoded == encoded, "it was encoded when it was declared"
    assert answer.reuse.prompt_tokens == exact.reuse.prompt_tokens
    primed = rag.ask(QUESTION, collection="notes", k=2, mode="primed:4")
    assert primed.reuse.cached_tokens == answer.reuse.cached_tokens, "it is the first module"


def test_states_of_a_scaffold_go_with_its_documents(rag: RagCache, tmp_path: Path) -> None:
    rag.collections.add_scaffold("notes", ["boats", "keys#1"])
    before = blobs(tmp_path)
    rag.ingest("notes", [SourceDocument("keys", "The spare key is lost.")])
    assert blobs(tmp_path) == before - 1, "the old module was replaced, the old scaffold is gone"
    assert rag.delete("notes", ["boats"]) == 1
    rag.collections.add_scaffold("notes", ["keys", "leave"])
    assert rag.delete("notes", ["keys", "leave"]) == 2
    assert blobs(tmp_path) == 1, "the preamble"


def test_scaffolds_of_equal_texts_are_all_kept(rag: RagCache) -> None:
    texts = {each.id: each.text for each in DOCUMENTS}
    rag.ingest("notes", [SourceDocument(f"{name} again", text) for name, text in texts.items()])
    rows = ScaffoldRows(rag.internals.shared.store.ledger.database)
    for names in (["boats", "leave"], ["boats again", "leave again"], ["boats", "leave"]):
        rag.collections.add_scaffold("notes", names)
    kept = rows.read_scaffolds("notes")
    assert (len(kept), len({key for _, key in kept})) == (2, 1)
    rag.delete("notes", ["boats"])
    assert len(rows.read_scaffolds("notes")) == 1
    assert verify(rag.internals.shared.store).clean


def test_scaffolds_outlive_the_process(tmp_path: Path, model: LoadedModel) -> None:
    folder = tmp_path / "state"
    with RagCache.open(folder, model, max_tokens=4, private_bytes="8MiB") as rag:
        rag.ingest("notes", DOCUMENTS)
        order = [s.document for s in rag.ask(QUESTION, collection="notes", k=2).sources]
        rag.collections.add_scaffold("notes", order)
    with RagCache.open(folder, model, max_tokens=4, private_bytes="8MiB") as rag:
        first, second = (rag.ask(QUESTION, collection="notes", k=2) for _ in range(2))
        assert all(source.scaffold for source in first.sources)
        assert [{s.tier for s in a.sources} for a in (first, second)] == [{"disk"}, {"host"}]
        assert verify(rag.internals.shared.store).clean
        rag.documents.rename("notes", order[0], "renamed")
        assert rag.ask(QUESTION, collection="notes", k=2).sources[0].scaffold
        before = blobs(tmp_path)
        rag.delete("notes", ["renamed"])
        assert blobs(tmp_path) == before - 2, "its own states and the scaffold's"
        assert verify(rag.internals.shared.store).clean


def test_scaffolds_that_cannot_be(rag: RagCache) -> None:
    for ids, fault in (
        (["boats", "absent"], "no document or module 'absent'"),
        (["boats"], "two modules or more"),
        (["boats", "boats#1"], "each of them once"),
    ):
        with pytest.raises(ConfigurationError, match=fault):
            rag.collections.add_scaffold("notes", ids)
    with pytest.raises(UnknownCollection):
        rag.collections.add_scaffold("absent", ["a", "b"])
    long = [SourceDocument(f"d{i}", "the bell rings " * 60) for i in range(3)]
    rag.ingest("bells", long)
    with pytest.raises(PromptTooLong):
        rag.collections.add_scaffold("bells", ["d0", "d1", "d2"])
