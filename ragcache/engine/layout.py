"""Who reads what in a step: runs that are read once for all their readers, and pages.

A run is a segment, or a stretch of private chunks that the same requests share (the tree of
Hydragen §3.3 and of ChunkAttention §3.1 falls out), or a long stretch of one request. What is left
of a request that decodes, its last chunks, is read page by page in one product with those of all
others. The layout stays as it is until a request joins or leaves or a chunk fills, which is
ChunkAttention's lazy context copy (§3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ragcache.engine.context import Segment
from ragcache.engine.private import Pages, PrivateStates, Stretch

LONG = 4  # chunks in a row from which a single reader's stretch is a run of its own


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One request's share of a step: its next tokens, which follow its private states.

    position_ids ascend; a token sees the segments that start at or before it.
    """

    segments: tuple[Segment, ...]
    private: PrivateStates
    token_ids: Sequence[int]
    position_ids: Sequence[int]
    wants_logits: bool = True


@dataclass(slots=True)
class Run:
    """A contiguous run and its readers: rows first:end of the step, and for each reader how far
    the run was moved and where its first key stands."""

    keys: Tensor
    values: Tensor
    readers: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def add(self, first: int, end: int, delta: int, start: int) -> None:
        if first < end and self.keys.shape[2]:
            self.readers.append((first, end))
            self.deltas.append(delta)
            self.starts.append(start)


@dataclass(frozen=True, slots=True)
class Tail:
    """The last chunks of a request that decodes: its row, its private states, and the index of
    each of the chunks among the request's."""

    row: int
    private: Pages
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """rows: begin and end of each work's rows; squares: those of works with several new tokens."""

    rows: tuple[tuple[int, int], ...]
    runs: tuple[Run, ...]
    squares: tuple[tuple[int, int], ...]
    tails: tuple[Tail, ...]


def lay_out(works: Sequence[Work], *, gapless: bool = False) -> Layout:
    """Groups the works' reading. gapless: a run must stand at consecutive positions, as ALiBi
    needs, whose bias follows the position."""
    rows, begin = [], 0
    for work in works:
        rows.append((begin, begin + len(work.token_ids)))
        begin = rows[-1][1]
    runs = _segment_runs(works, rows)
    tails = []
    owned = _owned(works)
    for index, work in enumerate(works):
        decodes = len(work.token_ids) == 1 and isinstance(work.private, Pages)
        short: list[int] = []
        for stretch in _joined(work.private, owned, gapless, full_only=decodes):
            readers = stretch.readers
            if decodes and len(readers) == 1 and (gapless or len(stretch.chunks) < LONG):
                short += stretch.chunks
            elif readers[0] == index:
                runs.append(_private_run(stretch, [rows[reader] for reader in readers]))
        if decodes:
            assert isinstance(work.private, Pages)
            chunks = _with_next(work.private, short)
            tails.append(Tail(rows[index][0], work.private, chunks))
    squares = tuple(
        rows[index]
        for index, work in enumerate(works)
        if len(work.token_ids) > 1 or not isinstance(work.private, Pages)
    )
    return Layout(tuple(rows), tuple(run for run in runs if run.readers), squares, tuple(tails))


def _segment_runs(works: Sequence[Work], rows: Sequence[tuple[int, int]]) -> list[Run]:
    """Segments by the memory that they read, so that views of one module are one run."""
    runs: dict[tuple[int, int], Run] = {}
    for work, (begin, end) in zip(works, rows, strict=True):
        for segment in work.segments:
            states = segment.states
            place = (states.keys.data_ptr(), states.length)
            run = runs.setdefault(place, Run(states.keys, states.values))
            first = begin + bisect_left(work.position_ids, segment.start)
            run.add(first, end, segment.delta, segment.start)
    return list(runs.values())


@dataclass(frozen=True, slots=True)
class _Joined:
    """Neighboring stretches of one request with the same readers, as one. chunks: their indexes
    among the request's."""

    stretch: Stretch
    chunks: tuple[int, ...]
    readers: tuple[int, ...]
    start: int


def _owned(works: Sequence[Work]) -> dict[tuple[int, int, int], list[int]]:
    """The works that read each stretch of private memory."""
    readers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, work in enumerate(works):
        for stretch in work.private.stretches():
            readers[stretch.place].append(index)
    return readers


def _joined(
    private: PrivateStates,
    readers: dict[tuple[int, int, int], list[int]],
    gapless: bool,
    *,
    full_only: bool,
) -> Iterator[_Joined]:
    """full_only: without the last chunk, while it still fills."""
    current: _Joined | None = None
    at = 0  # tokens before the stretch
    for number, stretch in enumerate(private.stretches()):
        who = tuple(readers[stretch.place])
        length = stretch.end - stretch.begin
        if full_only and isinstance(private, Pages) and length < private.pool.chunk:
            break
        pieces = _pieces(stretch, private.positions[at : at + length]) if gapless else [stretch]
        for piece in pieces:
            start = private.positions[at + piece.begin - stretch.begin]
            if current is not None and _follows(current, piece, who, start, gapless):
                whole = Stretch(piece.keys, piece.values, current.stretch.begin, piece.end)
                chunks = tuple(dict.fromkeys((*current.chunks, number)))
                current = _Joined(whole, chunks, who, current.start)
                continue
            if current is not None:
                yield current
            current = _Joined(piece, (number,), who, start)
        at += length
    if current is not None:
        yield current


def _follows(
    current: _Joined, piece: Stretch, who: tuple[int, ...], start: int, gapless: bool
) -> bool:
    length = current.stretch.end - current.stretch.begin
    in_place = current.stretch.end == piece.begin and current.readers == who
    return in_place and (not gapless or current.start + length == start)


def _pieces(stretch: Stretch, positions: Sequence[int]) -> Iterator[Stretch]:
    """The stretch, cut where its positions leave a gap."""
    begin = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            offset = stretch.begin
            yield Stretch(stretch.keys, stretch.values, offset + begin, offset + at)
            begin = at


def _private_run(joined: _Joined, readers: Sequence[tuple[int, int]]) -> Run:
    stretch = joined.stretch
    run = Run(
        stretch.keys[:, :, stretch.begin : stretch.end],
        stretch.values[:, :, stretch.begin : stretch.end],
    )
    for first, end in readers:
        run.add(first, end, 0, joined.start)
    return run


def _with_next(private: Pages, chunks: Sequence[int]) -> tuple[int, ...]:
    """The chunks and the one that the step writes to."""
    return tuple(dict.fromkeys((*chunks, private.length // private.pool.chunk)))
