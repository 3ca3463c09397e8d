"""LangChain's record manager over the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.indexing import RecordManager

from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.db import Records


class RagCacheRecordManager(RecordManager):
    """The record manager of `langchain_core.indexing.index`, in the ledger of a `RagCache`.

    It keeps the keys that were written and their times, so that indexing skips existing documents
    and cleans up in every mode.

    Args:
        namespace: The name of the indexing, usually the collection's name.
        rag: An open `RagCache`.
        state: The state folder to open instead of `rag`.

    Raises:
        StoreError: The ledger cannot be read or written. Raised by every method.
    """

    def __init__(
        self, namespace: str, *, rag: RagCache | None = None, state: str | Path | None = None
    ) -> None:
        super().__init__(namespace)
        self._rag, self._state = rag, state

    @property
    def _records(self) -> Records:
        from ragcache.db import Records

        rag = shared_rag(self._rag, self._state)
        return Records(rag.internals.shared.database, self.namespace, rag.namespace)

    def create_schema(self) -> None:
        """Do nothing: opening the ledger creates its tables."""

    async def acreate_schema(self) -> None:
        """Do nothing: opening the ledger creates its tables."""

    def get_time(self) -> float:
        return self._records.now()

    async def aget_time(self) -> float:
        return await asyncio.to_thread(self.get_time)

    def update(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        self._records.update(keys, group_ids, time_at_least)

    async def aupdate(self, keys: Sequence[str], **options: Any) -> None:
        await asyncio.to_thread(self.update, keys, **options)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._records.exists(keys)

    async def aexists(self, keys: Sequence[str]) -> list[bool]:
        return await asyncio.to_thread(self.exists, keys)

    def list_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        return self._records.keys(before=before, after=after, group_ids=group_ids, limit=limit)

    async def alist_keys(self, **options: Any) -> list[str]:
        return await asyncio.to_thread(self.list_keys, **options)

    def delete_keys(self, keys: Sequence[str]) -> None:
        self._records.delete(keys)

    async def adelete_keys(self, keys: Sequence[str]) -> None:
        await asyncio.to_thread(self.delete_keys, keys)
