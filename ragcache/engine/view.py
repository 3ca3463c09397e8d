"""What the engine computes now, for whoever watches: a value that its thread leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache.engine.layout import Work


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """A segment that steps read. name: that of its states. requests, rows: that read it."""

    name: str
    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class BatchView:
    """A step. rows: its new tokens; requests: those that they belong to; encodings: modules that
    are encoded beside them; segments: what is read, the most read first."""

    rows: int = 0
    requests: int = 0
    encodings: int = 0
    segments: tuple[SegmentUse, ...] = ()

    @classmethod
    def of(cls, works: Iterable[tuple[Work, bool]]) -> BatchView:
        """Of the works of a step, each with whether it encodes a module. Only what answers read
        is told, and of that what has a name."""
        uses: dict[str, tuple[int, int, int]] = {}
        rows = requests = encodings = 0
        for work, encodes in works:
            rows += len(work.token_ids)
            encodings, requests = encodings + encodes, requests + (not encodes)
            for segment in () if encodes else work.segments:
                if segment.name is not None:
                    _, readers, asking = uses.get(segment.name, (0, 0, 0))
                    asking += len(work.token_ids)
                    uses[segment.name] = segment.states.length, readers + 1, asking
        segments = (SegmentUse(name, *use) for name, use in uses.items())
        ranked = sorted(segments, key=lambda use: (-use.requests, -use.rows, use.name))
        return cls(rows, requests, encodings, tuple(ranked))


IDLE = BatchView()
