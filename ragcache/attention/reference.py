"""Attention of one layer in one step by its definition, on any device and dtype.

    merge( partial(q, segment 1), ..., partial(q, segment n), partial(q, own tokens) )

Other backends compute the same, faster. Scores are computed for some rows at a time, so that the
memory beyond the result does not grow with the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ragcache.attention.metadata import AttentionMetadata, PagedQueries, SharedKV, SharedQueries
from ragcache.attention.ops import (
    Partial,
    add_sinks,
    alibi_bias,
    causal_bias,
    grouped,
    merge_states,
    partial_attention,
    window_bias,
)

MOST_SCORES = 2**24
"""Scores at a time: 64 MiB in float32, and as much again while they become weights."""
MOST_RESULTS = 2**24
"""Elements of partial results at a time."""


class ReferenceAttentionBackend:
    """One product for all rows that read the same states (Hydragen §3.2)."""

    def attend(
        self,
        metadata: AttentionMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention (`AttentionBackend.attend`)."""
        rows = grouped(query, key.shape[0])  # [Hkv, T, G, D]
        joined = _own(metadata, layer, rows, key, value, scale)
        for part in metadata.shared_parts(MOST_RESULTS // (query.shape[0] * query.shape[2])):
            assert part.shared_queries is not None
            shared = _shared(part, part.shared_queries, layer, rows, scale)
            joined = merge_states(joined, shared, part.shared_index)
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
    heads = turned.shape[0] * turned.shape[2]
    parts = []
    for kv in metadata.shared_kv:
        over = partial(_segment, metadata, queries.distance, kv, layer, turned, scale)
        parts.append(_in_blocks(kv.end - kv.begin, heads * kv.keys.shape[2], over))
    return parts


def _segment(
    metadata: AttentionMetadata,
    distance: Tensor | None,
    kv: SharedKV,
    layer: int,
    turned: Tensor,
    scale: float,
    here: slice,
) -> Partial:
    """Some of the queries over the states of one segment. distance: see `SharedQueries`."""
    some = slice(kv.begin + here.start, kv.begin + here.stop)
    query, keys, values = turned[:, some], kv.keys[layer], kv.values[layer]
    window, bias = metadata.window_of(layer), None
    if metadata.slopes is not None or window is not None:
        assert distance is not None
        first = 0 if window is None else _first_seen(distance[some], keys.shape[1], window)
        away = distance[some, None] + torch.arange(first, keys.shape[1], device=keys.device)
        bias = _with_positions(metadata, layer, away.new_zeros(()), away, len(keys))
        keys, values = keys[:, first:], values[:, first:]
    return partial_attention(query, keys, values, scale=scale, bias=bias, softcap=metadata.softcap)


def _first_seen(distance: Tensor, length: int, window: int) -> int:
    """The first key of a segment that is in any row's window, at most the last key. Products skip
    the keys before it. distance: [N], from each row to the segment's first key."""
    nearest = int(distance.max())
    return max(0, min(1 - window - nearest, length - 1))


def _causal(
    metadata: AttentionMetadata,
    own: slice,
    layer: int,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> Partial:
    """New tokens of one request, the step's rows `own`, over themselves."""
    kv_heads, count, group, _ = rows.shape

    def compute(here: slice) -> Partial:
        bias = causal_bias(here, key.device)
        if metadata.positions is not None:
            positions = metadata.positions[own]
            distance = positions[None, : here.stop] - positions[here, None]  # [N, S]
            bias = _with_positions(metadata, layer, bias, distance, kv_heads)
        seen = key[:, : here.stop], value[:, : here.stop]
        cap = metadata.softcap
        return partial_attention(rows[:, here], *seen, scale=scale, bias=bias, softcap=cap)

    return _in_blocks(count, kv_heads * group * count, compute)


def _paged(
    metadata: AttentionMetadata, paged: PagedQueries, layer: int, rows: Tensor, scale: float
) -> Partial:
    """Every row over its own blocks."""
    kv_heads, _, group, dim = rows.shape

    def compute(here: slice) -> Partial:
        some = paged.part(here)
        states = (some.gather_blocks(each[layer]) for each in (some.keys, some.values))
        bias = some.mask[:, None].float()  # [B, 1, S]
        if some.distance is not None:
            bias = _with_positions(metadata, layer, bias, some.distance, kv_heads)
        query, cap = rows.index_select(1, some.rows), metadata.softcap
        return partial_attention(query, *states, scale=scale, bias=bias, softcap=cap)

    return _in_blocks(len(paged.rows), kv_heads * paged.mask.shape[1] * (group + dim), compute)


def _with_positions(
    metadata: AttentionMetadata, layer: int, bias: Tensor, distance: Tensor, kv_heads: int
) -> Tensor:
    """The bias, with ALiBi's and the layer's window added. distance: [N, S], key less query."""
    if metadata.slopes is not None:
        bias = bias + alibi_bias(metadata.slopes, distance, kv_heads)
    if (window := metadata.window_of(layer)) is not None:
        bias = bias + window_bias(distance, window)
    return bias


def _in_blocks(rows: int, elements: int, compute: Callable[[slice], Partial]) -> Partial:
    """The partial result of all rows, computed for as many at a time as their scores allow.
    elements: of one row."""
    size = max(1, MOST_SCORES // max(1, elements))
    parts = [compute(slice(at, min(at + size, rows))) for at in range(0, max(rows, 1), size)]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
