"""The retriever: words, meaning, and what other processes change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from ragcache.errors import UnknownCollection
from ragcache.retrieval import Retriever
from ragcache.states import KVKey
from ragcache.store import Catalogue, Database, NewDocument, NewModule, Vectors

TOPICS = ("boat", "ship", "vessel"), ("key", "lock"), ("leave", "holiday")
TEXTS = {
    "boats.md": "The survey boat is moored at the quay.",
    "keys.md": "The spare key hangs in the cupboard.",
    "leave.md": "Everybody has 26 days of leave.",
}


class Topics(Embeddings):
    """One dimension a topic: synonyms meet, and every call is counted."""

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [1e-3 + sum(text.lower().count(word) for word in words) for words in TOPICS]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def document(name: str, text: str, vector: np.ndarray | None = None) -> NewDocument:
    key = KVKey(f"{abs(hash(name)):064x}"[:64])
    return NewDocument(name, "", text, [NewModule(f"{name}#1", text, [1, 2], key, vector)])


def fill(catalogue: Catalogue, embedder: Embeddings | None = None) -> None:
    documents = [
        document(
            name,
            text,
            None if embedder is None else np.array(embedder.embed_query(text), dtype=np.float32),
        )
        for name, text in TEXTS.items()
    ]
    catalogue.replace("notes", documents)


def found(retriever: Retriever, query: str, k: int = 3) -> list[str]:
    return [hit.module.document for hit in retriever.retrieve(query, "notes", k).hits]


def test_words_alone_find_modules_best_first(database: Database) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    fill(catalogue)
    retriever = Retriever(catalogue)
    selection = retriever.retrieve("Does the spare key of the boat hang?", "notes", 3)
    assert selection.query == "Does the spare key of the boat hang?"
    assert [hit.module.document for hit in selection.hits] == ["keys.md", "boats.md"]
    assert selection.hits[0].module.text == TEXTS["keys.md"]
    assert selection.hits[0].score > selection.hits[1].score
    assert found(retriever, "spare key boat", k=1) == ["keys.md"]
    assert found(retriever, "Which vessel?") == [], "no word is shared, and there is no embedder"
    assert retriever.embed(["anything"]) is None


def test_meaning_finds_what_shares_no_word(database: Database) -> None:
    embedder = Topics()
    catalogue = Catalogue(database, "tokenizer", "topics")
    fill(catalogue, embedder)
    retriever = Retriever(catalogue, embedder, Vectors(database, "topics"))
    assert found(retriever, "Which vessel?", k=1) == ["boats.md"]
    assert found(retriever, "Which holiday?", k=1) == ["leave.md"]
    assert embedder.embedded == [], "stored vectors are used as they are"


def test_words_and_meaning_are_fused(database: Database) -> None:
    """keys.md is second by meaning and first by words; boats.md first by meaning only."""
    embedder = Topics()
    catalogue = Catalogue(database, "tokenizer", "topics")
    fill(catalogue, embedder)
    retriever = Retriever(catalogue, embedder, Vectors(database, "topics"))
    assert found(retriever, "vessel ship lock cupboard")[:2] == ["keys.md", "boats.md"]


def test_vectors_of_an_earlier_embedder_are_made_anew_once(database: Database) -> None:
    fill(Catalogue(database, "tokenizer", None))
    embedder = Topics()
    catalogue = Catalogue(database, "tokenizer", "topics")
    retriever = Retriever(catalogue, embedder, Vectors(database, "topics"))
    assert found(retriever, "Which vessel?", k=1) == ["boats.md"]
    assert sorted(embedder.embedded) == sorted(TEXTS.values())
    again = Topics()
    assert found(Retriever(catalogue, again, Vectors(database, "topics")), "holiday?", 1) == [
        "leave.md"
    ]
    assert again.embedded == []


def test_only_the_vectors_that_are_missing_are_made(database: Database) -> None:
    embedder = Topics()
    catalogue = Catalogue(database, "tokenizer", "topics")
    fill(catalogue, embedder)
    catalogue.replace("notes", [document("rooms.md", "A locked room.")])
    retriever = Retriever(catalogue, embedder, Vectors(database, "topics"))
    assert set(found(retriever, "lock", k=2)) == {"rooms.md", "keys.md"}
    assert embedder.embedded == ["A locked room."]


def test_many_texts_are_embedded_in_order(database: Database) -> None:
    retriever = Retriever(Catalogue(database, "tokenizer", "topics"), Topics())
    texts = [f"boat {'key ' * number}" for number in range(150)]
    vectors = retriever.embed(texts)
    assert vectors is not None
    assert vectors.dtype == np.float32
    assert vectors[:, 1].round().tolist() == list(range(150))


def test_changes_are_seen_whoever_makes_them(database: Database, tmp_path: Path) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    fill(catalogue)
    retriever = Retriever(catalogue)
    assert found(retriever, "cupboard") == ["keys.md"]
    elsewhere = Database.open(tmp_path / "ledger.sqlite")
    other = Catalogue(elsewhere, "tokenizer", None)
    other.replace("notes", [document("keys.md", "The spare key hangs in the blue tin.")])
    assert found(retriever, "cupboard") == []
    assert found(retriever, "tin") == ["keys.md"]
    other.delete("notes", ["keys.md"])
    assert found(retriever, "tin") == []
    other.delete("notes", list(TEXTS))
    assert found(retriever, "boat") == [], "an empty collection finds nothing"
    elsewhere.close()


def test_collections_do_not_see_each_other(database: Database) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    fill(catalogue)
    catalogue.replace("other", [document("boats.md", "Another boat.")])
    retriever = Retriever(catalogue)
    hits = retriever.retrieve("boat", "other", 5).hits
    assert [hit.module.text for hit in hits] == ["Another boat."]


def test_an_unknown_collection_is_named_with_those_that_exist(database: Database) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    retriever = Retriever(catalogue)
    with pytest.raises(UnknownCollection, match=r"no collection 'notes'; known: none yet\. Make"):
        retriever.retrieve("boat", "notes", 3)
    fill(catalogue)
    with pytest.raises(UnknownCollection, match=r"'recipes'; known: 'notes'\."):
        retriever.retrieve("boat", "recipes", 3)
