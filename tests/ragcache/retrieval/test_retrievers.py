"""Retrievers by embedder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache.retrieval import CollectionIndex, Criteria, Retrievers
from ragcache.states import KVKey
from ragcache.store import Catalogue, Database, NewDocument, NewModule


class Other(DeterministicFakeEmbedding):
    """Another name."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    catalogue = Catalogue(opened, "tokenizer", None)
    module = NewModule("a#1", "boat", [1], KVKey("0" * 64))
    catalogue.replace("notes", [NewDocument("a", "", "", [module])])
    yield opened
    opened.close()


def test_each_embedder_has_one(database: Database) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    first, other = DeterministicFakeEmbedding(size=4), Other(size=4)
    retrievers = Retrievers(catalogue, database, first)
    assert retrievers.of() is retrievers.of(first)
    assert retrievers.of(other) is retrievers.of(other) is not retrievers.of()
    assert retrievers.of(other).embedder is other
    assert Retrievers(catalogue, database, None).of().embedder is None


def test_embedders_of_one_name_share_the_index(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make a LangChain object with an embedder of its own for each request."""
    retrievers = Retrievers(Catalogue(database, "tokenizer", None), database, None)
    built: list[CollectionIndex] = []
    first = CollectionIndex.__init__
    monkeypatch.setattr(
        CollectionIndex, "__init__", lambda self, *a: (built.append(self), first(self, *a))[1]
    )
    for _ in range(3):
        embedder = Other(size=4)
        retriever = retrievers.of(embedder)
        assert retriever.embedder is embedder
        [hit] = retriever.retrieve("boat", "notes", Criteria(1, "meaning")).hits
        assert hit.score == pytest.approx(1.0)
    assert len(built) == 1


def test_vectors_of_a_namespace_are_found_again(database: Database) -> None:
    class Counted(Other):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            embedded.extend(texts)
            return super().embed_documents(texts)

    embedded: list[str] = []
    catalogue = Catalogue(database, "tokenizer", None, "tenant")
    module = NewModule("b#1", "ship", [1], KVKey("1" * 64))
    catalogue.replace("notes", [NewDocument("b", "", "", [module])])
    for _ in range(2):
        retriever = Retrievers(catalogue, database, None).of(Counted(size=4))
        [hit] = retriever.retrieve("ship", "notes", Criteria(5, "meaning")).hits
        assert hit.module.document == "b"
    assert embedded == ["ship"]
