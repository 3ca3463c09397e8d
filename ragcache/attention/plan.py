"""What one forward pass attends to: the segments with their query rows, and the private runs.

A step flattens the new tokens of all requests to rows 0..T-1. The plan says, for each segment,
which rows attend to it and where the segment stands for each of them, so that every segment is
read once however many requests share it (RelayAttention, Hydragen), in whatever order they hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragcache.attention.rotary import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRows:
    """A segment and the query rows that attend to it.

    keys, values: [L, Hkv, S, D]. `rows` and `slots`: [N] int64; row `rows[i]` keeps its partial
    result in slot `slots[i]`. `rows` is None where all rows attend, and then all keep it in slot
    `slot`. `rotation` turns the queries (N or 1 rows), None where the segment stands at its
    canonical position or where `turn` says which of the plan's common `turns` to take.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor | None
    slots: Tensor | None
    slot: int
    rotation: Rotation | None
    turn: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrivateRun:
    """Rows `begin:end` of one request, which see its private past and, causally, each other.

    keys, values: [L, Hkv, capacity, D]; the first `past` entries are valid before the step, and
    the step writes its own at `past:past + end - begin`.
    """

    keys: Tensor
    values: Tensor
    past: int
    begin: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """All that attention needs for one step over `num_rows` rows, in at most `num_slots` parts.

    turns: the ways in which all rows turn alike, so that one operation a layer turns them all.
    """

    segments: tuple[SegmentRows, ...]
    runs: tuple[PrivateRun, ...]
    num_rows: int
    num_slots: int
    turns: Rotation | None = None

    @property
    def everyone(self) -> bool:
        """Whether every row attends to every part, as it does for a single request."""
        return len(self.runs) == 1 and all(segment.rows is None for segment in self.segments)
