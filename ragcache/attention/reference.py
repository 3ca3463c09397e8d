"""Attention of one layer in one step by its definition, on any device and dtype.

    merge( partial(q, segment 1), ..., partial(q, segment n), partial(q, own tokens) )

Other backends compute the same, faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.attention.metadata import AttentionMetadata, PagedQueries, SharedQueries
from ragcache.attention.ops import (
    Partial,
    alibi_causal_bias,
    alibi_paged_bias,
    alibi_segment_bias,
    alibi_shift,
    causal_bias,
    grouped,
    merge_states,
    partial_attention,
    rotate,
)


class ReferenceAttentionBackend:
    """One product for all rows that read the same states (Hydragen §3.2)."""

    def attend(
        self, metadata: AttentionMetadata, layer: int,
        query: Tensor, key: Tensor, value: Tensor, *, scale: float,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend.attend`."""
        rows = grouped(query, key.shape[0])  # [Hkv, T, G, D]
        joined = _own(metadata, layer, rows, key, value, scale)
        if metadata.shared_queries is not None:
            shared = _shared(metadata, metadata.shared_queries, layer, rows, scale)
            joined = merge_states(joined, shared, metadata.shared_index)
        return joined.out.flatten(1, 2)


def _own(
    metadata: AttentionMetadata, layer: int, rows: Tensor, key: Tensor, value: Tensor, scale: float
) -> Partial:
    parts = []
    for block in metadata.causal_blocks:
        own = slice(block.begin, block.end)
        parts.append(_causal(metadata, own, rows[:, own], key[:, own], value[:, own], scale))
    if metadata.paged_queries is not None:
        parts.append(_paged(metadata, metadata.paged_queries, layer, rows, scale))
    out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
    index = metadata.own_index
    return Partial(out, lse) if index is None else Partial(out[index], lse[index])


def _shared(
    metadata: AttentionMetadata, queries: SharedQueries, layer: int, rows: Tensor, scale: float
) -> list[Partial]:
    turned = rows.index_select(1, queries.rows)  # [Hkv, M, G, D]
    if queries.rotation is not None:
        turned = rotate(turned, queries.rotation)
    parts = []
    for kv in metadata.shared_kv:
        query, keys, values = turned[:, kv.begin : kv.end], kv.keys[layer], kv.values[layer]
        if metadata.slopes is None:
            parts.append(partial_attention(query, keys, values, scale=scale))
            continue
        assert queries.distance is not None
        bias = alibi_segment_bias(metadata.slopes, keys)
        part = partial_attention(query, keys, values, scale=scale, bias=bias)
        distance = queries.distance[kv.begin : kv.end]
        parts.append(alibi_shift(part, metadata.slopes, distance))
    return parts


def _causal(
    metadata: AttentionMetadata, own: slice, rows: Tensor, key: Tensor, value: Tensor, scale: float
) -> Partial:
    """New tokens of one request, the step's rows `own`, over themselves."""
    bias = causal_bias(key.shape[1], key.device)
    if metadata.slopes is not None:
        assert metadata.positions is not None
        bias = bias + alibi_causal_bias(metadata.slopes, metadata.positions[own], len(key))
    return partial_attention(rows, key, value, scale=scale, bias=bias)


def _paged(
    metadata: AttentionMetadata, paged: PagedQueries, layer: int, rows: Tensor, scale: float
) -> Partial:
    """Every row over its own blocks."""
    keys = paged.gather_blocks(paged.keys[layer])
    values = paged.gather_blocks(paged.values[layer])
    bias = paged.mask[:, None].float()  # [B, 1, S]
    if metadata.slopes is not None:
        assert paged.distance is not None
        bias = bias + alibi_paged_bias(metadata.slopes, paged.distance, len(keys))
    query = rows.index_select(1, paged.rows)
    return partial_attention(query, keys, values, scale=scale, bias=bias)
