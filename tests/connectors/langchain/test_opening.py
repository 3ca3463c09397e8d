"""One `RagCache` for each folder and process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import close_shared, shared_rag


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


def test_an_open_one_is_used_as_it_is(rag: RagCache, tmp_path: Path) -> None:
    assert shared_rag(rag, None) is rag
    assert shared_rag(rag, None, model=None) is rag
    with pytest.raises(ConfigurationError, match="or else state, k_bytes; not both"):
        shared_rag(rag, tmp_path, k_bytes=1)


def test_a_folder_is_opened_once(tmp_path: Path, reader: LoadedModel) -> None:
    folder = tmp_path / "state"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: shared_rag(None, folder, model=reader), range(8)))
    assert len(set(map(id, found))) == 1
    assert shared_rag(None, str(folder)) is found[0], "options may be left out"
    assert shared_rag(None, tmp_path / "x" / ".." / "state") is found[0]
    assert shared_rag(None, tmp_path / "other", model=reader) is not found[0]


def test_options_that_differ_are_named(tmp_path: Path, reader: LoadedModel) -> None:
    shared_rag(None, tmp_path, model=reader, module_tokens=64)
    with pytest.raises(ConfigurationError, match="with module_tokens=64; module_tokens=96 needs"):
        shared_rag(None, tmp_path, module_tokens=96)
    with pytest.raises(ConfigurationError, match="with queue=None; queue=5 needs"):
        shared_rag(None, tmp_path, queue=5)


def test_after_closing_it_is_opened_anew(tmp_path: Path, reader: LoadedModel) -> None:
    first = shared_rag(None, tmp_path, model=reader)
    first.values("kept").put({"a": b"1"})
    close_shared()
    second = shared_rag(None, tmp_path, model=reader)
    assert second is not first
    assert second.values("kept").get(["a"]) == [b"1"]


def test_without_a_folder_there_is_one_of_the_process(reader: LoadedModel) -> None:
    first = shared_rag(None, None, model=reader)
    assert shared_rag(None, None) is first
    assert first.stats().collections == {}
