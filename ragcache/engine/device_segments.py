"""Which rows of a GPU's step read which segments.

The readers of a request's segments are computed once, at its admission. The ones of a decode batch
are kept from step to step, and change where a request joins or leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import numpy as np

from ragcache.attention.triton.array_plan import ReadArrays, columns_of, run_begins, run_lengths
from ragcache.attention.triton.plan import (
    ALL_TOKENS,
    BASE_WIDTH,
    NO_SCALES,
    SCALES_WIDTH,
    KVBase,
    KVConsumer,
    KVRead,
    KVRun,
)
from ragcache.engine.batch import Ints
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_rows import PlacedChunk, StepRows, ints
from ragcache.engine.request import Segment
from ragcache.states.quantization import StoredStates

NEVER: Final = np.iinfo(np.int64).max
"""Position from which a row sees one more segment, if it sees all."""

_BASE, _DELTA, _START = range(3)
"""Rows of `_Segments.readers`: number of the base, distance and position of the segment."""

_TOKENS, _ADDRESSES, _SCALES = 0, 1, 1 + BASE_WIDTH
"""Columns of `_Bases.table`: tokens of the base, its addresses and strides, its scales."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _NumberedBase:
    """A base of segments, and its number, by which the reads of a step are grouped."""

    number: int
    base: KVBase


class _Bases:
    """The bases of states that live. Numbers are given again once all states in a memory are gone.

    Attributes:
        table: A row for each number, [N, 1 + `BASE_WIDTH` + `SCALES_WIDTH`].
    """

    def __init__(self) -> None:
        self._of_states = WeakKeyDictionary[StoredStates, _NumberedBase]()
        self._of_memory = WeakValueDictionary[tuple[int, int], _NumberedBase]()
        self._free: list[int] = []
        self.table: Ints = np.zeros((0, 1 + BASE_WIDTH + SCALES_WIDTH), dtype=np.int64)

    def of(self, states: StoredStates) -> _NumberedBase:
        """Return the base of some states. States in the same memory have one base."""
        found = self._of_states.get(states)
        if found is None:
            base = KVBase(states.keys, states.values, states.key_scales, states.value_scales)
            memory = (base.memory[0], base.tokens)
            found = self._of_memory.get(memory) or self._add(base)
            self._of_states[states] = self._of_memory[memory] = found
        return found

    def _add(self, base: KVBase) -> _NumberedBase:
        if not self._free:
            count = len(self.table)
            self.table = np.pad(self.table, ((0, max(64, count)), (0, 0)))
            self._free += reversed(range(count, len(self.table)))
        number = self._free.pop()
        self.table[number] = (base.tokens, *base.addresses, *(base.scales or NO_SCALES))
        added = _NumberedBase(number, base)
        finalize(added, self._free.append, number).atexit = False
        return added


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The segments of a request, which stay the same in all of its steps."""

    segments: tuple[Segment, ...]
    readers: Ints
    """[3, S]."""
    last_start: int
    """Position from which a token sees all of them."""


class _DecodingSegments:
    """The segments of a decode batch.

    Attributes:
        readers: As in `_Segments`, [3, N].
        row: Row that reads each segment, [N].
    """

    def __init__(self) -> None:
        self.readers: Ints = np.zeros((3, 0), dtype=np.int64)
        self.row: Ints = np.zeros(0, dtype=np.int64)
        self._owner: Ints = self.row  # serial number of the row
        self._last = 0  # serial number of the last row that has joined
        self._version = 0

    def follow(
        self, batch: DecodeBatch, segments_of: Callable[[tuple[Segment, ...]], _Segments]
    ) -> None:
        """Take over the present rows of a batch.

        Args:
            batch: The batch.
            segments_of: Returns the segments of a request that joins.
        """
        if batch.version == self._version:
            return
        serials, owner = batch.serials, self._owner
        row = serials.searchsorted(owner)
        stays = np.zeros(len(row), dtype=bool)
        if batch.rows:
            stays = serials[np.minimum(row, batch.rows - 1)] == owner
        if not stays.any():
            self._last = 0  # all rows that there are join
        if not stays.all():
            kept = stays.nonzero()[0]
            self.readers, row = self.readers.take(kept, axis=1), row[kept]
        joined = int(serials.searchsorted(self._last, side="right"))
        new = [segments_of(each.request.context.segments) for each in batch.sequences[joined:]]
        if new:
            readers = [each.readers for each in new]
            rows = np.arange(joined, batch.rows).repeat([each.shape[1] for each in readers])
            self.readers = np.concatenate([self.readers, *readers], axis=1)
            row, self._last = np.concatenate([row, rows]), int(serials[-1])
        self.row, self._owner, self._version = row, serials[row], batch.version


class SegmentPlanner:
    """Groups the segments of steps by memory, so that views of one module are one read.

    Args:
        pool: The pool of blocks, base 0 of all reads.
    """

    def __init__(self, pool: KVBase) -> None:
        self._no_reads = ReadArrays.of((), pool)
        self._bases = _Bases()
        self._known: dict[int, _Segments] = {}  # of the last step's chunks, by identity
        self._decoding = _DecodingSegments()

    def forget(self) -> None:
        """Let go of segments, which are kept from one step to the next."""
        self._known, self._decoding = {}, _DecodingSegments()

    def reads(self, placed: Sequence[PlacedChunk]) -> tuple[list[KVRead], Ints | None]:
        """Return the reads of a few chunks.

        Returns:
            The reads, and for each row the position from which it sees one more segment, if there
            is one. Only last rows of a chunk count.
        """
        by_memory: dict[tuple[int, int], KVRead] = {}
        by_states: dict[StoredStates, KVRead] = {}
        hidden: dict[int, int] = {}
        for each in placed:
            positions, first_row, end = each.chunk.position_ids, each.first_row, each.end_row
            begins_at, ends_at = positions[0], positions[-1]
            for segment in each.chunk.segments:
                states, start = segment.states, segment.start
                if start > ends_at:
                    hidden[end - 1] = min(start, hidden.get(end - 1, start))
                    continue
                read = by_states.get(states)
                if read is None:
                    base = self._bases.of(states).base
                    read = by_memory.setdefault(
                        (base.memory[0], base.tokens), KVRead(KVRun(base, 0, base.tokens))
                    )
                    by_states[states] = read
                first = first_row
                if start > begins_at:
                    first += bisect_left(positions, start)
                read.readers.append(KVConsumer(first, end, start - states.start, start))
        seen_from = None
        if hidden:
            seen_from = ints([hidden.get(row, NEVER) for row in range(placed[-1].end_row)])
        return list(by_memory.values()), seen_from

    def arrays(self, rows: StepRows) -> tuple[ReadArrays, Ints | None]:
        """Return the reads of many requests, otherwise as `reads`."""
        kept, batch, decoding = dict[int, _Segments](), rows.decoding, self._decoding
        for each in rows.placed:
            name = id(each.chunk.segments)
            kept[name] = self._segments_of(each.chunk.segments)
        decoding.follow(batch, self._segments_of)
        self._known = kept
        every = [kept[id(each.chunk.segments)] for each in rows.placed]
        readers = np.concatenate([decoding.readers, *(each.readers for each in every)], axis=1)
        counts = [decoding.readers.shape[1], *(each.readers.shape[1] for each in every)]
        ends = np.cumsum(counts).tolist()
        first_row = np.concatenate([decoding.row, rows.first_row[batch.rows :].repeat(counts[1:])])
        end_row = np.concatenate([decoding.row + 1, rows.end_row[batch.rows :].repeat(counts[1:])])
        hidden = np.full(rows.rows, NEVER)
        start = readers[_START]
        ahead = (start[: ends[0]] > batch.position[decoding.row]).nonzero()[0]
        np.minimum.at(hidden, decoding.row[ahead], start[ahead])
        first_row[ahead] += 1
        for placed, segments, (begin, end) in zip(rows.placed, every, pairwise(ends), strict=True):
            if placed.chunk.position_ids[0] < segments.last_start:
                _see_some(placed, start[begin:end], first_row[begin:end], hidden)
        seen_from = hidden if (hidden < NEVER).any() else None
        return self._grouped(readers, first_row, end_row), seen_from

    def _grouped(self, readers: Ints, first_row: Ints, end_row: Ints) -> ReadArrays:
        """One read for each base, by the segments that some rows see."""
        seen = first_row < end_row
        if not seen.all():
            readers, first_row, end_row = readers[:, seen], first_row[seen], end_row[seen]
        if not len(first_row):
            return self._no_reads
        number = readers[_BASE]
        # stable sorting of 16 bits is a radix sort
        short = number.astype(np.uint16) if len(self._bases.table) < 2**16 else number
        order = short.argsort(kind="stable")
        number = number[order]
        begins = run_begins(number)
        bases = self._bases.table[number[begins]]
        pool, numbers = self._no_reads, np.arange(1, len(begins) + 1)
        lengths = run_lengths(begins, len(order))
        return ReadArrays(
            np.concatenate([pool.bases, bases[:, _ADDRESSES:_SCALES]]),
            np.concatenate([pool.scales, bases[:, _SCALES:]]),
            columns_of(len(begins), numbers, 0, bases[:, _TOKENS], lengths),
            columns_of(
                len(order),
                first_row[order],
                end_row[order],
                readers[_DELTA][order],
                readers[_START][order],
                ALL_TOKENS,
            ),
        )

    def _segments_of(self, segments: tuple[Segment, ...]) -> _Segments:
        """The readers of a request's segments, computed at most once in neighboring steps."""
        found = self._known.get(id(segments))
        if found is not None:
            return found
        readers = [
            (self._bases.of(each.states).number, each.delta, each.start) for each in segments
        ]
        last = max((segment.start for segment in segments), default=0)
        return _Segments(segments, ints(readers).reshape(-1, 3).T, last)


def _see_some(placed: PlacedChunk, starts: Ints, first_row: Ints, hidden: Ints) -> None:
    """Let rows of a chunk see the segments that start at or before them only.

    Changes the first row of each segment, and `hidden` of the chunk's last row.
    """
    positions, end = placed.chunk.position_ids, placed.end_row
    for index, start in enumerate(starts.tolist()):
        if start > positions[-1]:
            hidden[end - 1] = min(start, hidden[end - 1])
            first_row[index] = end
        elif start > positions[0]:
            first_row[index] += bisect_left(positions, start)
