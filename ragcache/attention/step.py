"""Attention of one layer in one step: every segment once, then the private parts, then the merge.

merge( partial(q, segment_1), ..., partial(q, segment_n), causal(q, private) )
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.attention.backend import AttentionBackend
from ragcache.attention.partial import Partial, merge, merge_slots
from ragcache.attention.plan import PrivateRun, SegmentRows, StepPlan
from ragcache.attention.rotary import rotate


def attend(
    plan: StepPlan, layer: int, query: Tensor, *, scale: float, backend: AttentionBackend
) -> Tensor:
    """query: [Hq, T, D], rotated to the rows' positions. The step's own keys and values already
    stand in the private runs. Returns [Hq, T, D]."""
    query = query.contiguous()
    turned = None if plan.turns is None else rotate(query, plan.turns)  # [N, Hq, T, D]
    if plan.everyone:
        parts = [_segment(s, layer, query, turned, scale, backend) for s in plan.segments]
        parts.append(_private(plan.runs[0], layer, query, scale, backend))
        if len(parts) == 1:
            return parts[0].out
        return merge_slots([part.out for part in parts], torch.stack([p.lse for p in parts]))
    heads, rows, dim = query.shape
    out = query.new_zeros(plan.num_slots, heads, rows, dim)
    exact = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((plan.num_slots, heads, rows), -torch.inf, dtype=exact)
    for segment in plan.segments:
        part = _segment(segment, layer, query, turned, scale, backend)
        if segment.rows is None:
            out[segment.slot], lse[segment.slot] = part.out, part.lse
        else:
            out[segment.slots, :, segment.rows] = part.out.transpose(0, 1)
            lse[segment.slots, :, segment.rows] = part.lse.transpose(0, 1)
    for run in plan.runs:
        own = _private(run, layer, query[:, run.begin : run.end], scale, backend)
        out[run.slot, :, run.begin : run.end] = own.out
        lse[run.slot, :, run.begin : run.end] = own.lse
    return merge_slots(out, lse)


def _segment(
    segment: SegmentRows,
    layer: int,
    query: Tensor,
    turned: Tensor | None,
    scale: float,
    backend: AttentionBackend,
) -> Partial:
    """One product over the segment for all rows that attend to it (Hydragen §3.2)."""
    if segment.turn is not None and turned is not None:
        asking = turned[segment.turn]
    else:
        asking = query if segment.rows is None else query[:, segment.rows]
        if segment.rotation is not None:
            asking = rotate(asking, segment.rotation)
    return backend.partial(asking, segment.keys[layer], segment.values[layer], scale=scale)


def _private(
    run: PrivateRun, layer: int, query: Tensor, scale: float, backend: AttentionBackend
) -> Partial:
    """One request's rows over its own tokens: all of its past, and causally the new ones."""
    keys, values = run.keys[layer], run.values[layer]
    new = run.end - run.begin
    if new == 1:
        until = run.past + 1
        return backend.partial(query, keys[:, :until], values[:, :until], scale=scale)
    begin, end = run.past, run.past + new
    square = backend.partial(
        query, keys[:, begin:end], values[:, begin:end], scale=scale, causal=True
    )
    if run.past == 0:
        return square
    past = backend.partial(query, keys[:, :begin], values[:, :begin], scale=scale)
    return merge(past, square)
