"""The CPU backend: large matrix products, and one exponential for every score.

All scores of a row are taken relative to one value that is known first: about the largest of them.
Numerators and denominators over all states then simply add up, and nothing is rescaled
(FlashDecoding++ §3, unified maximum). Where a score exceeds that value by more than an exponent
holds, the sum shows it, and the layer is computed again by definition. PyTorch's fused kernel takes
1.5 times as long over shared states (ADR 11).

Everything is multiplied in the dtype in which the machine's products are quick (`product_dtype`).
States in another dtype are converted piece by piece, in the processor's cache. The row of a step
that decodes for one request is multiplied in float32, over short states.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.attention.layout import LayerHeads
from ragcache.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    CausalBlock,
    PagedQueries,
)
from ragcache.attention.ops import grouped
from ragcache.attention.reference import MOST_RESULTS, MOST_SCORES, ReferenceAttentionBackend
from ragcache.machine import product_dtype

SAMPLE_STRIDE = 64  # every 64th key shows how large scores are
MAX_DENOMINATOR = 1e30  # the numerators must still be finite
WORKSPACE = 2**22  # scores: 8 MiB in bfloat16, so that they stay in cache
CONVERTED = 2**18  # elements of keys, or values, that are converted at a time
ONE_ROW = 2**17  # elements of keys, of one state, up to which one row is computed in float32


@dataclass(frozen=True, slots=True, eq=False)
class _OwnTokens:
    """Attention of rows over their own tokens; heads first, unlike `Partial`."""

    out: Tensor
    """[Hkv, N, G, D], float32 or the query's dtype."""
    lse: Tensor
    """[Hkv, N, G]."""


class CpuAttentionBackend:
    """Attention on a CPU, for rotary and absolute positions.

    ALiBi, soft caps, sinks and layers with a window go to the reference backend. Besides its result
    a layer takes the memory of a few times `MOST_RESULTS` elements, whatever the number of rows,
    keys and segments.
    """

    def __init__(self) -> None:
        self._reference = ReferenceAttentionBackend()
        self._local = threading.local()

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
        """See `AttentionBackend.attend`."""
        biased = metadata.slopes is not None or metadata.window_of(layer) is not None
        reshaped = metadata.softcap is not None or sinks is not None
        if biased or reshaped:
            return self._reference.attend(
                metadata, layer, query, key, value, scale=scale, sinks=sinks
            )
        if _is_one_row(metadata):
            return _one_row(metadata, layer, query, scale)
        work = product_dtype(query.dtype)
        rows = grouped(query.to(work), key.shape[0])  # [Hkv, T, G, D]
        own = _own(metadata, layer, rows, key.to(work), value.to(work), scale)
        if metadata.shared_queries is None:
            return _rows_first(own.out, query.dtype)
        joined, weight, base = own.out, torch.ones_like(own.lse), own.lse
        for part in metadata.shared_parts(MOST_RESULTS // (query.shape[0] * query.shape[2])):
            assert part.shared_queries is not None
            turned = part.shared_queries.turn_rows(rows, layer)
            before, base = base, _base(part, layer, base, turned, scale).to(work)
            taken = -base.index_select(1, part.shared_queries.rows)
            out, total = self._shared(part, layer, turned, taken, scale)
            shrink = (before - base).exp_()
            joined, weight = joined * shrink[..., None], weight * shrink
            for slot in part.shared_index:
                joined += out.index_select(1, slot)
                weight += total.index_select(1, slot)
        if not bool((weight < MAX_DENOMINATOR).all()):  # NaN is not less either
            return self._reference.attend(metadata, layer, query, key, value, scale=scale)
        return _rows_first(joined / weight[..., None], query.dtype)

    def _shared(
        self, metadata: AttentionMetadata, layer: int, turned: Tensor, taken: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Numerators [Hkv, M + 1, G, D] and denominators [Hkv, M + 1, G] of the M shared queries
        `turned` [Hkv, M, G, D], times exp(taken) [Hkv, M, G]; the last of each is zero."""
        kv_heads, count, group, dim = turned.shape
        exact = torch.promote_types(turned.dtype, torch.float32)
        out = turned.new_empty(kv_heads, (count + 1) * group, dim)
        total = turned.new_empty(kv_heads, (count + 1) * group, dtype=exact)
        query, taken = turned.flatten(1, 2), taken.flatten(1, 2)[..., None]
        for kv in metadata.shared_kv:
            at = slice(kv.begin * group, kv.end * group)
            keys = kv.keys[layer]
            values = keys if kv.values is kv.keys else kv.values[layer]
            here = self._products(query[:, at], keys, values, taken[:, at], scale)
            out[:, at], total[:, at] = here
        out[:, count * group :], total[:, count * group :] = 0, 0
        shape = (kv_heads, count + 1, group)
        return out.view(*shape, dim), total.view(shape)

    def _products(
        self, query: Tensor, key: Tensor, value: Tensor, taken: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Numerator [Hkv, R, D] and denominator [Hkv, R] of query rows [Hkv, R, D]."""
        if key.dtype == query.dtype:
            return self._multiply(query, key, value, taken, scale)
        heads, tokens, dim = key.shape
        size = max(1, CONVERTED // (heads * dim))
        sums: tuple[Tensor, Tensor] | None = None
        for at in range(0, max(tokens, 1), size):
            keys = key[:, at : at + size].to(query.dtype)
            values = keys if value is key else value[:, at : at + size].to(query.dtype)
            out, total = self._multiply(query, keys, values, taken, scale)
            sums = (out, total) if sums is None else (sums[0].add_(out), sums[1].add_(total))
        assert sums is not None
        return sums

    def _multiply(
        self, query: Tensor, key: Tensor, value: Tensor, taken: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`_products` of states in the dtype of the queries."""
        exact = torch.promote_types(query.dtype, torch.float32)
        size = query.shape[0] * query.shape[1] * key.shape[1]
        if size > WORKSPACE:  # the fused kernel is as fast there, and needs no workspace
            out, lse = _fused(query[None], key[None], value[None], scale, causal=False)
            weight = (lse[0] + taken[..., 0]).exp_()
            return out[0] * weight[..., None], weight
        scores = self._workspace(query.dtype)[:size].view(*query.shape[:2], key.shape[1])
        torch.baddbmm(taken, query, key.transpose(1, 2), alpha=scale, out=scores)
        total = scores.exp_().sum(-1, dtype=exact)
        return torch.bmm(scores, value), total

    def _workspace(self, dtype: torch.dtype) -> Tensor:
        """Memory for scores, kept by thread: freshly mapped pages cost more than the products
        that fill them."""
        scores: Tensor | None = getattr(self._local, "scores", None)
        if scores is None or scores.dtype != dtype:
            scores = self._local.scores = torch.empty(WORKSPACE, dtype=dtype)
        return scores


def attention_bytes(rows: int, tokens: int, heads: int, kept: LayerHeads) -> int:
    """The most memory that attention of one layer over one run of states takes on a CPU, by
    products or by definition.

    Queries and results of the rows, `MOST_SCORES` scores at a time with their bias and weights, the
    keys and values of the run once where products want them in another dtype or layout, all in
    float32, and the workspace.

    Args:
        rows: New tokens.
        tokens: The longest run of states that they attend to.
        heads: Query heads.
        kept: Key heads.
    """
    queries = rows * heads * kept.size
    scores = min(rows * heads * tokens, max(MOST_SCORES, heads * tokens))
    states = kept.count * tokens * kept.size
    elements = 11 * queries + 3 * scores + 2 * states + WORKSPACE
    return elements * torch.float32.itemsize


def _is_one_row(metadata: AttentionMetadata) -> bool:
    """Whether a step decodes one token over states that are short, each of them."""
    paged = metadata.paged_queries
    if paged is None or metadata.causal_blocks or len(paged.rows) > 1:
        return False
    _, heads, _, dim = paged.keys.shape
    if paged.blocks.numel() * paged.block_size * heads * dim > ONE_ROW:
        return False
    return all(kv.keys[0].numel() <= ONE_ROW for kv in metadata.shared_kv)


def _one_row(metadata: AttentionMetadata, layer: int, query: Tensor, scale: float) -> Tensor:
    """Attention of the only row of a step, [1, Hq, D]: one softmax over all keys that it reads.

    A product of one row takes as long to set up in bfloat16 as to compute in float32, and scores
    in float32 need no value that they are taken relative to.
    """
    paged, shared = metadata.paged_queries, metadata.shared_queries
    assert paged is not None
    exact = torch.promote_types(query.dtype, torch.float32)
    rows = grouped(query.to(exact), paged.keys.shape[1]) * scale  # [Hkv, 1, G, D]
    queries, keys = [rows[:, 0]], [paged.gather_blocks(paged.keys[layer])[:, 0]]
    values = keys
    if paged.values is not paged.keys:
        values = [paged.gather_blocks(paged.values[layer])[:, 0]]
    if shared is not None:
        queries += shared.turn_rows(rows, layer).unbind(1)
        read = [kv for kv in metadata.shared_kv for _ in range(kv.begin, kv.end)]
        keys = [*keys, *(kv.keys[layer] for kv in read)]
        values = [*values, *(kv.values[layer] for kv in read)]
    # one state at a time in float32, so that it stays in cache
    scores = [
        torch.bmm(each, key.to(exact).transpose(1, 2))
        for each, key in zip(queries, keys, strict=True)
    ]
    scores[0] += paged.mask.to(exact)
    lengths = [key.shape[1] for key in keys]
    weights = torch.split(torch.cat(scores, -1).softmax(-1), lengths, -1)
    out = torch.bmm(weights[0], values[0].to(exact))
    for weight, value in zip(weights[1:], values[1:], strict=True):
        out.baddbmm_(weight, value.to(exact))
    return out.view(1, -1, out.shape[-1]).to(query.dtype)


def _own(
    metadata: AttentionMetadata, layer: int, rows: Tensor, key: Tensor, value: Tensor, scale: float
) -> _OwnTokens:
    parts = [_causal(block, rows, key, value, scale) for block in metadata.causal_blocks]
    if metadata.paged_queries is not None:
        parts.append(_paged(metadata.paged_queries, layer, rows, scale))
    if len(parts) == 1:
        return parts[0]
    out, lse = torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1)
    if (index := metadata.own_index) is None:
        return _OwnTokens(out, lse)
    return _OwnTokens(out.index_select(1, index), lse.index_select(1, index))


def _base(
    metadata: AttentionMetadata, layer: int, lse: Tensor, turned: Tensor, scale: float
) -> Tensor:
    """The value that each row's scores are taken relative to: about the largest. [Hkv, T, G].

    The larger of the `lse` over its own tokens and of its scores at a sample of the shared keys.
    The first key is in it: in a model with attention sinks it has the largest.
    """
    kv_heads, count, group, _ = turned.shape
    highest = lse.new_full((kv_heads, count + 1, group), -torch.inf)
    for kv in metadata.shared_kv:
        if not kv.keys.shape[2]:
            continue
        query = turned[:, kv.begin : kv.end].flatten(1, 2)
        sample = kv.keys[layer][:, ::SAMPLE_STRIDE].to(query.dtype).transpose(1, 2)
        size = max(1, WORKSPACE // query.shape[:2].numel())
        here = highest[:, kv.begin : kv.end]
        for piece in torch.split(sample, size, -1):
            largest = torch.bmm(query, piece).amax(-1).view(kv_heads, -1, group)
            torch.maximum(here, largest, out=here)
    highest *= scale
    for slot in metadata.shared_index:
        lse = torch.maximum(lse, highest.index_select(1, slot))
    return lse


def _causal(
    block: CausalBlock, rows: Tensor, key: Tensor, value: Tensor, scale: float
) -> _OwnTokens:
    """PyTorch's fused attention (ADR 5) of new tokens over themselves.

    A causal mask needs whole query heads. The heads of a group become heads of one batch row, and
    the keys are broadcast over them by a stride of zero: no copy.
    """
    own = slice(block.begin, block.end)
    query = rows[:, own].transpose(1, 2)  # [Hkv, G, N, D]
    keys, values = (x[:, None, own].expand(query.shape) for x in (key, value))
    out, lse = _fused(query, keys, values, scale, causal=True)
    return _OwnTokens(out.transpose(1, 2), lse.transpose(1, 2))


def _paged(paged: PagedQueries, layer: int, rows: Tensor, scale: float) -> _OwnTokens:
    """Every row over its own blocks, which are few: gathered, then one product for all."""
    kv_heads, _, group, dim = rows.shape
    count = len(paged.rows)
    query = rows if count == rows.shape[1] else rows.index_select(1, paged.rows)
    query = query.reshape(kv_heads * count, group, dim)
    kept = [paged.keys] if paged.values is paged.keys else [paged.keys, paged.values]
    gathered = [
        paged.gather_blocks(each[layer]).view(kv_heads * count, -1, dim).to(rows.dtype)
        for each in kept
    ]
    keys, values = gathered[0], gathered[-1]
    mask = paged.mask.to(rows.dtype)
    hidden = mask.expand(kv_heads, -1, -1).reshape(kv_heads * count, 1, -1)
    scores = torch.baddbmm(hidden, query, keys.transpose(1, 2), alpha=scale)
    largest = scores.amax(-1, keepdim=True)
    exact = torch.promote_types(rows.dtype, torch.float32)
    total = scores.sub_(largest).exp_().sum(-1, dtype=exact)  # [Hkv * B, G]
    out = torch.bmm(scores, values) / total[..., None]
    lse = total.log_().add_(largest[..., 0])
    return _OwnTokens(out.view(kv_heads, count, group, dim), lse.view(kv_heads, count, group))


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention (ADR 5). query, key, value: [B, H, N or S, D]; returns
    [B, H, N, D] and lse [B, H, N]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse


def _rows_first(out: Tensor, dtype: torch.dtype) -> Tensor:
    """[Hkv, T, G, D] as [T, Hq, D]."""
    return out.to(dtype).transpose(0, 1).flatten(1, 2)


def backend_for(device: torch.device) -> AttentionBackend:
    """The fastest backend for this device."""
    return CpuAttentionBackend() if device.type == "cpu" else ReferenceAttentionBackend()
