"""How many bytes states take in each tier, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ragcache.models import LanguageModel
from ragcache.states import KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype
from ragcache.store import DeviceTier, DiskTier, HostTier, Tier


@dataclass(frozen=True, slots=True)
class TierSize:
    """A corpus in one tier. nbytes: as the tier would allocate them, at most. budget_bytes: None
    for no limit. share: of the corpus that fits, 0 to 1."""

    tier: str
    kv_dtype: str
    nbytes: int
    budget_bytes: int | None

    @property
    def share(self) -> float:
        if self.budget_bytes is None or self.nbytes <= self.budget_bytes:
            return 1.0
        return self.budget_bytes / self.nbytes


def shape_of(model: LanguageModel, tokens: int) -> KVStates:
    """States of so many tokens that take no memory."""
    size = (model.num_layers, model.num_kv_heads, tokens, model.head_dim)
    empty = torch.empty(size, dtype=model.dtype, device="meta")
    return KVStates(empty, empty, 0)


def bytes_per_token(model: LanguageModel) -> dict[str, int]:
    """What one more token of a module takes, by `kv_dtype`; scales included."""
    elements = model.num_layers * model.num_kv_heads * model.head_dim
    eight = 2 * elements + model.num_layers * model.num_kv_heads * torch.float32.itemsize
    return {kind: model.bytes_per_token if kind == "model" else eight for kind in KV_DTYPES}


def tier_sizes(
    model: LanguageModel, lengths: Sequence[int], budgets: dict[str, int | None]
) -> tuple[TierSize, ...]:
    """Modules of these lengths in every tier that has a budget, in every way of keeping them."""
    counted = Counter(lengths)
    sizes = []
    for tier in _tiers(model):
        if tier.name in budgets:
            nbytes = sum(n * tier.size_of(shape_of(model, tokens)) for tokens, n in counted.items())
            sizes.append(TierSize(tier.name, tier.kv_dtype, nbytes, budgets[tier.name]))
    return tuple(sizes)


def _tiers(model: LanguageModel) -> list[Tier]:
    """Empty ones, for their arithmetic: memory is pinned where the model runs on a GPU."""
    kinds = [check_kv_dtype(kind) for kind in KV_DTYPES]
    pinned = model.device.type == "cuda"
    return [
        DeviceTier(0, "cpu"),
        *(HostTier(0, kv_dtype=kind, pinned=pinned) for kind in kinds),
        *(DiskTier(Path(), kv_dtype=kind) for kind in kinds),
    ]
