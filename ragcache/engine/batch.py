"""Ragged batches: the new tokens of all requests in one row of tokens, and the plan over them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ragcache.attention import Rotation, SegmentRows, StepPlan
from ragcache.engine.context import Segment
from ragcache.engine.private import PrivateStates
from ragcache.models import CausalLM, Step
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One request's share of a step: its next tokens, which follow its private states.

    position_ids ascend; a token sees the segments that start before it.
    """

    segments: tuple[Segment, ...]
    private: PrivateStates
    token_ids: Sequence[int]
    position_ids: Sequence[int]
    wants_logits: bool = True


@dataclass(slots=True)
class _Readers:
    """The rows that attend to one segment's states, and how far it was moved for each."""

    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)

    def add(self, first: int, end: int, slot: int, delta: int) -> None:
        self.rows.extend(range(first, end))
        self.slots.extend([slot] * (end - first))
        self.deltas.extend([delta] * (end - first))


def build_step(model: CausalLM, works: Sequence[Work]) -> Step:
    """Flattens the works to rows 0..T-1. Logits are wanted of the last row of each that asks."""
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    runs = []
    readers: dict[KVStates, _Readers] = {}  # grouped by the states themselves, not their equals
    for work in works:
        begin, end = len(tokens), len(tokens) + len(work.token_ids)
        tokens.extend(work.token_ids)
        positions.extend(work.position_ids)
        for slot, segment in enumerate(work.segments):
            first = begin + bisect_left(work.position_ids, segment.start)
            reader = readers.setdefault(segment.states, _Readers())
            reader.add(first, end, slot, segment.delta)
        runs.append(work.private.run(begin, end, len(work.segments)))
        if work.wants_logits:
            logit_rows.append(end - 1)
    segments, turns = _gather_turns(
        [_segment_rows(model, s, r, len(tokens)) for s, r in readers.items() if r.rows]
    )
    slots = 1 + max(len(work.segments) for work in works)
    return Step(
        torch.tensor(tokens, device=model.device),
        torch.tensor(positions, device=model.device),
        torch.tensor(logit_rows, dtype=torch.int64, device=model.device),
        StepPlan(segments, tuple(runs), len(tokens), slots, turns),
    )


def _segment_rows(
    model: CausalLM, states: KVStates, readers: _Readers, num_rows: int
) -> SegmentRows:
    everyone = readers.rows == list(range(num_rows)) and len(set(readers.slots)) == 1
    rows = slots = None
    if not everyone:
        rows = torch.tensor(readers.rows, device=model.device)
        slots = torch.tensor(readers.slots, device=model.device)
    rotation = None
    if any(readers.deltas):
        same = len(set(readers.deltas)) == 1
        deltas = readers.deltas[:1] if same else readers.deltas
        rotation = model.scheme.relocation(torch.tensor(deltas, device=model.device))
    return SegmentRows(states.keys, states.values, rows, slots, readers.slots[0], rotation)


def _gather_turns(
    segments: Sequence[SegmentRows],
) -> tuple[tuple[SegmentRows, ...], Rotation | None]:
    """Collects the rotations that turn all rows alike, to be done in one operation a layer."""
    common: list[Rotation] = []
    gathered = []
    for segment in segments:
        if segment.rows is None and segment.rotation is not None and len(segment.rotation.cos) == 1:
            common.append(segment.rotation)
            segment = replace(segment, rotation=None, turn=len(common) - 1)
        gathered.append(segment)
    return tuple(gathered), Rotation.stack(common) if common else None
