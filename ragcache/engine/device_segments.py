"""Which rows of a GPU's step read which segments.

The readers of a request's segments are computed once, at its admission. The ones of a decode batch
are kept from step to step, and change where a request joins or leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import numpy as np

from ragcache.attention.triton.array_plan import (
    ReadArrays,
    counted,
    rows_of,
    run_begins,
    run_lengths,
)
from ragcache.attention.triton.plan import (
    ALL_TOKENS,
    BASE_WIDTH,
    NO_SCALES,
    SCALES_WIDTH,
    Int32s,
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

_ROW, _START = 0, 3
"""Rows of `ReadArrays.entries`. The origin of a segment's base is its start."""

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
    bases: Ints
    """Number of each segment's base, [S]."""
    entries: Int32s
    """Entries of row 0, if it reads all segments (`ReadArrays.entries`), [4, S]."""
    last_start: int
    """Position from which a token sees all of them."""


class _DecodingSegments:
    """The segments of a decode batch.

    Attributes:
        bases: Number of each segment's base, [N].
        entries: Entry of each segment (`ReadArrays.entries`), [4, N].
        some_ahead: Whether some segments may start behind the tokens of their rows.
    """

    def __init__(self) -> None:
        self.bases: Ints = np.zeros(0, dtype=np.int64)
        self.entries: Int32s = np.zeros((4, 0), dtype=np.int32)
        self.some_ahead = False
        self._serials: Ints = self.bases  # serial numbers of the rows
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
        before, serials = self._serials, batch.serials
        self._serials, self._version = serials, batch.version
        stays, row = np.zeros(batch.rows, dtype=bool), np.full(len(before), -1)
        if len(before):
            at = before.searchsorted(serials)
            stays = before.take(at, mode="clip") == serials
            row[at[stays]] = stays.nonzero()[0]
        if (row != np.arange(len(row))).any():
            of = row[self.entries[_ROW]]
            kept = (of >= 0).nonzero()[0]
            self.bases, self.entries = self.bases[kept], self.entries.take(kept, axis=1)
            self.entries[_ROW] = of[kept]
        if not stays.all():
            self._join(batch, (~stays).nonzero()[0], segments_of)

    def _join(
        self,
        batch: DecodeBatch,
        rows: Ints,
        segments_of: Callable[[tuple[Segment, ...]], _Segments],
    ) -> None:
        """Add the segments of some rows."""
        contexts = (batch.sequences[row].request.context for row in rows.tolist())
        new = [segments_of(context.segments) for context in contexts]
        entries = np.concatenate([each.entries for each in new], axis=1)
        entries[_ROW] = rows.repeat([len(each.bases) for each in new])
        self.bases = np.concatenate([self.bases, *(each.bases for each in new)])
        self.entries = np.concatenate([self.entries, entries], axis=1)
        last_starts = ints([each.last_start for each in new])
        self.some_ahead = self.some_ahead or bool((last_starts > batch.position[rows]).any())


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
        batch, decoding = rows.decoding, self._decoding
        kept = {
            id(each.chunk.segments): self._segments_of(each.chunk.segments) for each in rows.placed
        }
        decoding.follow(batch, self._segments_of)
        self._known = kept
        bases, entries = decoding.bases, decoding.entries
        hidden = np.full(rows.rows, NEVER)
        if decoding.some_ahead:
            row, start = entries[_ROW], entries[_START]
            ahead = start > batch.position[row]
            decoding.some_ahead = bool(ahead.any())
            np.minimum.at(hidden, row[ahead], start[ahead])
            seen = (~ahead).nonzero()[0]
            bases, entries = bases[seen], entries.take(seen, axis=1)
        if rows.placed:
            every = [kept[id(each.chunk.segments)] for each in rows.placed]
            of_chunks = _entries_of_chunks(rows, every, hidden)
            bases = np.concatenate([bases, of_chunks[0]])
            entries = np.concatenate([entries, of_chunks[1]], axis=1)
        seen_from = hidden if (hidden < NEVER).any() else None
        return self._grouped(bases, entries), seen_from

    def _grouped(self, numbers: Ints, entries: Int32s) -> ReadArrays:
        """One read for each base, by the number of each entry's base."""
        if not len(numbers):
            return self._no_reads
        # stable sorting of 16 bits is a radix sort
        short = numbers.astype(np.uint16) if len(self._bases.table) < 2**16 else numbers
        order = short.argsort(kind="stable")
        numbers = numbers[order]
        begins = run_begins(numbers)
        bases, count = self._bases.table.take(numbers[begins], axis=0), len(begins)
        lengths, pool = run_lengths(begins, len(order)), self._no_reads
        return ReadArrays(
            np.concatenate([pool.bases, bases[:, _ADDRESSES:_SCALES]]),
            np.concatenate([pool.scales, bases[:, _SCALES:]]),
            rows_of(count, np.arange(1, count + 1), 0, bases[:, _TOKENS], lengths, ALL_TOKENS),
            entries.take(order, axis=1),
        )

    def _segments_of(self, segments: tuple[Segment, ...]) -> _Segments:
        """The readers of a request's segments, computed at most once in neighboring steps."""
        found = self._known.get(id(segments))
        if found is not None:
            return found
        numbers = ints([self._bases.of(each.states).number for each in segments])
        entries = np.array(
            [(0, each.delta, ALL_TOKENS, each.start) for each in segments], dtype=np.int32
        )
        last = max((segment.start for segment in segments), default=0)
        return _Segments(segments, numbers, entries.reshape(-1, 4).T, last)


def _entries_of_chunks(
    rows: StepRows, every: Sequence[_Segments], hidden: Ints
) -> tuple[Ints, Int32s]:
    """Return the number of the base of each entry of a step's chunks, and the entries.

    Changes `hidden` of last rows that do not see all segments.
    """
    sizes = [len(each.bases) for each in every]
    first, end = (
        each[rows.decoding.rows :].repeat(sizes) for each in (rows.first_row, rows.end_row)
    )
    at = 0
    for placed, segments, size in zip(rows.placed, every, sizes, strict=True):
        if placed.chunk.position_ids[0] < segments.last_start:
            _see_some(placed, segments.entries[_START], first[at : at + size], hidden)
        at += size
    counts = end - first
    entries = np.concatenate([each.entries for each in every], axis=1).repeat(counts, axis=1)
    entries[_ROW] = first.repeat(counts) + counted(counts)
    return np.concatenate([each.bases for each in every]).repeat(counts), entries


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
