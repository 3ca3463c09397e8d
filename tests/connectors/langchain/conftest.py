"""Open `RagCache`s for LangChain's classes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import RagCacheVectorStore
from tests.connectors.langchain.scripted_model import scripted_model

DOCUMENT = (
    "The survey boat Pipit is moored at the north quay. Its engine was serviced by Marta Quill in "
    "March, and the spare key hangs in the red cupboard of the boathouse."
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark two of three tests in LangChain's own suites as slow."""
    suites = [
        item for item in items
        if isinstance(item, pytest.Function) and item.cls
        and inspect.getmodule(item.function).__name__.startswith("langchain_tests.integration")
    ]  # fmt: skip
    for number, item in enumerate(suites):
        if number % 3:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def rag(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    """Without an embedder, with modules of 64 tokens at most."""
    with RagCache.open(tmp_path / "state", tiny_reader, max_tokens=4, module_tokens=64) as opened:
        yield opened


@contextmanager
def open_with_notes(folder: Path, model: LoadedModel) -> Iterator[RagCache]:
    """A state folder with one ingested document."""
    with RagCache.open(folder, model=model) as rag:
        rag.ingest("notes", [SourceDocument(id="boats", text=DOCUMENT)])
        yield rag


@pytest.fixture(scope="session")
def boats(
    tmp_path_factory: pytest.TempPathFactory, quick_reader: LoadedModel
) -> Iterator[RagCache]:
    """`open_with_notes`, for tests that leave it as it is."""
    with open_with_notes(tmp_path_factory.mktemp("boats"), quick_reader) as rag:
        yield rag


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    """The scripted model, which says `SAID` whatever it is asked without tools."""
    with RagCache.open(tmp_path_factory.mktemp("scripted"), model=scripted_model()) as rag:
        yield rag


@pytest.fixture
def store(rag: RagCache) -> RagCacheVectorStore:
    """A vector store over the collection `notes`, which embeds."""
    return RagCacheVectorStore(DeterministicFakeEmbedding(size=6), collection="notes", rag=rag)


def wait_until_idle(rag: RagCache) -> None:
    """Waits for the engine to drop an abandoned request: at most a step or two, not 4,000."""
    for _ in range(100):
        if not rag.internals.shared.engine.core.busy:
            return
        time.sleep(0.01)
    raise AssertionError("the request goes on")
