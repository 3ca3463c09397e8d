"""LangChain's record manager over the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.indexing import RecordManager

from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.db import Records


class RagCacheRecordManager(RecordManager):
    """What `langchain_core.indexing.index` has written and when, in the ledger of a `RagCache`, so
    that it skips what is there and cleans up, in every mode.

    namespace: the name of the indexing; one of each collection is the habit. rag, or state: as of
    `shared_rag`. All methods raise `StoreError`s.
    """

    def __init__(
        self, namespace: str, *, rag: RagCache | None = None, state: str | Path | None = None
    ) -> None:
        super().__init__(namespace)
        self._rag, self._state = rag, state

    @property
    def _records(self) -> Records:
        return shared_rag(self._rag, self._state).records(self.namespace)

    def create_schema(self) -> None:
        """Nothing to do: the ledger has its tables since it was opened."""

    async def acreate_schema(self) -> None:
        """Nothing to do."""

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

    async def aupdate(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        await asyncio.to_thread(self.update, keys, group_ids=group_ids, time_at_least=time_at_least)

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

    async def alist_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        return await asyncio.to_thread(
            self.list_keys, before=before, after=after, group_ids=group_ids, limit=limit
        )

    def delete_keys(self, keys: Sequence[str]) -> None:
        self._records.delete(keys)

    async def adelete_keys(self, keys: Sequence[str]) -> None:
        await asyncio.to_thread(self.delete_keys, keys)
