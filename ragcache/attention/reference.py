"""Attention of one layer in one step, as it is defined; on any device and dtype.

    merge( partial(q, run_1), ..., partial(q, run_n), partial(q, own tokens) )

Other backends compute the same, faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.attention.metadata import AttentionMetadata, CausalBlock, PageRows, SharedQueries
from ragcache.attention.ops import (
    Partial,
    causal_bias,
    grouped,
    merge_states,
    page_bias,
    partial_attention,
    rotate,
    run_bias,
    square_bias,
    starting_at,
)


class ReferenceAttentionBackend:
    """One product a run, for all rows that ask it (Hydragen §3.2)."""

    def attend(
        self,
        plan: AttentionMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        rows = grouped(query, key.shape[0])  # [Hkv, T, G, D]
        joined = self._own(plan, layer, rows, key, value, scale)
        if plan.asking is not None:
            asked = self._runs(plan, plan.asking, layer, rows, scale)
            joined = merge_states(joined, asked, plan.table)
        return joined.out.flatten(1, 2)

    def _own(
        self,
        plan: AttentionMetadata,
        layer: int,
        rows: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Partial:
        parts = [self._square(plan, s, rows, key, value, scale) for s in plan.squares]
        if plan.pages is not None:
            parts.append(self._pages(plan, plan.pages, layer, rows, scale))
        out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
        return Partial(out, lse) if plan.own is None else Partial(out[plan.own], lse[plan.own])

    def _runs(
        self, plan: AttentionMetadata, asking: SharedQueries, layer: int, rows: Tensor, scale: float
    ) -> list[Partial]:
        turned = rows.index_select(1, asking.rows)  # [Hkv, M, G, D]
        if asking.rotation is not None:
            turned = rotate(turned, asking.rotation)
        parts = []
        for run in plan.runs:
            query, keys, values = turned[:, run.begin : run.end], run.keys[layer], run.values[layer]
            if plan.slopes is None:
                parts.append(partial_attention(query, keys, values, scale=scale))
                continue
            assert asking.distance is not None
            bias = run_bias(plan.slopes, keys)
            part = partial_attention(query, keys, values, scale=scale, bias=bias)
            parts.append(starting_at(part, plan.slopes, asking.distance[run.begin : run.end]))
        return parts

    def _square(
        self,
        plan: AttentionMetadata,
        square: CausalBlock,
        rows: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Partial:
        """New tokens of one request over themselves, causally."""
        own = slice(square.begin, square.end)
        bias = causal_bias(square.end - square.begin, key.device)
        if plan.slopes is not None:
            assert plan.positions is not None
            bias = bias + square_bias(plan.slopes, plan.positions[own], key.shape[0])
        return partial_attention(rows[:, own], key[:, own], value[:, own], scale=scale, bias=bias)

    def _pages(
        self, plan: AttentionMetadata, pages: PageRows, layer: int, rows: Tensor, scale: float
    ) -> Partial:
        """Every row over the pages of its own."""
        keys, values = pages.gather(pages.keys[layer]), pages.gather(pages.values[layer])
        bias = pages.mask[:, None].float()  # [B, 1, S]
        if plan.slopes is not None:
            assert pages.distance is not None
            bias = bias + page_bias(plan.slopes, pages.distance, len(keys))
        query = rows.index_select(1, pages.rows)
        return partial_attention(query, keys, values, scale=scale, bias=bias)
