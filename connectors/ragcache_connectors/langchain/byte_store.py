"""LangChain's byte store over the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.stores import BaseStore, InvalidKeyException

from ragcache.errors import ConfigurationError
from ragcache_connectors.langchain.opening import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.store import Values

_PORTION = 256  # keys that one turn of a thread reads


class RagCacheByteStore(BaseStore[str, bytes]):
    """Bytes under keys of any characters, in the ledger of a `RagCache`: `mset` writes all or
    nothing, for every process that has the ledger open. They count in no tier's budget.

    name: of the store; stores of other names hold other keys. rag, or state: as of `shared_rag`.
    Raises `InvalidKeyException` for a key that is no text, `ConfigurationError` for a value that is
    not bytes, and `StoreError`s.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        rag: RagCache | None = None,
        state: str | Path | None = None,
    ) -> None:
        self.name = name
        self._rag, self._state = rag, state

    @property
    def _values(self) -> Values:
        return shared_rag(self._rag, self._state).values(self.name)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._values.get(_checked(keys))

    async def amget(self, keys: Sequence[str]) -> list[bytes | None]:
        return await asyncio.to_thread(self.mget, keys)

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        values: dict[str, object] = dict(key_value_pairs)
        _checked(list(values))
        for key, value in values.items():
            if not isinstance(value, bytes | bytearray | memoryview):
                kind = type(value).__name__
                raise ConfigurationError(
                    f"the value of {key!r} is a {kind}; a byte store keeps bytes"
                )
        self._values.put({key: bytes(value) for key, value in key_value_pairs})

    async def amset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        await asyncio.to_thread(self.mset, key_value_pairs)

    def mdelete(self, keys: Sequence[str]) -> None:
        self._values.delete(_checked(keys))

    async def amdelete(self, keys: Sequence[str]) -> None:
        await asyncio.to_thread(self.mdelete, keys)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        yield from self._values.keys(prefix or "")

    async def ayield_keys(self, *, prefix: str | None = None) -> AsyncIterator[str]:
        keys = self.yield_keys(prefix=prefix)
        while portion := await asyncio.to_thread(_next, keys):
            for key in portion:
                yield key


def _next(keys: Iterator[str]) -> list[str]:
    return list(islice(keys, _PORTION))


def _checked(keys: Sequence[str]) -> Sequence[str]:
    for key in keys:
        if not isinstance(key, str):
            raise InvalidKeyException(f"a key is a text, not {key!r}")
    return keys
