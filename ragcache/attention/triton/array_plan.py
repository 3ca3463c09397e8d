"""Plans of steps with many requests, computed on arrays of reads and readers. Pure numpy.

`plan_arrays` makes the same plan as `ragcache.attention.triton.plan.build_plan`, whose loops are
quicker for the reads of a few requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ragcache.attention.triton.plan import (
    ALL_TOKENS,
    ITEM_WIDTH,
    PIECE_TOKENS,
    AttentionPlan,
    Bases,
    HeadLayout,
    Int32s,
    Int64s,
    KVBase,
    KVRead,
    TableCapacity,
)


class ReadArrays(NamedTuple):
    """Reads of a step as arrays, read after read.

    bases [B, 4]: addresses and strides. scales [B, 6]: the same of scales, zeros without them.
    runs [N, 4]: base, begin, end, and number of readers. readers [M, 5]: fields of `KVConsumer`.
    """

    bases: Int64s
    scales: Int64s
    runs: Int64s
    readers: Int64s

    @classmethod
    def of(cls, reads: Sequence[KVRead], pool: KVBase | None = None) -> ReadArrays:
        """The arrays of some reads. `pool` becomes base 0."""
        bases = Bases()
        if pool is not None:
            bases.number(pool)
        runs = [(bases.number(r.run.base), r.run.begin, r.run.end, len(r.readers)) for r in reads]
        readers = [reader for read in reads for reader in read.readers]
        return cls(
            bases.addresses(),
            bases.scales(),
            np.array(runs, dtype=np.int64).reshape(-1, 4),
            np.array(readers, dtype=np.int64).reshape(-1, 5),
        )

    def followed_by(self, others: ReadArrays) -> ReadArrays:
        """These reads and others, over the bases of both. Both begin with the same base."""
        runs = others.runs.copy()
        runs[:, 0] += np.where(runs[:, 0] > 0, len(self.bases) - 1, 0)
        return ReadArrays(
            np.concatenate([self.bases, others.bases[1:]]),
            np.concatenate([self.scales, others.scales[1:]]),
            np.concatenate([self.runs, runs]),
            np.concatenate([self.readers, others.readers]),
        )


def columns_of(length: int, *columns: Int64s | int) -> Int64s:
    """Arrays and numbers as the columns of an array [length, columns]."""
    table = np.empty((length, len(columns)), dtype=np.int64)
    for number, column in enumerate(columns):
        table[:, number] = column
    return table


def run_begins(*columns: Int64s) -> Int64s:
    """Places at which a run of equal values begins, in columns of one length."""
    begins = np.ones(len(columns[0]), dtype=bool)
    begins[1:] = False
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins.nonzero()[0]


def run_lengths(begins: Int64s, total: int) -> Int64s:
    """Lengths of the runs that begin there, of `total` values."""
    lengths = np.empty_like(begins)
    lengths[:-1] = begins[1:] - begins[:-1]
    lengths[-1:] = total - begins[-1:]
    return lengths


def plan_arrays(
    reads: ReadArrays,
    *,
    rows: int,
    heads: HeadLayout,
    capacity: TableCapacity,
    programs: int = 264,
    block_rows: int = 64,
    min_keys: int = 256,
) -> AttentionPlan:
    """Cuts reads into work items as `build_plan` does. Quick for the reads of many requests."""
    asked, ends = _asked_entries(reads)
    size = max(1, block_rows // heads.group)
    blocks = _entry_blocks(reads, asked, ends, size)
    cut = _Cut.of(blocks, heads.num_kv_heads, programs, min_keys, capacity, size)
    capacity.check_room(rows, len(reads.bases), cut.items, cut.entries)
    items, sources = _items(blocks, cut.tokens, size)
    entries = asked.take(sources, axis=1)
    row = entries[0]
    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=rows), out=row_ptr[1:])
    quantized = int(items[:, 5].sum())
    return AttentionPlan(
        rows=rows,
        plain_items=len(items) - quantized,
        quantized_items=quantized,
        bases=reads.bases,
        scales=reads.scales,
        items=items,
        entry_fields=entries,
        row_ptr=row_ptr,
        # stable sorting of 16 bits is a radix sort
        row_entries=(row.astype(np.uint16) if rows < 2**16 else row).argsort(kind="stable"),
    )


def _asked_entries(reads: ReadArrays) -> tuple[Int32s, Int64s]:
    """One entry [row, delta, limit, origin] for every row that reads a run, read after read, before
    any run is cut: [4, N]. Also returns where the entries of each read end."""
    fields = reads.readers.T.astype(np.int32)
    counts = fields[1] - fields[0]
    ends = counts.cumsum()
    asked = fields[[0, 2, 4, 3]].repeat(counts, axis=1)
    within = np.arange(asked.shape[1], dtype=np.int32)
    within -= (ends - counts).astype(np.int32).repeat(counts)
    asked[0] += within
    limits = asked[2]
    limits += within
    np.minimum(limits, ALL_TOKENS, out=limits)
    totals = np.zeros(len(ends) + 1, dtype=np.int64)
    totals[1:] = ends
    return asked, totals[reads.runs[:, 3].cumsum()]


_BLOCK_FIELDS: Final = 6
"""Rows of the array of entry blocks [6, N]. A column is the entries first:end of one read, in
blocks that see its tokens begin:begin + length: quantized, base, begin, length, first, end."""


def _entry_blocks(reads: ReadArrays, asked: Int32s, ends: Int64s, size: int) -> Int64s:
    """All entries. Blocks of rows that do not see the whole run are cut short, each for itself."""
    base, begin, end, _ = reads.runs.T
    first = np.zeros_like(ends)
    first[1:] = ends[:-1]
    quantized = (reads.scales[:, 0] != 0)[base] if len(base) else base
    blocks = columns_of(len(base), quantized, base, begin, end - begin, first, ends).T
    seen = np.full(len(ends), ALL_TOKENS)
    read = first < ends
    if read.any():
        # entries of reads follow each other: those before a read without any are the last ones'
        seen[read] = np.minimum.reduceat(asked[2], first[read])
    cut_short = np.flatnonzero(read & (seen < end))
    keep = read & (seen >= end) & (end > begin)
    if not len(cut_short):
        return blocks if keep.all() else blocks[:, keep]
    parts, numbers = [], []
    for number in cut_short.tolist():
        scaled, of, at, length, a, b = blocks[:, number].tolist()
        for edge in range(a, b, size):
            until = min(edge + size, b)
            left = min(length, int(asked[2, edge:until].max()) - at)
            if left > 0:
                parts.append((scaled, of, at, left, edge, until))
                numbers.append(number)
    whole = np.flatnonzero(keep)
    cut = np.array(parts, dtype=np.int64).reshape(-1, _BLOCK_FIELDS).T
    order = np.concatenate([whole, np.array(numbers, dtype=np.int64)]).argsort(kind="stable")
    return np.concatenate([blocks[:, whole], cut], axis=1)[:, order]


class _Cut(NamedTuple):
    """How many tokens the pieces of each read have, and how many items and entries that makes."""

    tokens: Int64s
    items: int
    entries: int

    @classmethod
    def of(
        cls,
        blocks: Int64s,
        kv_heads: int,
        programs: int,
        min_keys: int,
        capacity: TableCapacity,
        block_size: int,
    ) -> _Cut:
        """Pieces of about equal length, as many as fit the tables."""
        quantized, _, _, length, first, end = blocks
        entries = end - first
        count = -(-entries // block_size)
        keys = length * count
        eight_bits = int(keys @ quantized)  # of runs in eight bits, and of all others
        work = (int(keys.sum()) - eight_bits, eight_bits)
        targets = [max(min_keys, -(-each * kv_heads // programs)) for each in work]
        while True:
            target = np.where(quantized, targets[1], targets[0]) if eight_bits else targets[0]
            number = np.maximum(1, (length / target + 0.5).astype(np.int64))
            tokens = -(-length // (number * PIECE_TOKENS)) * PIECE_TOKENS
            number = -(-length // tokens)
            cut = cls(tokens, int(number @ count), int(number @ entries))
            fits = cut.items <= capacity.items and cut.entries <= capacity.entries
            if fits or not (number > 1).any():
                return cut
            targets = [2 * each for each in targets]


def _items(blocks: Int64s, tokens: Int64s, size: int) -> tuple[Int32s, Int64s]:
    """The fields of all items [N, 8] in the order in which they run, and which of the entries asked
    are theirs, one after another."""
    number = -(-blocks[3] // tokens)
    block = np.arange(len(number)).repeat(number)
    place = _counted(number)
    skipped = place * tokens[block]
    quantized, base, begin, length, first, end = blocks[:, block]
    length = np.minimum(tokens[block], length - skipped)
    # plain ones first, then long ones; blocks that read the same tokens are neighbors
    order = np.lexsort((block, skipped, -length, quantized))
    fields = columns_of(len(block), quantized, base, begin + skipped, length, first, end - first)
    quantized, base, begin, length, first, entries = fields.take(order, axis=0).T
    counts = -(-entries // size)
    items = np.zeros((int(counts.sum()), ITEM_WIDTH), dtype=np.int32)
    within = size * _counted(counts)
    starts = (entries.cumsum() - entries).repeat(counts)
    items[:, 0] = base.repeat(counts)
    items[:, 1] = begin.repeat(counts)
    items[:, 2] = (begin + length).repeat(counts)
    items[:, 3] = starts + within
    items[:, 4] = np.minimum(size, entries.repeat(counts) - within)
    items[:, 5] = quantized.repeat(counts)
    return items, first.repeat(entries) + _counted(entries)


def _counted(counts: Int64s) -> Int64s:
    """0, 1, ... for each count, one after another."""
    return np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
