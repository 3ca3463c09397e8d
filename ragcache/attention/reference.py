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
    add_sinks,
    alibi_causal_bias,
    alibi_paged_bias,
    alibi_segment_bias,
    alibi_shift,
    causal_bias,
    grouped,
    merge_states,
    partial_attention,
    window_bias,
)


class ReferenceAttentionBackend:
    """One product for all rows that read the same states (Hydragen §3.2)."""

    def attend(
        self, metadata: AttentionMetadata, layer: int,
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend.attend`."""
        rows = grouped(query, key.shape[0])  # [Hkv, T, G, D]
        joined = _own(metadata, layer, rows, key, value, scale)
        if metadata.shared_queries is not None:
            shared = _shared(metadata, metadata.shared_queries, layer, rows, scale)
            joined = merge_states(joined, shared, metadata.shared_index)
        if sinks is not None:
            joined = add_sinks(joined, sinks)
        return joined.out.flatten(1, 2)


def _own(
    metadata: AttentionMetadata, layer: int, rows: Tensor, key: Tensor, value: Tensor, scale: float
) -> Partial:
    parts = []
    for block in metadata.causal_blocks:
        own = slice(block.begin, block.end)
        part = _causal(metadata, own, layer, rows[:, own], key[:, own], value[:, own], scale)
        parts.append(part)
    if metadata.paged_queries is not None:
        parts.append(_paged(metadata, metadata.paged_queries, layer, rows, scale))
    out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
    index = metadata.own_index
    return Partial(out, lse) if index is None else Partial(out[index], lse[index])


def _shared(
    metadata: AttentionMetadata, queries: SharedQueries, layer: int, rows: Tensor, scale: float
) -> list[Partial]:
    turned = queries.turn_rows(rows, layer)  # [Hkv, M, G, D]
    window, cap = metadata.window_of(layer), metadata.softcap
    parts = []
    for kv in metadata.shared_kv:
        query, keys, values = turned[:, kv.begin : kv.end], kv.keys[layer], kv.values[layer]
        if metadata.slopes is None and window is None:
            parts.append(partial_attention(query, keys, values, scale=scale, softcap=cap))
            continue
        assert queries.distance is not None
        distance = queries.distance[kv.begin : kv.end]
        if metadata.slopes is not None:
            bias = alibi_segment_bias(metadata.slopes, keys)
            part = partial_attention(query, keys, values, scale=scale, bias=bias, softcap=cap)
            parts.append(alibi_shift(part, metadata.slopes, distance))
            continue
        assert window is not None
        first = _first_seen(distance, keys.shape[1], window)
        steps = torch.arange(first, keys.shape[1], device=keys.device)
        bias = window_bias(distance[:, None] + steps, window)
        keys, values = keys[:, first:], values[:, first:]
        parts.append(partial_attention(query, keys, values, scale=scale, bias=bias, softcap=cap))
    return parts


def _first_seen(distance: Tensor, length: int, window: int) -> int:
    """The first key of a segment that is in the window of any row, at most the last: the products
    leave out those before it. distance: [N], from each row to the segment's first key."""
    nearest = int(distance.max())
    return max(0, min(1 - window - nearest, length - 1))


def _causal(
    metadata: AttentionMetadata, own: slice, layer: int,
    rows: Tensor, key: Tensor, value: Tensor, scale: float,
) -> Partial:  # fmt: skip
    """New tokens of one request, the step's rows `own`, over themselves."""
    bias, window = causal_bias(key.shape[1], key.device), metadata.window_of(layer)
    if metadata.slopes is not None:
        assert metadata.positions is not None
        bias = bias + alibi_causal_bias(metadata.slopes, metadata.positions[own], len(key))
    if window is not None:
        assert metadata.positions is not None
        positions = metadata.positions[own]
        bias = bias + window_bias(positions[None, :] - positions[:, None], window)
    return partial_attention(rows, key, value, scale=scale, bias=bias, softcap=metadata.softcap)


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
    if (window := metadata.window_of(layer)) is not None:
        assert paged.distance is not None
        bias = bias + window_bias(paged.distance, window)
    query = rows.index_select(1, paged.rows)
    return partial_attention(query, keys, values, scale=scale, bias=bias, softcap=metadata.softcap)
