"""Which rows of a GPU's step read which blocks of requests.

Blocks that several requests share, and long runs of one request, are read as runs. The last blocks
of a request that decodes are its tail, which its row reads itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ragcache.attention.triton.array_plan import (
    ReadArrays,
    counted,
    entries_of,
    rows_of,
    run_begins,
    run_lengths,
)
from ragcache.attention.triton.plan import ALL_TOKENS, KVBase, KVConsumer, KVRead, KVRun
from ragcache.engine.batch import LONG_SPAN, Ints
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_rows import PlacedChunk, StepRows, ints
from ragcache.engine.kv_cache import BlockTable

BlockRun = tuple[int, int, int, int, int]
"""First reader of a run of blocks, number and id of its first block, group of its readers, and
number of blocks."""


class BlockPlanner:
    """Plans the reads of requests' own states.

    Args:
        pool: The pool of blocks, base 0 of all reads.
        size: Tokens of a block.
        gapless: Whether positions within a run, and from a tail to its row, must be consecutive.
    """

    def __init__(self, pool: KVBase, size: int, *, gapless: bool) -> None:
        self._pool, self._size, self._gapless = pool, size, gapless
        self._no_reads = ReadArrays.of((), pool)
        self._places: Ints = np.zeros(pool.tokens // size, dtype=np.int64)

    def reads(self, rows: StepRows, reads: list[KVRead]) -> Ints | None:
        """Append the reads of a few chunks, or of any number of gapless ones.

        Returns:
            The first block of each tail, unless the step is a mixed one. Then its reads include the
            new tokens.
        """
        tails = self._decode_reads(rows.placed, rows.past, reads) if rows.decodes else None
        if tails is None:
            self._mixed_reads(rows.placed, reads)
        return tails

    def arrays(self, rows: StepRows) -> tuple[ReadArrays, Ints | None]:
        """Return the reads of many requests whose positions may have gaps, and tails as `reads`."""
        decodes, size = rows.decodes, self._size
        until = rows.past // size if decodes else -(-rows.tokens // size)
        if self._shares_blocks(rows, until):
            return self._shared_arrays(rows, until, decodes=decodes)
        count, reads = rows.decoding.rows, list[KVRead]()
        if not decodes:
            self._mixed_reads(rows.placed, reads)
            own = self._runs_of_batch(rows.decoding, until[:count])
            return own.followed_by(ReadArrays.of(reads, self._pool)), None
        tails = self._tails(rows.past, np.zeros_like(rows.past))
        if not tails.any():
            return self._no_reads, tails
        own = self._runs_of_batch(rows.decoding, tails[:count])
        if not rows.placed:
            return own, tails
        blocks = _blocks_of(rows.placed, tails[count:].tolist())
        self._append_runs(rows.placed, _own_runs(blocks), (), reads)
        return own.followed_by(ReadArrays.of(reads, self._pool)), tails

    def _shares_blocks(self, rows: StepRows, until: Ints) -> bool:
        """Whether two requests have a block in common, among the first `until` of each."""
        ids = rows.block_ids(until)
        places = np.arange(len(ids))
        self._places[ids] = places
        return bool((self._places[ids] != places).any())

    def _runs_of_batch(self, batch: DecodeBatch, until: Ints) -> ReadArrays:
        """One read for each run of the first `until` blocks of a batch's rows, which share none."""
        if not batch.rows:
            return self._no_reads
        size, ids = self._size, batch.blocks[:, : int(until.max())]
        begins = np.ones(ids.shape, dtype=bool)
        np.not_equal(ids[:, 1:], ids[:, :-1] + 1, out=begins[:, 1:])
        begins &= np.arange(ids.shape[1]) < until[:, None]
        row, number = begins.nonzero()
        end = until[row]
        same = row[1:] == row[:-1]
        end[:-1][same] = number[1:][same]
        tokens = np.minimum(end * size, batch.length[row] + 1) - number * size
        begin = ids[row, number] * size
        entries = np.zeros((4, len(row)), dtype=np.int32)
        entries[0], entries[2] = row, ALL_TOKENS
        runs = rows_of(len(row), 0, begin, begin + tokens, 1, ALL_TOKENS)
        return self._no_reads._replace(runs=runs, entries=entries)

    def _shared_arrays(
        self, rows: StepRows, until: Ints, *, decodes: bool
    ) -> tuple[ReadArrays, Ints | None]:
        """Return the reads of requests some of which share blocks, and tails as `reads`."""
        uses = BlockUses.of(*rows.blocks(until), rows.requests)
        if not decodes:
            every = np.ones(len(uses.owner), dtype=bool)
            return self._contiguous(rows).followed_by(self._runs_of(rows, uses, every)), None
        tails = self._tails(rows.past, uses.shared_until(rows.requests))
        return self._runs_of(rows, uses, uses.number < tails[uses.owner]), tails

    def _tails(self, past: Ints, shared: Ints) -> Ints:
        """First block of each tail. `shared`: the blocks up to the last shared one."""
        long = past // self._size - shared >= LONG_SPAN
        tails: Ints = np.where(long, self._settled(past, shared), shared)
        return tails

    def _settled(self, past: Ints, shared: Ints) -> Ints:
        """Blocks that stay. The last one, where it is just full, may yet be replaced: see
        `DeviceBatch.advance`."""
        settled: Ints = np.maximum(shared, np.maximum(past - 1, 0) // self._size)
        return settled

    def _runs_of(self, rows: StepRows, uses: BlockUses, kept: NDArray[np.bool_]) -> ReadArrays:
        """One read for each run of some blocks."""
        owner, number, block_id, group, length = uses.runs(kept)
        if not len(owner):
            return self._no_reads
        size, past = self._size, rows.past[owner]
        begin, at = number * size, block_id * size
        end = np.minimum(begin + length * size, rows.tokens[owner])
        limit = np.where(end <= past + 1, ALL_TOKENS, at + past + 1 - begin)
        members = np.concatenate([np.arange(rows.requests), *map(ints, uses.readers)])
        counts = ints([*[1] * rows.requests, *map(len, uses.readers)])
        count = counts[group]
        who = members[(counts.cumsum() - counts)[group].repeat(count) + counted(count)]
        first, last = rows.first_row[who], rows.end_row[who]
        spans = np.add.reduceat(last - first, count.cumsum() - count)
        # nothing depends on the positions of keys
        readers = rows_of(len(who), first, last, 0, 0, limit.repeat(count))
        return self._no_reads._replace(
            runs=rows_of(len(at), 0, at, at + end - begin, spans, limit),
            entries=entries_of(readers.T),
        )

    def _contiguous(self, rows: StepRows) -> ReadArrays:
        """The reads of requests in contiguous memory."""
        reads: list[KVRead] = []
        for each in rows.placed:
            if isinstance(each.chunk.private, ContiguousKV):
                self._append_contiguous(each, each.chunk.private, reads)
        return ReadArrays.of(reads, self._pool) if reads else self._no_reads

    def _decode_reads(
        self, placed: Sequence[PlacedChunk], past: Ints, reads: list[KVRead]
    ) -> Ints | None:
        """Append the reads before the tails of chunks that decode. Returns no tails if they would
        have gaps."""
        size = self._size
        blocks = _blocks_of(placed, past // size)
        uses = None if _all_differ(blocks) else _uses_of(blocks)
        shared = np.zeros_like(past) if uses is None else uses.shared_until(len(placed))
        tails, settled = self._tails(past, shared), self._settled(past, shared)
        for index, each in enumerate(placed if self._gapless else ()):
            begin = self._gapless_tail(each, int(tails[index]), int(settled[index]))
            if begin is None:
                return None
            tails[index] = begin
        if uses is None:
            blocks = [ids[:count] for ids, count in zip(blocks, tails.tolist(), strict=True)]
            self._append_runs(placed, _own_runs(blocks), (), reads)
        else:
            runs = zip(*uses.runs(uses.number < tails[uses.owner]).tolist(), strict=True)
            self._append_runs(placed, runs, uses.readers, reads)
        return tails

    def _gapless_tail(self, placed: PlacedChunk, *blocks: int) -> int | None:
        """The first of these blocks from which positions have no gap."""
        size, past = self._size, placed.past
        for block in blocks:
            if placed.position(past) - placed.position(block * size) == past - block * size:
                return block
        return None

    def _mixed_reads(self, placed: Sequence[PlacedChunk], reads: list[KVRead]) -> None:
        """Append the reads of private states, with the new tokens."""
        with_blocks = []
        for each in placed:
            private = each.chunk.private
            if isinstance(private, ContiguousKV):
                self._append_contiguous(each, private, reads)
            else:
                with_blocks.append(each)
        blocks = _blocks_of(with_blocks, [-(-each.read // self._size) for each in with_blocks])
        if _all_differ(blocks):
            self._append_runs(with_blocks, _own_runs(blocks), (), reads)
        else:
            uses = _uses_of(blocks)
            runs = uses.runs(np.ones(len(uses.owner), dtype=bool))
            self._append_runs(with_blocks, zip(*runs.tolist(), strict=True), uses.readers, reads)

    def _append_contiguous(
        self, placed: PlacedChunk, private: ContiguousKV, reads: list[KVRead]
    ) -> None:
        base = KVBase(private.keys, private.values)
        if placed.read:
            self._append_parts(base, 0, placed, (0, placed.read), [placed], reads)
        else:  # the step writes to the base
            reads.append(KVRead(KVRun(base, 0, 0)))

    def _append_runs(
        self,
        placed: Sequence[PlacedChunk],
        runs: Iterable[BlockRun],
        groups: Sequence[Sequence[int]],
        reads: list[KVRead],
    ) -> None:
        size = self._size
        for owner, number, block_id, group, length in runs:
            own = placed[owner]
            readers = [own]
            if group >= len(placed):
                readers = [placed[reader] for reader in groups[group - len(placed)]]
            tokens = (number * size, min((number + length) * size, own.read))
            self._append_parts(self._pool, block_id * size, own, tokens, readers, reads)

    def _append_parts(
        self,
        base: KVBase,
        begin: int,
        own: PlacedChunk,
        tokens: tuple[int, int],
        readers: Sequence[PlacedChunk],
        reads: list[KVRead],
    ) -> None:
        """Append reads of `own`'s tokens, which are contiguous from the base's token `begin` on."""
        parts = own.gapless_parts(*tokens) if self._gapless else [tokens]
        for first, end in parts:
            at = begin + first - tokens[0]
            origin = own.position(first) - at
            limit = ALL_TOKENS if end <= own.past + 1 else at + own.past + 1 - first
            run = KVRun(base, at, at + end - first)
            who = [KVConsumer(each.first_row, each.end_row, 0, origin, limit) for each in readers]
            reads.append(KVRead(run, who))


@dataclass(frozen=True, slots=True, eq=False)
class BlockUses:
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
    def of(cls, owner: Ints, number: Ints, block_id: Ints, tables: int) -> BlockUses:
        """Group the blocks of `tables` tables, of which some share blocks."""
        order = block_id.argsort(kind="stable")
        first = run_begins(block_id[order])
        uses = run_lengths(first, len(order))
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

    def runs(self, kept: NDArray[np.bool_]) -> Ints:
        """Runs of neighboring blocks with the same readers, the fields of `BlockRun` by N."""
        at = (kept & self.leads).nonzero()[0]
        columns = [each[at] for each in (self.owner, self.number, self.block_id, self.group)]
        owner, number, block_id, group = columns
        place = np.arange(len(at))
        first = run_begins(owner, number - place, block_id - place, group)
        return np.stack([*(each[first] for each in columns), run_lengths(first, len(at))])


def _uses_of(blocks: Sequence[Sequence[int]]) -> BlockUses:
    """The uses of the blocks of some tables."""
    counts = ints([len(each) for each in blocks])
    owner = np.arange(len(blocks)).repeat(counts)
    return BlockUses.of(owner, counted(counts), ints([*chain.from_iterable(blocks)]), len(blocks))


def _blocks_of(placed: Sequence[PlacedChunk], counts: Iterable[int]) -> list[list[int]]:
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


def _own_runs(blocks: Sequence[Sequence[int]]) -> Iterator[BlockRun]:
    """The runs of `BlockUses.runs` if all blocks differ."""
    for owner, ids in enumerate(blocks):
        first = 0
        for number in range(1, len(ids) + 1):
            if number == len(ids) or ids[number] != ids[number - 1] + 1:
                yield owner, first, ids[first], owner, number - first
                first = number
