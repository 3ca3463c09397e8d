"""Plans of steps with many requests, computed on arrays of reads and readers. Pure numpy.

`plan_arrays` makes the same plan as `ragcache.attention.triton.plan.build_plan`, whose loops are
quicker for the reads of a few requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    KVConsumer,
    KVRead,
    TableCapacity,
    entries_by_row,
)


class ReadArrays(NamedTuple):
    """Reads of a step as arrays, read after read.

    bases [B, 4]: addresses and strides. scales [B, 6]: the same of scales, zeros without them.
    runs [5, N]: base, begin, end, number of entries, and the least of their limits. entries [4, M]:
    row, delta, limit and origin of each row that reads a run (see `KVConsumer`).
    """

    bases: Int64s
    scales: Int64s
    runs: Int64s
    entries: Int32s

    @classmethod
    def of(cls, reads: Sequence[KVRead], pool: KVBase | None = None) -> ReadArrays:
        """The arrays of some reads. `pool` becomes base 0."""
        bases = Bases()
        if pool is not None:
            bases.number(pool)
        runs = [
            (
                bases.number(read.run.base),
                read.run.begin,
                read.run.end,
                sum(each.end_row - each.first_row for each in read.readers),
                min((each.limit for each in read.readers), default=ALL_TOKENS),
            )
            for read in reads
        ]
        readers = [reader for read in reads for reader in read.readers]
        return cls(
            bases.addresses(),
            bases.scales(),
            np.array(runs, dtype=np.int64).reshape(-1, 5).T,
            entries_of(readers),
        )

    def followed_by(self, others: ReadArrays) -> ReadArrays:
        """These reads and others, over the bases of both. Both begin with the same base."""
        runs, bases, scales = others.runs, self.bases, self.scales
        if not runs.shape[1]:
            return self
        if len(others.bases) > 1:
            runs = runs.copy()
            runs[0] += np.where(runs[0] > 0, len(bases) - 1, 0)
            bases = np.concatenate([bases, others.bases[1:]])
            scales = np.concatenate([scales, others.scales[1:]])
        return ReadArrays(
            bases,
            scales,
            np.concatenate([self.runs, runs], axis=1),
            np.concatenate([self.entries, others.entries], axis=1),
        )


def entries_of(readers: Sequence[KVConsumer] | Int64s) -> Int32s:
    """One entry for every row of some readers, [4, M]."""
    first, end, delta, origin, limit = np.asarray(readers, dtype=np.int64).reshape(-1, 5).T
    counts = end - first
    within = counted(counts)
    entries = np.empty((4, len(within)), dtype=np.int32)
    entries[0] = first.repeat(counts) + within
    entries[1] = delta.repeat(counts)
    entries[2] = np.minimum(limit.repeat(counts) + within, ALL_TOKENS)
    entries[3] = origin.repeat(counts)
    return entries


def rows_of(length: int, *values: Int64s | int) -> Int64s:
    """Arrays and numbers as the rows of an array [values, length]."""
    table = np.empty((len(values), length), dtype=np.int64)
    for number, value in enumerate(values):
        table[number] = value
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


def counted(counts: Int64s) -> Int64s:
    """0, 1, ... for each count, one after another."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - (ends - counts).repeat(counts)


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
    size = max(1, block_rows // heads.group)
    blocks = _entry_blocks(reads, size)
    cut = _Cut.of(blocks, heads.num_kv_heads, programs, min_keys, capacity, size)
    capacity.check_room(rows, len(reads.bases), cut.items, cut.entries)
    items, sources = _items(blocks, cut, size)
    entries = reads.entries.take(sources, axis=1)
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
        row_entries=entries_by_row(row, rows),
    )


def _entry_blocks(reads: ReadArrays, size: int) -> Int64s:
    """All entries. Blocks of rows that do not see the whole run are cut short, each for itself.

    Returns:
        Entry blocks, [6, N]. A column is the entries first:end of one read, in blocks that see its
            tokens begin:begin + length: quantized, base, begin, length, first, end.
    """
    base, begin, end, count, seen = reads.runs
    ends = count.cumsum()
    in_eight_bits = reads.scales[:, 0] != 0
    quantized = in_eight_bits[base] if in_eight_bits.any() else 0
    blocks = rows_of(len(base), quantized, base, begin, end - begin, ends - count, ends)
    read = (count > 0) & (end > begin)
    keep = read & (seen >= end)
    if keep.all():
        return blocks
    whole, short = keep.nonzero()[0], (read & (seen < end)).nonzero()[0]
    counts = -(-count[short] // size)
    of = short.repeat(counts)
    cut = blocks.take(of, axis=1)
    cut[4] += size * counted(counts)
    cut[5] = np.minimum(cut[4] + size, cut[5])
    edges = cut[4:].T.ravel()
    most = np.maximum.reduceat(np.append(reads.entries[2], 0), edges)[::2]
    cut[3] = np.minimum(cut[3], most - cut[2])
    some = (cut[3] > 0).nonzero()[0]
    order = np.concatenate([whole, of[some]]).argsort(kind="stable")
    found = np.concatenate([blocks.take(whole, axis=1), cut.take(some, axis=1)], axis=1)
    return found.take(order, axis=1)


class _Cut(NamedTuple):
    """How many tokens the pieces of each read have, and how many items and entries that makes."""

    tokens: Int64s
    pieces: Int64s
    """Number of pieces of each read."""
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
        least = min(targets) if eight_bits else targets[0]
        if 2 * int(length.max(initial=0)) < 3 * least:  # as is usual where many requests run
            return cls(length, np.ones_like(length), int(count.sum()), int(entries.sum()))
        while True:
            target = np.where(quantized, targets[1], targets[0]) if eight_bits else targets[0]
            number = np.maximum(1, (length / target + 0.5).astype(np.int64))
            tokens = -(-length // (number * PIECE_TOKENS)) * PIECE_TOKENS
            number = -(-length // tokens)
            cut = cls(tokens, number, int(number @ count), int(number @ entries))
            fits = cut.items <= capacity.items and cut.entries <= capacity.entries
            if fits or not (number > 1).any():
                return cut
            targets = [2 * each for each in targets]


def _items(blocks: Int64s, cut: _Cut, size: int) -> tuple[Int32s, Int64s]:
    """The fields of all items [N, 8] in the order in which they run, and which of the entries asked
    are theirs, one after another."""
    pieces, skipped = blocks, np.zeros_like(cut.pieces)
    if cut.items and int(cut.pieces.max()) > 1:
        block = np.arange(len(cut.pieces)).repeat(cut.pieces)
        tokens = cut.tokens[block]
        skipped = counted(cut.pieces) * tokens
        pieces = blocks.take(block, axis=1)
        pieces[2] += skipped
        pieces[3] = np.minimum(tokens, pieces[3] - skipped)
    # plain ones first, then long ones; blocks that read the same tokens are neighbors
    rank = (pieces[0] * ALL_TOKENS + (ALL_TOKENS - pieces[3])) * ALL_TOKENS + skipped
    quantized, base, begin, length, first, end = pieces.take(rank.argsort(kind="stable"), axis=1)
    entries = end - first
    ends = entries.cumsum()
    begins = ends - entries
    sources = np.arange(int(ends[-1]) if len(ends) else 0) + (first - begins).repeat(entries)
    fields = rows_of(len(base), base, begin, begin + length, begins, entries, quantized)
    counts = -(-entries // size)
    if int(counts.sum()) > len(counts):
        within = size * counted(counts)
        fields = fields.repeat(counts, axis=1)
        fields[3] += within
        fields[4] = np.minimum(size, fields[4] - within)
    items = np.zeros((fields.shape[1], ITEM_WIDTH), dtype=np.int32)
    items[:, : len(fields)] = fields.T
    return items, sources
