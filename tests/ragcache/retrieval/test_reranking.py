"""Rerankers: the order of hits, their scores and times, a cross-encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, ModelNotFound
from ragcache.models import LoadedModel
from ragcache.retrieval import CrossEncoderReranker, Reranker
from tests.tiny_encoders import write_cross_encoder

QUERY = "spare key of the boat"
TEXTS = {
    "keys": "The spare key of the boat hangs in the red cupboard.",
    "boats": "The survey boat is moored at the quay; its key is with Tom.",
    "leave": "Everybody has 26 days of leave.",
}


class Shortest:
    """Prefers short texts."""

    def __init__(self) -> None:
        self.read: list[Sequence[str]] = []

    def score_texts(self, query: str, texts: Sequence[str]) -> list[float]:
        self.read.append(list(texts))
        return [1 / len(text) for text in texts]


def sources() -> list[SourceDocument]:
    return [SourceDocument(name, text) for name, text in TEXTS.items()]


@pytest.fixture
def shortest() -> Shortest:
    return Shortest()


@pytest.fixture
def rag(tmp_path: Path, tiny_reader: LoadedModel, shortest: Shortest) -> Iterator[RagCache]:
    with RagCache.open(
        tmp_path / "state", tiny_reader, embedding="none", reranker=shortest, max_tokens=1
    ) as opened:
        opened.ingest("notes", [*sources(), SourceDocument("key", "The key of the boat.")])
        yield opened


def test_a_reranker_orders_what_was_found(rag: RagCache, shortest: Shortest) -> None:
    hits = rag.retrieve(QUERY, collection="notes", relative_threshold=0.0).hits
    assert [hit.module.document for hit in hits] == ["key", "keys", "boats"]
    assert [hit.rerank for hit in hits] == [1 / len(hit.module.text) for hit in hits]
    assert all(hit.bm25 for hit in hits)
    assert len(shortest.read[0]) == 3
    near = rag.retrieve(QUERY, collection="notes", relative_threshold=0.9).hits
    assert [hit.module.document for hit in near] == ["key"]


def test_as_many_candidates_are_read_as_are_wanted(rag: RagCache, shortest: Shortest) -> None:
    options = {"collection": "notes", "relative_threshold": 0.0}
    [hit] = rag.retrieve(QUERY, k=1, rerank=2, **options).hits
    assert (hit.module.document, len(shortest.read.pop())) == ("key", 2)
    assert len(rag.retrieve(QUERY, k=3, rerank=1, **options).hits) == 3, "k counts too"
    shortest.read.clear()
    plain = rag.retrieve(QUERY, rerank=0, **options)
    assert [hit.rerank for hit in plain.hits] == [None] * 3
    assert plain.hits[0].module.document == "keys"
    assert (plain.rerank_seconds, shortest.read) == (0.0, [])


def test_an_answer_has_the_scores_and_the_time_of_the_reranker(rag: RagCache) -> None:
    answer = rag.ask(QUERY, collection="notes", relative_threshold=0.0)
    assert [source.document for source in answer.sources] == ["key", "keys", "boats"]
    hit = rag.retrieve(QUERY, collection="notes").hits[0]
    assert answer.sources[0].rerank == hit.rerank
    assert hit.rerank is not None
    assert 0 < answer.timings.rerank < answer.timings.retrieve
    plain = rag.ask(QUERY, collection="notes", rerank=0)
    assert (plain.sources[0].rerank, plain.timings.rerank) == (None, 0.0)


@pytest.mark.slow
def test_a_cross_encoder_scores_from_0_to_1(tmp_path: Path, tiny_reader: LoadedModel) -> None:
    folder = str(write_cross_encoder(tmp_path / "cross"))
    reranker = CrossEncoderReranker(folder)
    assert isinstance(reranker, Reranker)
    scores = reranker.score_texts(QUERY, list(TEXTS.values()))
    assert len(scores) == len(set(scores)) == 3
    assert all(0 < score < 1 for score in scores)
    with RagCache.open(tmp_path / "state", tiny_reader, reranker=folder) as rag:
        rag.ingest("notes", sources())
        hits = rag.retrieve(QUERY, collection="notes", relative_threshold=0.0).hits
    told = dict(zip(TEXTS, scores, strict=True))
    assert {hit.module.document: hit.rerank for hit in hits} == pytest.approx(
        {hit.module.document: told[hit.module.document] for hit in hits}, abs=1e-4
    )
    assert [hit.rerank for hit in hits] == sorted((hit.rerank for hit in hits), reverse=True)


def test_what_is_no_reranker_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="cannot load the reranker 'nobody/nothing'"):
        RagCache.open(tmp_path, reranker="nobody/nothing")
    with pytest.raises(ConfigurationError, match="unknown reranker 'best'; give a folder or a hub"):
        RagCache.open(tmp_path, reranker="best")
