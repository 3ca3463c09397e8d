"""Folders that LangChain objects share, and what the package loads on first use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from langchain_core import exceptions

from ragcache import RagCache, SourceDocument, errors
from ragcache.errors import ConfigurationError, ModelNotFound, StoreError
from ragcache.models import LoadedModel
from ragcache_connectors import langchain
from ragcache_connectors.langchain import ChatRagCache, close_shared, shared_rag
from ragcache_connectors.langchain.call_options import ModelInfo
from ragcache_connectors.langchain.shared import declare_options, langchain_errors
from tests.connectors.langchain.scripted_model import scripted_model


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


def test_an_open_rag_is_returned_as_it_is(rag: RagCache, tmp_path: Path) -> None:
    assert shared_rag(rag, None) is rag
    assert shared_rag(rag, None, model=None) is rag
    with pytest.raises(ConfigurationError, match="or else state, k_bytes; not both"):
        shared_rag(rag, tmp_path, k_bytes=1)


def test_a_folder_is_opened_once(tmp_path: Path, quick_reader: LoadedModel) -> None:
    folder = tmp_path / "state"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: shared_rag(None, folder, model=quick_reader), range(8)))
    assert len(set(map(id, found))) == 1
    assert shared_rag(None, str(folder)) is found[0], "options may be left out"
    assert shared_rag(None, tmp_path / "x" / ".." / "state") is found[0]
    assert shared_rag(None, tmp_path / "other", model=quick_reader) is not found[0]


def test_options_that_differ_are_named(tmp_path: Path, quick_reader: LoadedModel) -> None:
    shared_rag(None, tmp_path, model=quick_reader, module_tokens=64)
    with pytest.raises(ConfigurationError, match=r"module_tokens=64 in .*; module_tokens=96 needs"):
        shared_rag(None, tmp_path, module_tokens=96)
    with pytest.raises(ConfigurationError, match=r"queue=None in .*; queue=5 needs"):
        shared_rag(None, tmp_path, queue=5)


def test_declared_options_hold_for_the_first_user(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    declare_options(tmp_path, model=quick_reader, module_tokens=None)
    declare_options(tmp_path, model=quick_reader, module_tokens=64)
    assert not (tmp_path / "ledger.sqlite").exists(), "nothing is opened"
    rag = shared_rag(None, tmp_path)
    rag.ingest("notes", SourceDocument("a", "A boat. " * 100))
    assert max(row.tokens for row in rag.modules.all()) <= 64


def test_until_a_folder_is_open_the_later_declaration_holds(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    declare_options(tmp_path, model="mistyped")
    declare_options(tmp_path, model=quick_reader)
    assert ModelInfo(shared_rag(None, tmp_path)).name == quick_reader.name
    with pytest.raises(ConfigurationError, match="is opened with model="):
        declare_options(tmp_path, model="mistyped")


def test_options_that_opened_nothing_are_forgotten(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    for state in (tmp_path, None):
        with pytest.raises(ModelNotFound):
            shared_rag(None, state, model=tmp_path / "mistyped")
        assert ModelInfo(shared_rag(None, state, model=quick_reader)).name == quick_reader.name


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Opening a folder named `slow` waits: set when it has begun, and to be set."""
    begun, go, opening = Event(), Event(), RagCache.open

    def opened(folder: Path, **options: Any) -> RagCache:
        if folder.name == "slow":
            begun.set()
            go.wait(60)
        return opening(folder, **options)

    monkeypatch.setattr(RagCache, "open", opened)
    yield begun, go
    go.set()


async def test_opening_one_folder_does_not_block_another(
    tmp_path: Path, quick_reader: LoadedModel, slowly: tuple[Event, Event]
) -> None:
    begun, go = slowly
    ready = shared_rag(None, tmp_path / "ready", model=quick_reader)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(shared_rag, None, tmp_path / "slow", model=quick_reader)
        assert begun.wait(60)
        made = pool.submit(ChatRagCache, state=tmp_path / "slow")
        assert made.result(timeout=60).model_name == "ragcache-reader"
        assert await ChatRagCache(state=tmp_path / "ready").aopen_rag() is ready
        waits = asyncio.create_task(made.result().aopen_rag())
        await asyncio.sleep(0)
        assert not slow.done(), "the event loop goes on while the folder is opened"
        go.set()
        assert await waits is await asyncio.wrap_future(slow)


def test_the_process_has_a_folder_for_each_model(quick_reader: LoadedModel) -> None:
    one, other = (
        ChatRagCache(model=each, max_tokens=1) for each in (quick_reader, scripted_model())
    )
    assert other.invoke("x").response_metadata["model_name"] == "scripted"
    assert one.invoke("x").response_metadata["model_name"] == quick_reader.name
    assert shared_rag(None, None) is shared_rag(None, None, model=scripted_model()), (
        "the first opened"
    )
    assert one.invoke("x").response_metadata["model_name"] == quick_reader.name


def test_a_folder_that_cannot_be_opened_may_be_tried_again(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file")
    with pytest.raises(StoreError):
        shared_rag(None, blocked, model=quick_reader)
    blocked.unlink()
    assert shared_rag(None, blocked, model=quick_reader).stats().collections == {}


def test_a_closed_folder_is_opened_anew(tmp_path: Path, quick_reader: LoadedModel) -> None:
    first = shared_rag(None, tmp_path, model=quick_reader)
    first.ingest("notes", [SourceDocument("a", "The kiln is in the yard.")])
    close_shared()
    second = shared_rag(None, tmp_path, model=quick_reader)
    assert second is not first
    assert second.stats().collections == {"notes": 1}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.PromptTooLong, "ContextOverflowError"),
        (errors.DeadlineExceeded, "ModelTimeoutError"),
        (errors.QueueFull, "ModelRateLimitError"),
        (errors.EngineFailed, "ModelAPIError"),
        (errors.ModelNotFound, "ModelNotFoundError"),
        (errors.UnsupportedModel, "ModelInvalidRequestError"),
        (errors.UnknownCollection, "ModelInvalidRequestError"),
        (errors.InvalidRequest, "ModelInvalidRequestError"),
    ],
)
def test_an_error_is_of_both_types(ours: type[Exception], theirs: str) -> None:
    with pytest.raises(ours, match="what it was") as caught, langchain_errors():
        raise ours("what it was")
    assert isinstance(caught.value, getattr(exceptions, theirs, exceptions.LangChainException))
    assert type(caught.value).__name__ == ours.__name__
    assert type(caught.value.__cause__) is ours


@pytest.mark.parametrize("kind", [errors.EngineClosed, errors.StoreFull, errors.MissingExtra])
def test_an_error_unknown_to_langchain_passes(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, langchain_errors():
        raise kind("x")
    assert type(caught.value) is kind


def test_nested_blocks_combine_an_error_once() -> None:
    with pytest.raises(errors.InvalidRequest) as caught, langchain_errors(), langchain_errors():
        raise errors.InvalidRequest("x")
    assert type(caught.value.__cause__) is errors.InvalidRequest


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), langchain_errors():
        raise ZeroDivisionError


HEAVY = ("torch", "transformers", "llguidance", "faiss", "sqlalchemy", "sentence_transformers")


def test_every_name_is_exported_and_listed() -> None:
    assert langchain.__all__ == sorted(langchain.__all__)
    for name in langchain.__all__:
        assert getattr(langchain, name).__name__ == name
        assert name in dir(langchain)
    with pytest.raises(AttributeError, match="has no attribute 'RagCash'"):
        _ = langchain.RagCash


@pytest.mark.slow
def test_imports_and_constructors_load_no_model() -> None:
    program = f"""
import sys
from ragcache_connectors.langchain import *
ChatRagCache(state="nowhere", temperature=0.5)
RagCacheRetriever(collection="notes", state="nowhere")
RagCacheVectorStore(collection="notes", state="nowhere").as_retriever()
RagCacheEmbeddings(), RagCacheRecordManager("notes")
RagCacheLoader([], collection="notes")
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
