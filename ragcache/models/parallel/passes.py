"""A rank's part of a forward pass: its heads of the states, its weights, its columns of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    ContiguousWrite,
    KVWrite,
    PagedQueries,
    PagedWrite,
    SharedKV,
)
from ragcache.models.model import CausalLM, ForwardBatch
from ragcache.models.parallel.collectives import Collectives

_Kept = TypeVar("_Kept", SharedKV, PagedQueries, PagedWrite, ContiguousWrite)


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """The part of a model that one rank computes."""

    causal: CausalLM
    """The rank's part of the model."""
    key_heads: slice
    """The rank's key heads, among all."""
    logits_width: int
    """Columns of the logits of all ranks together."""
    collectives: Collectives

    def __post_init__(self) -> None:
        # the sums behind the last attention, where ranks meet, say that all have written states
        self.causal.whole_layers = True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a pass, as all ranks do at once.

        Args:
            batch: States and writes have the heads of all ranks.

        Returns:
            Logits [R, `logits_width`] on the leader. All states of the batch have been written.
        """
        metadata = batch.metadata
        assert isinstance(metadata, AttentionMetadata)
        self.collectives.begin_pass()
        logits = self.causal.forward(replace(batch, metadata=self._own_heads(metadata)))
        return self.collectives.gather_columns(logits, self.logits_width)

    def _own_heads(self, metadata: AttentionMetadata) -> AttentionMetadata:
        paged = metadata.paged_queries
        return replace(
            metadata,
            shared_kv=tuple(map(self._part, metadata.shared_kv)),
            paged_queries=None if paged is None else self._part(paged),
            writes=tuple(map(self._write, metadata.writes)),
        )

    def _write(self, write: KVWrite) -> KVWrite:
        if isinstance(write, PagedWrite):
            return self._part(write)
        assert isinstance(write, ContiguousWrite)
        return self._part(write)

    def _part(self, kept: _Kept) -> _Kept:
        """States [L, Hkv, S, D], cut to the rank's heads."""
        here = self.key_heads
        return replace(kept, keys=kept.keys[:, here], values=kept.values[:, here])
