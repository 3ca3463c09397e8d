"""Embeddings and ranks of the models that the service has loaded."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.http.routes.vectors import _short_name
from tests.api.http.conftest import client_of
from tests.tiny_encoders import write_embedder

TEXTS = ["the boat", "the red boat", "a key"]


class Longest:
    """Takes the longest text for the best."""

    model_name = "models/longest"

    def score_texts(self, query: str, texts: Sequence[str]) -> list[float]:
        return [min(1.0, len(each) / 100) for each in texts]


@pytest.fixture(scope="module")
def rag(tiny_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    folder = tmp_path_factory.mktemp("vectors")
    embedder = write_embedder(folder / "tiny-embedder")
    with RagCache.open(
        folder / "state", tiny_reader, embedding=str(embedder), reranker=Longest()
    ) as opened:
        yield opened


def test_embeddings_are_those_of_the_embedder(client: TestClient, rag: RagCache) -> None:
    told = client.post("/v1/embeddings", json={"input": TEXTS, "model": "tiny-embedder"}).json()
    assert (told["object"], told["model"]) == ("list", "tiny-embedder")
    assert [each["index"] for each in told["data"]] == [0, 1, 2]
    embedder = rag.internals.shared.embedder
    assert embedder is not None
    expected = embedder.embed_documents(TEXTS)
    vectors = [each["embedding"] for each in told["data"]]
    np.testing.assert_allclose(vectors, expected, rtol=1e-5)
    assert told["usage"]["total_tokens"] > 0
    asked = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": len(vectors[0])}
    [packed] = client.post("/v1/embeddings", json=asked).json()["data"]
    bytes_ = base64.b64decode(packed["embedding"])
    np.testing.assert_allclose(np.frombuffer(bytes_, "<f4"), vectors[0], rtol=1e-5)
    query = client.post("/v1/embeddings", json={"input": "a key", "input_type": "query"}).json()
    np.testing.assert_allclose(
        query["data"][0]["embedding"], embedder.embed_query("a key"), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": [[1, 2]]}, 400, "a text or a list of texts"),
        ({"input": [1, 2]}, 400, "a text or a list of texts"),
        ({"input": ""}, 400, "none of them empty"),
        ({"input": "x", "dimensions": 7}, 400, "leave dimensions out"),
        ({"input": "x", "model": "other"}, 404, "'tiny-embedder' is"),
    ],
)
def test_embeddings_that_cannot_be(
    client: TestClient, body: dict[str, object], status: int, said: str
) -> None:
    refused = client.post("/v1/embeddings", json=body)
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]


def test_texts_are_ordered_by_the_reranker(client: TestClient) -> None:
    asked = {"query": "boats", "documents": [*TEXTS[:2], {"text": TEXTS[2]}], "model": "longest"}
    told = client.post("/v1/rerank", json=asked).json()
    assert [each["index"] for each in told["results"]] == [1, 0, 2]
    assert told["results"][0]["document"] == {"text": TEXTS[1]}
    assert told["results"][0]["relevance_score"] == pytest.approx(len(TEXTS[1]) / 100)
    short = client.post("/v1/rerank", json=asked | {"top_n": 1, "return_documents": False}).json()
    assert short["results"] == [{"index": 1, "relevance_score": pytest.approx(0.12)}]


def test_models_that_are_not_loaded_are_not_found(
    tiny_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("none")
    with RagCache.open(folder, tiny_reader, embedding="none") as rag, client_of(rag) as client:
        for path, body, setting in (
            ("/v1/embeddings", {"input": "x"}, "embedding"),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}, "reranker"),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 404
            assert f"start it with the setting {setting}" in refused.json()["error"]["message"]


def test_names_of_models_name_no_folder() -> None:
    assert _short_name("ragcache.retrieval.embeddings.MiniLM") == "minilm"
    assert (
        _short_name("ragcache.retrieval.embeddings.SentenceEmbedder:/srv/bge-small") == "bge-small"
    )
