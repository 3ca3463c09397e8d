"""The byte store: LangChain's own suites, and what they do not ask."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.stores import BaseStore, InvalidKeyException
from langchain_tests.integration_tests import BaseStoreAsyncTests, BaseStoreSyncTests

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache_connectors.langchain import RagCacheByteStore


class TestSync(BaseStoreSyncTests[bytes]):
    @pytest.fixture
    def kv_store(self, rag: RagCache) -> BaseStore[str, bytes]:
        return RagCacheByteStore(rag=rag)

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"foo", b"\0bar\xff", b""


class TestAsync(BaseStoreAsyncTests[bytes]):
    @pytest.fixture
    async def kv_store(self, rag: RagCache) -> BaseStore[str, bytes]:
        return RagCacheByteStore(rag=rag)

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"foo", b"\0bar\xff", b""


def test_stores_of_other_names_hold_other_keys(rag: RagCache) -> None:
    one, other = RagCacheByteStore("one", rag=rag), RagCacheByteStore("other", rag=rag)
    one.mset([("a", b"1")])
    assert (other.mget(["a"]), list(other.yield_keys())) == ([None], [])


@pytest.mark.parametrize("key", ["../a", "a\0b", "日本", ""])
def test_a_key_may_hold_any_characters(rag: RagCache, key: str) -> None:
    store = RagCacheByteStore(rag=rag)
    store.mset([(key, b"1"), (f"{key}/more", b"2")])
    assert list(store.yield_keys(prefix=key)) == [key, f"{key}/more"]
    store.mdelete([key])
    assert store.mget([key, f"{key}/more"]) == [None, b"2"]


def test_what_a_byte_store_does_not_keep_is_named(rag: RagCache) -> None:
    store = RagCacheByteStore(rag=rag)
    wrong: Any = [("a", b"1"), ("b", "text")]
    with pytest.raises(ConfigurationError, match="the value of 'b' is a str"):
        store.mset(wrong)
    numbers: Any = [1]
    for call in (store.mget, store.mdelete):
        with pytest.raises(InvalidKeyException, match="a key is a text, not 1"):
            call(numbers)
    assert list(store.yield_keys()) == []


async def test_many_keys_are_yielded_in_portions(rag: RagCache) -> None:
    store = RagCacheByteStore(rag=rag)
    keys = [f"k{number:04}" for number in range(600)]
    await store.amset([(key, b"") for key in keys])
    assert [key async for key in store.ayield_keys()] == keys
    assert [key async for key in store.ayield_keys(prefix="k059")] == keys[590:]
