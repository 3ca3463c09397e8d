"""Ragged batches: the new tokens of all requests in one row of tokens, and the plan over them."""

# MERGED ragcache.engine.layout: Who reads what in a step: runs that are read once for all
#   their readers, and pages. A run is a segment, or a stretch of private chunks that the same
#   requests share (the tree of Hydragen §3.3 and of ChunkAttention §3.1 falls out), or a long
#   stretch of one request. What is left of a request that decodes, its last chunks, is read
#   page by page in one product with those of all others. The layout stays as it is until a
#   request joins or leaves or a chunk fills, which is ChunkAttention's lazy context copy
#   (§3.3).

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    PageRows,
    PageWrite,
    RunRows,
    SharedQueries,
    Write,
)
from ragcache.engine.kv_cache import BlockTable, KVSpan, RequestKV
from ragcache.engine.request import Segment
from ragcache.models import CausalLM, Step

Ints = NDArray[np.int64]


class StepBuilder:
    """Builds steps, and keeps what does not change while the same requests decode."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.rebuilt = 0
        self._signature: object = None
        self._frame: _Frame | None = None

    def build(self, works: Sequence[ScheduledChunk]) -> Step:
        """Flattens the works to rows 0..T-1. Logits are wanted of the last row of each that
        asks."""
        signature = tuple(_shape(work) for work in works)
        if self._frame is None or None in signature or signature != self._signature:
            self._frame = _Frame.of(self.model, works)
            self._signature = signature
            self.rebuilt += 1
        return self._frame.step(works)

    def forget(self) -> None:
        """Lets go of the states that the last step read."""
        self._frame = None


def _shape(work: ScheduledChunk) -> object:
    """Equal for two steps of a request between which its reading does not change; None where it
    always does."""
    private = work.private
    if len(work.token_ids) != 1 or not isinstance(private, BlockTable):
        return None
    seen = sum(segment.start <= work.position_ids[0] for segment in work.segments)
    return (private, work.wants_logits, private.length // private.pool.chunk, seen)


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """The part of a plan that stays while its requests decode."""

    model: CausalLM
    layout: Layout
    plan: AttentionMetadata  # with the pages and writes of the first step
    starts: Ints  # [M]: where each asking row's run begins
    logit_rows: Tensor

    @classmethod
    def of(cls, model: CausalLM, works: Sequence[ScheduledChunk]) -> _Frame:
        layout = lay_out(works, gapless=model.scheme.slopes is not None)
        asking, starts = _asking(model, layout)
        own = _own(layout)
        plan = AttentionMetadata(
            asking=asking,
            runs=_run_rows(layout),
            squares=tuple(CausalBlock(begin, end) for begin, end in layout.squares),
            pages=_pages(model, layout.tails),
            writes=(),
            table=_device(model, _table(layout)),
            own=None if own is None else _device(model, own),
            slopes=model.scheme.slopes,
        )
        wanted = [
            end - 1 for work, (_, end) in zip(works, layout.rows, strict=True) if work.wants_logits
        ]
        return cls(model, layout, plan, starts, _device(model, _ints(wanted)))

    def step(self, works: Sequence[ScheduledChunk]) -> Step:
        tokens = _ints([token for work in works for token in work.token_ids])
        positions = _ints([position for work in works for position in work.position_ids])
        plan = replace(self.plan, writes=self._writes(works), pages=self._filled_pages())
        if self.model.scheme.slopes is not None:
            plan = self._with_distances(plan, positions)
        return Step(
            _device(self.model, tokens), _device(self.model, positions), self.logit_rows, plan
        )

    def _writes(self, works: Sequence[ScheduledChunk]) -> tuple[Write, ...]:
        """All rows of paged requests in one write, each room in its own."""
        writes: list[Write] = []
        index: list[int] = []
        rows: list[int] = []
        pool = None
        for work, (begin, end) in zip(works, self.layout.rows, strict=True):
            if isinstance(work.private, BlockTable):
                pool = work.private.pool
                index += work.private.slots(end - begin)
                rows += range(begin, end)
            else:
                writes.append(work.private.write(begin, end))
        if pool is not None:
            everyone = not writes
            writes.append(
                PageWrite(
                    pool.keys,
                    pool.values,
                    _device(self.model, _ints(index)),
                    None if everyone else _device(self.model, _ints(rows)),
                )
            )
        return tuple(writes)

    def _filled_pages(self) -> PageRows | None:
        """The pages with a mask over what this step fills."""
        pages = self.plan.pages
        if pages is None:
            return None
        mask = np.full(pages.mask.shape, -np.inf, dtype=np.float32)
        chunk = pages.chunk
        for row, tail in enumerate(self.layout.tails):
            length = tail.private.length + 1
            filled = sum(min(chunk, length - number * chunk) for number in tail.chunks)
            mask[row, :filled] = 0
        return replace(pages, mask=_device(self.model, mask).to(pages.mask.dtype))

    def _with_distances(self, plan: AttentionMetadata, positions: Ints) -> AttentionMetadata:
        """ALiBi: how far each row is from what it reads."""
        asking, pages = plan.asking, plan.pages
        if asking is not None:
            away = self.starts - positions[asking.rows.cpu().numpy()]
            asking = replace(asking, distance=_floats(self.model, away))
        if pages is not None:
            away = np.zeros(pages.mask.shape, dtype=np.int64)
            for row, tail in enumerate(self.layout.tails):
                now = positions[tail.row]
                own = (*tail.private.positions, now)
                chunk = pages.chunk
                seen = [p for n in tail.chunks for p in own[n * chunk : (n + 1) * chunk]]
                away[row, : len(seen)] = np.asarray(seen) - now
            pages = replace(pages, distance=_floats(self.model, away))
        return replace(plan, asking=asking, pages=pages, positions=_floats(self.model, positions))


def _asking(model: CausalLM, layout: Layout) -> tuple[SharedQueries | None, Ints]:
    rows: list[int] = []
    deltas: list[int] = []
    starts: list[int] = []
    for run in layout.runs:
        for (first, end), delta, start in zip(run.readers, run.deltas, run.starts, strict=True):
            rows += range(first, end)
            deltas += [delta] * (end - first)
            starts += [start] * (end - first)
    if not rows:
        return None, _ints([])
    rotation = None
    if any(deltas):
        rotation = model.scheme.relocation(_device(model, _ints(deltas)))
    if rotation is not None:
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]  # [M, 1, R/2]
        rotation = replace(rotation, cos=cos, sin=sin)
    return SharedQueries(_device(model, _ints(rows)), rotation), _ints(starts)


def _run_rows(layout: Layout) -> tuple[RunRows, ...]:
    found, begin = [], 0
    for run in layout.runs:
        end = begin + sum(until - first for first, until in run.readers)
        found.append(RunRows(run.keys, run.values, begin, end))
        begin = end
    return tuple(found)


def _pages(model: CausalLM, tails: Sequence[DecodeTail]) -> PageRows | None:
    if not tails:
        return None
    pool = tails[0].private.pool
    pages = np.zeros((len(tails), max(len(tail.chunks) for tail in tails)), dtype=np.int64)
    for row, tail in enumerate(tails):
        own = [tail.private.chunk_ids[n] for n in tail.chunks]
        pages[row] = own[0]  # where a row has fewer, nothing of another request is read
        pages[row, : len(own)] = own
    mask = pool.keys.new_zeros(len(tails), pages.shape[1] * pool.chunk)
    rows = _device(model, _ints([tail.row for tail in tails]))
    return PageRows(pool.keys, pool.values, pool.chunk, rows, _device(model, pages), mask)


def _table(layout: Layout) -> Ints:
    """Where each row's partial results over runs stand: [slots, T], M for none."""
    found: list[list[int]] = [[] for _ in range(layout.rows[-1][1])]
    at = 0
    for run in layout.runs:
        for first, end in run.readers:
            for row in range(first, end):
                found[row].append(at)
                at += 1
    table = np.full((max(map(len, found)), len(found)), at, dtype=np.int64)
    for row, places in enumerate(found):
        table[: len(places), row] = places
    return table


def _own(layout: Layout) -> Ints | None:
    """Where each row's result over its own tokens stands, None where in the order of the rows."""
    order = [row for begin, end in layout.squares for row in range(begin, end)]
    order += [tail.row for tail in layout.tails]
    if order == sorted(order):
        return None
    return np.argsort(_ints(order))


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _floats(model: CausalLM, values: Ints) -> Tensor:
    return _device(model, values.astype(np.float32))


def _device(model: CausalLM, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(model.device)


LONG = 4  # chunks in a row from which a single reader's stretch is a run of its own


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledChunk:
    """One request's share of a step: its next tokens, which follow its private states.

    position_ids ascend; a token sees the segments that start at or before it.
    """

    segments: tuple[Segment, ...]
    private: RequestKV
    token_ids: Sequence[int]
    position_ids: Sequence[int]
    wants_logits: bool = True


@dataclass(slots=True)
class SharedPrefixGroup:
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
class DecodeTail:
    """The last chunks of a request that decodes: its row, its private states, and the index of
    each of the chunks among the request's."""

    row: int
    private: BlockTable
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """rows: begin and end of each work's rows; squares: those of works with several new tokens."""

    rows: tuple[tuple[int, int], ...]
    runs: tuple[SharedPrefixGroup, ...]
    squares: tuple[tuple[int, int], ...]
    tails: tuple[DecodeTail, ...]


def lay_out(works: Sequence[ScheduledChunk], *, gapless: bool = False) -> Layout:
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
        decodes = len(work.token_ids) == 1 and isinstance(work.private, BlockTable)
        short: list[int] = []
        for stretch in _joined(work.private, owned, gapless, full_only=decodes):
            readers = stretch.readers
            if decodes and len(readers) == 1 and (gapless or len(stretch.chunks) < LONG):
                short += stretch.chunks
            elif readers[0] == index:
                runs.append(_private_run(stretch, [rows[reader] for reader in readers]))
        if decodes:
            assert isinstance(work.private, BlockTable)
            chunks = _with_next(work.private, short)
            tails.append(DecodeTail(rows[index][0], work.private, chunks))
    squares = tuple(
        rows[index]
        for index, work in enumerate(works)
        if len(work.token_ids) > 1 or not isinstance(work.private, BlockTable)
    )
    return Layout(tuple(rows), tuple(run for run in runs if run.readers), squares, tuple(tails))


def _segment_runs(
    works: Sequence[ScheduledChunk], rows: Sequence[tuple[int, int]]
) -> list[SharedPrefixGroup]:
    """Segments by the memory that they read, so that views of one module are one run."""
    runs: dict[tuple[int, int], SharedPrefixGroup] = {}
    for work, (begin, end) in zip(works, rows, strict=True):
        for segment in work.segments:
            states = segment.states
            place = (states.keys.data_ptr(), states.length)
            run = runs.setdefault(place, SharedPrefixGroup(states.keys, states.values))
            first = begin + bisect_left(work.position_ids, segment.start)
            run.add(first, end, segment.delta, segment.start)
    return list(runs.values())


@dataclass(frozen=True, slots=True)
class _Joined:
    """Neighboring stretches of one request with the same readers, as one. chunks: their indexes
    among the request's."""

    stretch: KVSpan
    chunks: tuple[int, ...]
    readers: tuple[int, ...]
    start: int


def _owned(works: Sequence[ScheduledChunk]) -> dict[tuple[int, int, int], list[int]]:
    """The works that read each stretch of private memory."""
    readers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, work in enumerate(works):
        for stretch in work.private.stretches():
            readers[stretch.place].append(index)
    return readers


def _joined(
    private: RequestKV,
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
        if full_only and isinstance(private, BlockTable) and length < private.pool.chunk:
            break
        pieces = _pieces(stretch, private.positions[at : at + length]) if gapless else [stretch]
        for piece in pieces:
            start = private.positions[at + piece.begin - stretch.begin]
            if current is not None and _follows(current, piece, who, start, gapless):
                whole = KVSpan(piece.keys, piece.values, current.stretch.begin, piece.end)
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
    current: _Joined, piece: KVSpan, who: tuple[int, ...], start: int, gapless: bool
) -> bool:
    length = current.stretch.end - current.stretch.begin
    in_place = current.stretch.end == piece.begin and current.readers == who
    return in_place and (not gapless or current.start + length == start)


def _pieces(stretch: KVSpan, positions: Sequence[int]) -> Iterator[KVSpan]:
    """The stretch, cut where its positions leave a gap."""
    begin = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            offset = stretch.begin
            yield KVSpan(stretch.keys, stretch.values, offset + begin, offset + at)
            begin = at


def _private_run(joined: _Joined, readers: Sequence[tuple[int, int]]) -> SharedPrefixGroup:
    stretch = joined.stretch
    run = SharedPrefixGroup(
        stretch.keys[:, :, stretch.begin : stretch.end],
        stretch.values[:, :, stretch.begin : stretch.end],
    )
    for first, end in readers:
        run.add(first, end, 0, joined.start)
    return run


def _with_next(private: BlockTable, chunks: Sequence[int]) -> tuple[int, ...]:
    """The chunks and the one that the step writes to."""
    return tuple(dict.fromkeys((*chunks, private.length // private.pool.chunk)))
