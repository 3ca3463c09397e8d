"""The record manager: LangChain's contract of it, and its `index` in every clean-up mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pytest
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.indexing import aindex, index

from ragcache import RagCache
from ragcache.db import Records
from ragcache.errors import ConfigurationError, LedgerUnavailable
from ragcache_connectors.langchain import RagCacheRecordManager, RagCacheVectorStore

CleanUp = Literal["incremental", "full", "scoped_full"] | None


class Clock:
    """Each look at it is a second later: no two runs of an indexing are at one time."""

    def __init__(self) -> None:
        self.at = 1e9

    def __call__(self, _: Records) -> float:
        self.at += 1
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Records, "now", lambda records: clock(records))
    return clock


@pytest.fixture
def manager(rag: RagCache, clock: Clock) -> RagCacheRecordManager:
    made = RagCacheRecordManager("notes", rag=rag)
    made.create_schema()
    return made


def test_keys_are_updated_listed_and_deleted(manager: RagCacheRecordManager) -> None:
    manager.update(["a", "b"], group_ids=["g", None])
    between = manager.get_time()
    manager.update(["c"], group_ids=["g"], time_at_least=between)
    assert manager.exists(["c", "x", "a"]) == [True, False, True]
    assert manager.list_keys() == ["a", "b", "c"]
    assert manager.list_keys(before=between) == ["a", "b"]
    assert manager.list_keys(after=between) == ["c"]
    assert manager.list_keys(group_ids=["g"], limit=1) == ["a"]
    manager.delete_keys(["a", "x"])
    assert manager.list_keys() == ["b", "c"]


async def test_the_same_for_asyncio(manager: RagCacheRecordManager) -> None:
    await manager.acreate_schema()
    await manager.aupdate(["a", "b"], group_ids=["g", None])
    between = await manager.aget_time()
    await manager.aupdate(["c"], time_at_least=between)
    assert await manager.aexists(["c", "x"]) == [True, False]
    assert await manager.alist_keys(before=between, group_ids=["g"], limit=5) == ["a"]
    assert await manager.alist_keys(after=between) == ["c"]
    await manager.adelete_keys(["a"])
    assert await manager.alist_keys() == ["b", "c"]


def test_namespaces_are_apart(manager: RagCacheRecordManager, rag: RagCache) -> None:
    manager.update(["a"])
    assert RagCacheRecordManager("plans", rag=rag).exists(["a"]) == [False]


def test_wrong_groups_and_a_clock_set_back_are_named(manager: RagCacheRecordManager) -> None:
    with pytest.raises(ConfigurationError, match="2 keys have 1 group_ids"):
        manager.update(["a", "b"], group_ids=["g"])
    assert issubclass(ConfigurationError, ValueError), "as LangChain's contract says"
    with pytest.raises(LedgerUnavailable, match="set back"):
        manager.update(["a"], time_at_least=2e9)


def page(text: str, source: str) -> Document:
    return Document(text, metadata={"source": source})


class Pages(BaseLoader):
    def __init__(self, pages: Iterable[Document]) -> None:
        self.pages = pages

    def lazy_load(self) -> Iterator[Document]:
        yield from self.pages


class Indexing:
    """Indexes with `index` or `aindex`; counts are added, updated, skipped, deleted."""

    def __init__(
        self, manager: RagCacheRecordManager, store: RagCacheVectorStore, *, waits: bool
    ) -> None:
        self.manager, self.store, self.waits = manager, store, waits

    async def __call__(
        self, documents: list[Document], cleanup: CleanUp, **more: Any
    ) -> tuple[int, ...]:
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256", **more}
        if self.waits:
            done = await aindex(Pages(documents), self.manager, self.store, **options)
        else:
            done = index(Pages(documents), self.manager, self.store, **options)
        return tuple(done[f"num_{name}"] for name in ("added", "updated", "skipped", "deleted"))

    def texts(self) -> set[str]:
        names = [row.source_id for row in self.store.rag.documents.get("notes")]
        assert self.manager.list_keys() == [] or set(self.manager.list_keys()) == set(names)
        return {document.page_content for document in self.store.get_by_ids(names)}


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["index", "aindex"])
def indexing(
    request: pytest.FixtureRequest, manager: RagCacheRecordManager, store: RagCacheVectorStore
) -> Indexing:
    return Indexing(manager, store, waits=request.param)


FIRST = [page("one", "a"), page("two", "a"), page("three", "b")]


Round = tuple[list[Document], tuple[int, int, int, int], set[str]]  # what is indexed, done, there
ALL = {"one", "two", "three"}


@pytest.mark.parametrize(
    ("cleanup", "rounds"),
    [
        (None, [(FIRST, (0, 0, 3, 0), ALL), ([page("x", "a")], (1, 0, 0, 0), {"x", *ALL})]),
        ("incremental", [
            ([page("one", "a"), page("new", "a")], (1, 0, 1, 1), {"one", "new", "three"}),
            ([], (0, 0, 0, 0), {"one", "new", "three"}),
        ]),
        ("full", [
            ([page("one", "a"), page("new", "c")], (1, 0, 1, 2), {"one", "new"}),
            ([], (0, 0, 0, 2), set()),
        ]),
        ("scoped_full", [
            ([page("two", "a"), page("new", "c")], (1, 0, 1, 1), {"two", "new", "three"}),
            ([], (0, 0, 0, 0), {"two", "new", "three"}),
        ]),
    ],
)  # fmt: skip
async def test_each_mode_deletes_what_it_should(
    indexing: Indexing, cleanup: CleanUp, rounds: list[Round]
) -> None:
    assert await indexing(FIRST, cleanup, batch_size=1) == (3, 0, 0, 0)
    for documents, counts, texts in rounds:
        assert await indexing(documents, cleanup) == counts
        assert indexing.texts() == texts


async def test_what_is_there_is_written_again_when_forced(indexing: Indexing) -> None:
    await indexing(FIRST, "full")
    assert await indexing(FIRST, "full", force_update=True) == (0, 3, 0, 0)
    assert indexing.texts() == {"one", "two", "three"}


async def test_copies_are_indexed_once_and_many_batches_are_cleaned_up(indexing: Indexing) -> None:
    copies = [page("one", "a"), page("one", "a")]
    assert await indexing(copies, "full") == (1, 0, 1, 0)
    many = [page(f"text {number}", "m") for number in range(5)]
    assert await indexing(many, "full", batch_size=2, cleanup_batch_size=1) == (5, 0, 0, 1)
    assert indexing.texts() == {document.page_content for document in many}
