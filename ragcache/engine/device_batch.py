"""Batches for a GPU: which rows read which states, as attention tables.

There are two kinds of steps. In a `decode` step every request has one row and blocks of the pool.
Blocks that several requests share, and long runs of one request, are read as runs; the last blocks
of each request are its *tail*, read by the program that also writes the new keys and values. In a
`mixed` step any rows are allowed: new keys and values are written first, and everything is read as
runs, of which a row sees the tokens up to its own.

A decode step needs no new plan while the same requests go on (`DeviceBatch.advance`). Blocks of the
pool are base 0 of the tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ragcache.attention.triton.array_plan import ReadArrays, columns_of, plan_arrays
from ragcache.attention.triton.plan import (
    ALL_TOKENS,
    BASE_WIDTH,
    NO_SCALES,
    SCALES_WIDTH,
    AttentionPlan,
    HeadLayout,
    KVBase,
    KVConsumer,
    KVRead,
    KVRun,
    build_plan,
)
from ragcache.attention.triton.tables import AttentionTables, StepArrays
from ragcache.engine.batch import LONG_SPAN, ScheduledChunk
from ragcache.engine.kv_cache import BlockPool, BlockTable, ContiguousKV
from ragcache.engine.request import Segment
from ragcache.states.quantization import StoredStates

Ints = NDArray[np.int64]

_BlockRun = tuple[int, int, int, int, int]
"""First reader of a run of blocks, number and id of its first block, group of its readers, and
number of blocks."""

MAX_TAIL_BLOCKS: Final = 8
"""Maximum length of a tail, in blocks. One program reads it for a row and a head."""

MANY_ROWS: Final = 1024
"""Number of rows from which runs are cut into pieces of at least `LONG_PIECE` tokens."""

SHORT_PIECE, LONG_PIECE = 256, 1024

FEW_SEGMENTS: Final = 24
"""Segments of a step up to which they are planned one by one, which is then quicker."""


@dataclass(slots=True, eq=False)
class _PlacedChunk:
    """A chunk at its rows of the step."""

    chunk: ScheduledChunk
    first_row: int
    end_row: int
    past: int
    """Number of tokens before the new ones."""
    tokens: int
    """Number of tokens, with the new ones."""

    def position(self, token: int) -> int:
        if token < self.past:
            return self.chunk.private.positions[token]
        return self.chunk.position_ids[token - self.past]

    def gapless_parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Tokens begin:end, cut at gaps between their positions."""
        if self.position(end - 1) - self.position(begin) == end - 1 - begin:
            return [(begin, end)]  # positions ascend
        past = self.chunk.private.positions[begin:end]
        new = self.chunk.position_ids[max(0, begin - self.past) : max(0, end - self.past)]
        cuts = np.flatnonzero(np.diff(_ints([*past, *new])) != 1) + begin + 1
        edges = [begin, *cuts.tolist(), end]
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _NumberedBase:
    """A base of segments, and its number, by which the reads of a step are grouped."""

    number: int
    base: KVBase


_ROW: Final = 4 + BASE_WIDTH + SCALES_WIDTH
_DELTA, _START = _ROW - 2, _ROW - 1
"""Columns of `_Segments.rows`: number and tokens of the base, addresses and strides, scales, then
distance and position of the segment."""


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The segments of a request, which stay the same in all of its steps."""

    segments: tuple[Segment, ...]
    rows: Ints
    """[S, `_ROW`]."""
    last_start: int
    """Position from which a token sees all of them."""


@dataclass(slots=True, eq=False)
class _Continuation:
    """State that lets a decode step continue without a new plan."""

    private: Sequence[BlockTable]
    tail_begins: Ints
    """Index of each tail's first block in its table."""
    hidden_from: Ints | None
    """Position from which each row sees one more segment, if any."""


class DeviceBatch:
    """A step, `decode` or `mixed`, whose plan and rows are laid out in tables.

    Its chunks keep the states alive that it reads.
    """

    def __init__(
        self,
        kind: Literal["decode", "mixed"],
        rows: int,
        logits: int,
        plan: AttentionPlan,
        step: StepArrays,
        continuation: _Continuation | None,
    ) -> None:
        self.kind, self.rows, self.logits = kind, rows, logits
        self.plan = plan
        self._step, self._continuation = step, continuation

    def advance(self) -> bool:
        """Move every row on by one token, known to the device only. Returns False, and changes
        nothing, if that needs a new plan."""
        going_on = self._continuation
        if going_on is None:
            return False
        size = going_on.private[0].pool.block_size
        length, position = (
            a[: self.rows] for a in (self._step.tail_length, self._step.position_ids)
        )
        if length.max() + 1 >= MAX_TAIL_BLOCKS * size:
            return False
        if going_on.hidden_from is not None and (position + 1 >= going_on.hidden_from).any():
            return False
        length += 1
        position += 1
        # A full block may turn out to equal one of the radix cache, and is then replaced by it.
        # Where a step is launched before the last one has ended, that shows one step late.
        for row in np.flatnonzero(length % size < 2).tolist():
            begin = int(going_on.tail_begins[row])
            blocks = going_on.private[row].block_ids[begin : begin + int(length[row]) // size + 1]
            self._step.pages[row, : len(blocks)] = blocks
        return True


class DevicePlanner:
    """Plans the steps of one model and pool.

    `gapless`: positions within a run, and from a tail to its row, must be consecutive, as ALiBi and
    sliding windows need. `programs` and `block_rows` go to `build_plan`.
    """

    def __init__(
        self,
        pool: BlockPool,
        heads: HeadLayout,
        *,
        gapless: bool = False,
        programs: int = 264,
        block_rows: int = 64,
    ) -> None:
        self.pool, self.heads, self.gapless = pool, heads, gapless
        self._pool_base = KVBase(pool.keys, pool.values)
        self._no_reads = ReadArrays.of((), self._pool_base)
        self._bases = WeakKeyDictionary[StoredStates, _NumberedBase]()
        self._by_memory = WeakValueDictionary[tuple[int, int], _NumberedBase]()
        self._numbers = count()
        self._segments: dict[int, _Segments] = {}  # of the last step, by identity
        self.programs, self.block_rows = programs, block_rows

    def plan_batch(self, chunks: Sequence[ScheduledChunk], tables: AttentionTables) -> DeviceBatch:
        """Set the plan of a step and fill its arrays, which are then to be uploaded. Raises
        `TableOverflow`, and changes nothing, if the tables are too small."""
        placed = _place(chunks)
        rows = placed[-1].end_row
        options: dict[str, Any] = {
            "rows": rows,
            "heads": self.heads,
            "capacity": tables.capacity,
            "programs": self.programs,
            "block_rows": self.block_rows,
            "min_keys": LONG_PIECE if rows >= MANY_ROWS else SHORT_PIECE,
        }
        if sum(len(chunk.segments) for chunk in chunks) <= FEW_SEGMENTS:
            reads, hidden = self._segment_reads(placed)
            tails = self._decode_reads(placed, reads)
            if tails is None:
                self._mixed_reads(placed, reads, arrays=False)
            plan = build_plan(reads, pool=self._pool_base, **options)
        else:
            arrays, hidden = self._segment_arrays(placed)
            reads = []
            tails = self._decode_reads(placed, reads)
            own = None if tails is not None else self._mixed_reads(placed, reads)
            if reads:
                arrays = arrays.followed_by(ReadArrays.of(reads, self._pool_base))
            if own is not None:
                arrays = arrays.followed_by(own)
            plan = plan_arrays(arrays, **options)
        tables.set_plan(plan)
        tables.begin_step(rows)
        step = tables.step
        logits = _put_rows(step, placed)
        if tails is None:
            self._put_writes(step, placed, plan)
            return DeviceBatch("mixed", rows, logits, plan, step, None)
        private = [each.chunk.private for each in placed]
        tables_of_blocks = [each for each in private if isinstance(each, BlockTable)]
        self._put_tails(step, tables_of_blocks, tails)
        continuation = _Continuation(tables_of_blocks, tails, _hidden_from(hidden, rows))
        return DeviceBatch("decode", rows, logits, plan, step, continuation)

    def forget(self) -> None:
        """Let go of segments, which are kept from one step to the next."""
        self._segments = {}

    def _segment_reads(self, placed: Sequence[_PlacedChunk]) -> tuple[list[KVRead], dict[int, int]]:
        """Group segments by memory, so that views of one module are one read.

        Also returns, by row, the start of the first segment that the last row of a chunk does not
        see.
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
                    base = self._base(states).base
                    read = by_memory.setdefault(
                        (base.memory[0], base.tokens), KVRead(KVRun(base, 0, base.tokens))
                    )
                    by_states[states] = read
                first = first_row
                if start > begins_at:
                    first += bisect_left(positions, start)
                read.readers.append(KVConsumer(first, end, start - states.start, start))
        return list(by_memory.values()), hidden

    def _segment_arrays(self, placed: Sequence[_PlacedChunk]) -> tuple[ReadArrays, dict[int, int]]:
        """The same as `_segment_reads`, for many segments. The pool is base 0."""
        known, kept = self._segments, dict[int, _Segments]()
        for each in placed:
            name = id(each.chunk.segments)
            kept[name] = known.get(name) or self._arrays_of(each.chunk.segments)
        self._segments = kept
        pool = self._no_reads
        every = [kept[id(each.chunk.segments)] for each in placed]
        counts = [len(each.rows) for each in every]
        if not any(counts):
            return pool, {}
        rows = np.concatenate([each.rows for each in every])
        first_row = np.repeat([each.first_row for each in placed], counts)
        end_row = np.repeat([each.end_row for each in placed], counts)
        hidden: dict[int, int] = {}
        at = 0
        for each, segments, number in zip(placed, every, counts, strict=True):
            if each.chunk.position_ids[0] < segments.last_start:
                here = slice(at, at + number)
                hidden |= _see_some(each, segments, first_row[here])
            at += number
        if hidden:
            seen = np.flatnonzero(first_row < end_row)
            rows, first_row, end_row = rows[seen], first_row[seen], end_row[seen]
        order = rows[:, 0].argsort(kind="stable")
        rows = rows[order]
        begins = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
        bases = rows[begins]
        delta, start = rows[:, _DELTA], rows[:, _START]
        numbers, counted = np.arange(1, len(bases) + 1), np.diff(begins, append=len(rows))
        reads = ReadArrays(
            np.concatenate([pool.bases, bases[:, 2 : 2 + BASE_WIDTH]]),
            np.concatenate([pool.scales, bases[:, 2 + BASE_WIDTH : _DELTA]]),
            columns_of(len(bases), numbers, 0, bases[:, 1], counted),
            columns_of(len(rows), first_row[order], end_row[order], delta, start, ALL_TOKENS),
        )
        return reads, hidden

    def _arrays_of(self, segments: tuple[Segment, ...]) -> _Segments:
        rows = []
        for segment in segments:
            numbered = self._base(segment.states)
            base = numbered.base
            rows.append(
                (
                    numbered.number,
                    base.tokens,
                    *base.addresses,
                    *(base.scales or NO_SCALES),
                    segment.delta,
                    segment.start,
                )
            )
        last = max((segment.start for segment in segments), default=0)
        return _Segments(segments, np.array(rows, dtype=np.int64).reshape(-1, _ROW), last)

    def _base(self, states: StoredStates) -> _NumberedBase:
        """Base of some states, kept as long as the states, since most steps share it with earlier
        ones. States in the same memory have one base."""
        found = self._bases.get(states)
        if found is None:
            base = KVBase(states.keys, states.values, states.key_scales, states.value_scales)
            memory = (base.memory[0], base.tokens)
            found = self._by_memory.get(memory) or _NumberedBase(next(self._numbers), base)
            self._bases[states] = self._by_memory[memory] = found
        return found

    def _decode_reads(self, placed: Sequence[_PlacedChunk], reads: list[KVRead]) -> Ints | None:
        """Append the reads before the tails. Returns the first block of each tail, unless the step
        is a mixed one."""
        if any(each.tokens - each.past != 1 for each in placed):
            return None
        if not all(isinstance(each.chunk.private, BlockTable) for each in placed):
            return None
        size = self.pool.block_size
        past = _ints([each.past for each in placed])
        blocks = _blocks_of(placed, past // size)
        uses = None if _all_differ(blocks) else _BlockUses.of(blocks)
        tails = np.zeros_like(past) if uses is None else uses.shared_until(len(placed))
        # the last block, where it is just full, may yet be replaced: see `DeviceBatch.advance`
        settled = np.maximum(tails, np.maximum(past - 1, 0) // size)
        tails = np.where(past // size - tails >= LONG_SPAN, settled, tails)
        for index, each in enumerate(placed if self.gapless else ()):
            begin = self._gapless_tail(each, int(tails[index]), int(settled[index]))
            if begin is None:
                return None
            tails[index] = begin
        if uses is None:
            blocks = [ids[:count] for ids, count in zip(blocks, tails.tolist(), strict=True)]
            self._append_runs(placed, _own_runs(blocks), (), reads)
        else:
            self._append_runs(
                placed, uses.runs(uses.number < tails[uses.owner]), uses.readers, reads
            )
        return tails

    def _gapless_tail(self, placed: _PlacedChunk, *blocks: int) -> int | None:
        """The first of these blocks from which positions have no gap."""
        size, past = self.pool.block_size, placed.past
        for block in blocks:
            if placed.position(past) - placed.position(block * size) == past - block * size:
                return block
        return None

    def _mixed_reads(
        self, placed: Sequence[_PlacedChunk], reads: list[KVRead], *, arrays: bool = True
    ) -> ReadArrays | None:
        """Append the reads of private states, with the new tokens, or return them as arrays."""
        with_blocks = []
        for each in placed:
            private = each.chunk.private
            if isinstance(private, ContiguousKV):
                base = KVBase(private.keys, private.values)
                self._append_parts(base, 0, each, (0, each.tokens), [each], reads)
            else:
                with_blocks.append(each)
        size = self.pool.block_size
        blocks = _blocks_of(with_blocks, [-(-each.tokens // size) for each in with_blocks])
        if not _all_differ(blocks):
            uses = _BlockUses.of(blocks)
            kept = np.ones(len(uses.owner), dtype=bool)
            self._append_runs(with_blocks, uses.runs(kept), uses.readers, reads)
        elif self.gapless or not (arrays and blocks):
            self._append_runs(with_blocks, _own_runs(blocks), (), reads)
        else:
            return self._own_reads(with_blocks, blocks)
        return None

    def _own_reads(
        self, placed: Sequence[_PlacedChunk], blocks: Sequence[Sequence[int]]
    ) -> ReadArrays:
        """Reads of blocks that no two requests share, whose positions may have gaps."""
        size, counts = self.pool.block_size, _ints([len(each) for each in blocks])
        block_id = np.fromiter(chain.from_iterable(blocks), np.int64, int(counts.sum()))
        owner = np.arange(len(blocks)).repeat(counts)
        number = np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)
        starts = np.ones(len(owner), dtype=bool)
        starts[1:] = (np.diff(block_id) != 1) | (np.diff(owner) != 0)
        first = np.flatnonzero(starts)
        length = np.diff(first, append=len(owner))
        who = owner[first]
        sizes = np.array([(p.first_row, p.end_row, p.past, p.tokens) for p in placed])
        first_row, end_row, past, tokens = sizes[who].T
        begin = number[first] * size
        end = np.minimum(begin + length * size, tokens)
        at = block_id[first] * size
        pairs = zip(who.tolist(), begin.tolist(), strict=True)
        origin = _ints([placed[index].position(token) for index, token in pairs]) - at
        limit = np.where(end <= past + 1, ALL_TOKENS, at + past + 1 - begin)
        runs = columns_of(len(at), 0, at, at + end - begin, 1)
        readers = columns_of(len(at), first_row, end_row, 0, origin, limit)
        return self._no_reads._replace(runs=runs, readers=readers)

    def _append_runs(
        self,
        placed: Sequence[_PlacedChunk],
        runs: Iterable[_BlockRun],
        groups: Sequence[Sequence[int]],
        reads: list[KVRead],
    ) -> None:
        size = self.pool.block_size
        for owner, number, block_id, group, length in runs:
            own = placed[owner]
            readers = [own]
            if group >= len(placed):
                readers = [placed[reader] for reader in groups[group - len(placed)]]
            tokens = (number * size, min((number + length) * size, own.tokens))
            self._append_parts(self._pool_base, block_id * size, own, tokens, readers, reads)

    def _append_parts(
        self,
        base: KVBase,
        begin: int,
        own: _PlacedChunk,
        tokens: tuple[int, int],
        readers: Sequence[_PlacedChunk],
        reads: list[KVRead],
    ) -> None:
        """Append reads of `own`'s tokens, which are contiguous from the base's token `begin` on."""
        parts = own.gapless_parts(*tokens) if self.gapless else [tokens]
        for first, end in parts:
            at = begin + first - tokens[0]
            origin = own.position(first) - at
            limit = ALL_TOKENS if end <= own.past + 1 else at + own.past + 1 - first
            run = KVRun(base, at, at + end - first)
            who = [KVConsumer(each.first_row, each.end_row, 0, origin, limit) for each in readers]
            reads.append(KVRead(run, who))

    def _put_tails(self, step: StepArrays, private: Sequence[BlockTable], tails: Ints) -> None:
        size, rows = self.pool.block_size, len(private)
        assert step.pages.shape[1] >= MAX_TAIL_BLOCKS
        length = _ints([each.length for each in private])
        counts = length // size + 1 - tails
        ends, begins = (tails + counts).tolist(), tails.tolist()
        ids = [
            each.block_ids[begin:end]
            for each, begin, end in zip(private, begins, ends, strict=True)
        ]
        columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        step.pages[np.repeat(np.arange(rows), counts), columns] = _ints([*chain.from_iterable(ids)])
        step.tail_length[:rows] = length - tails * size

    def _put_writes(
        self, step: StepArrays, placed: Sequence[_PlacedChunk], plan: AttentionPlan
    ) -> None:
        size, slots = self.pool.block_size, list[range]()
        step.write_base[: placed[-1].end_row] = 0
        for each in placed:
            private = each.chunk.private
            if isinstance(private, ContiguousKV):
                assert each.tokens <= private.keys.shape[2]
                base = plan.base_number(private.keys, private.values)
                step.write_base[each.first_row : each.end_row] = base
                slots.append(range(each.past, each.tokens))
                continue
            assert each.tokens <= private.capacity
            if each.tokens == each.past + 1:
                slot = private.block_ids[each.past // size] * size + each.past % size
                slots.append(range(slot, slot + 1))
                continue
            for number in range(each.past // size, -(-each.tokens // size)):
                first, moved = number * size, (private.block_ids[number] - number) * size
                begin, end = max(first, each.past), min(first + size, each.tokens)
                slots.append(range(begin + moved, end + moved))
        rows = placed[-1].end_row
        step.write_slot[:rows] = np.fromiter(chain.from_iterable(slots), np.int32, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockUses:
    """The blocks of some tables, table after table, with their readers."""

    owner: Ints
    """Table of each block."""
    number: Ints
    """Index of each block in its table."""
    block_id: Ints
    group: Ints
    """Equal for blocks with the same readers: the owner's number for a single reader, else the
    number of tables and above."""
    leads: NDArray[np.bool_]
    """Whether the owner is the first reader."""
    readers: Sequence[Sequence[int]]
    """The tables of each group with several readers."""

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> _BlockUses:
        """Group the blocks of each table (`ids`)."""
        tables, counts = len(ids), _ints([len(each) for each in ids])
        block_id = _ints([*chain.from_iterable(ids)])
        owner = np.repeat(np.arange(tables), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.argsort(block_id, kind="stable")
        first = np.flatnonzero(np.diff(block_id[order], prepend=-1))
        uses = np.diff(first, append=len(order))
        group = owner[order[first]]
        groups: dict[tuple[int, ...], int] = {}
        for at in np.flatnonzero(uses > 1).tolist():
            readers = tuple(owner[order[first[at] : first[at] + uses[at]]].tolist())
            group[at] = groups.setdefault(readers, tables + len(groups))
        leads = np.zeros(len(owner), dtype=bool)
        leads[order[first]] = True
        group_of = np.empty_like(owner)
        group_of[order] = np.repeat(group, uses)
        return cls(owner, number, block_id, group_of, leads, list(groups))

    def shared_until(self, tables: int) -> Ints:
        """Number of blocks up to the last shared one, for each table."""
        until = np.zeros(tables, dtype=np.int64)
        shared = self.group >= tables
        np.maximum.at(until, self.owner[shared], self.number[shared] + 1)
        return until

    def runs(self, kept: NDArray[np.bool_]) -> Iterator[_BlockRun]:
        """Runs of neighboring blocks with the same readers."""
        at = np.flatnonzero(kept & self.leads)
        table = np.stack([self.owner, self.number, self.block_id, self.group])[:, at]
        if not len(at):
            return iter(())
        steps = np.diff(table, axis=1) != np.asarray([[0], [1], [1], [0]])
        first = np.concatenate([[0], np.flatnonzero(steps.any(axis=0)) + 1])
        counts = np.diff(first, append=len(at))
        return zip(*table[:, first].tolist(), counts.tolist(), strict=True)


def _blocks_of(placed: Sequence[_PlacedChunk], counts: Iterable[int]) -> list[list[int]]:
    """The first `counts` blocks of each table."""
    tables = [each.chunk.private for each in placed]
    return [
        table.block_ids[:count]
        for table, count in zip(tables, counts, strict=True)
        if isinstance(table, BlockTable)
    ]


def _all_differ(blocks: Sequence[Sequence[int]]) -> bool:
    """Whether no block is in two tables."""
    return len(set().union(*blocks)) == sum(map(len, blocks))


def _own_runs(blocks: Sequence[Sequence[int]]) -> Iterator[_BlockRun]:
    """The runs of `_BlockUses.runs` if all blocks differ."""
    for owner, ids in enumerate(blocks):
        first = 0
        for number in range(1, len(ids) + 1):
            if number == len(ids) or ids[number] != ids[number - 1] + 1:
                yield owner, first, ids[first], owner, number - first
                first = number


def _place(chunks: Sequence[ScheduledChunk]) -> list[_PlacedChunk]:
    placed, row = [], 0
    for chunk in chunks:
        past, new = chunk.private.length, len(chunk.position_ids)
        placed.append(_PlacedChunk(chunk, row, row + new, past, past + new))
        row += new
    return placed


def _see_some(placed: _PlacedChunk, segments: _Segments, first_row: Ints) -> dict[int, int]:
    """Let rows of a chunk see the segments that start at or before them only: changes the first row
    of each segment.

    Returns the start of the first segment that the last row does not see, by the row.
    """
    positions, end, hidden = placed.chunk.position_ids, placed.end_row, dict[int, int]()
    for index, segment in enumerate(segments.segments):
        start = segment.start
        if start > positions[-1]:
            hidden[end - 1] = min(start, hidden.get(end - 1, start))
            first_row[index] = end
        elif start > positions[0]:
            first_row[index] += bisect_left(positions, start)
    return hidden


def _hidden_from(hidden: dict[int, int], rows: int) -> Ints | None:
    if not hidden:
        return None
    return _ints([hidden.get(row, np.iinfo(np.int64).max) for row in range(rows)])


def _put_rows(step: StepArrays, placed: Sequence[_PlacedChunk]) -> int:
    """Fill tokens, positions and the rows whose logits are wanted. Returns the number of these."""
    rows = placed[-1].end_row
    chunks = [each.chunk for each in placed]
    positions = chain.from_iterable(chunk.position_ids for chunk in chunks)
    step.position_ids[:rows] = np.fromiter(positions, np.int64, rows)
    tokens = chain.from_iterable(chunk.token_ids for chunk in chunks)
    step.token_ids[:rows] = np.fromiter(tokens, np.int64, rows)
    wanted = [row for each in placed for row in each.chunk.logit_rows(each.end_row)]
    step.logit_rows[: len(wanted)] = wanted
    return len(wanted)


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
