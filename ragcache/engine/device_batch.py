"""Batches for a GPU: which rows read which states, as attention tables.

There are two kinds of steps. In a `decode` step every request has one row and blocks of the pool.
Blocks that several requests share, and long runs of one request, are read as runs; the last blocks
of each request are its *tail*, read by the program that also writes the new keys and values. In a
`mixed` step any rows are allowed: new keys and values are written first, and everything is read as
runs, of which a row sees the tokens up to its own.

A decode step needs no new plan while the same requests go on (`DeviceBatch.advance`). Other steps
over a decode batch are planned on arrays, in which only the requests change that join and leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

import numpy as np

from ragcache.attention.triton.array_plan import ReadArrays, plan_arrays
from ragcache.attention.triton.plan import (
    AttentionPlan,
    HeadLayout,
    ItemShape,
    KVBase,
    Square,
    build_plan,
)
from ragcache.attention.triton.tables import AttentionTables, StepArrays
from ragcache.engine.batch import Ints, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_blocks import BlockPlanner
from ragcache.engine.device_rows import StepRows
from ragcache.engine.device_segments import SegmentPlanner
from ragcache.engine.kv_cache import BlockPool, BlockTable

MAX_TAIL_BLOCKS: Final = 8
"""Maximum length of a tail, in blocks. One program reads it for a row and a head."""

MANY_ROWS: Final = 1024
"""Number of rows from which runs are cut into pieces of at least `LONG_PIECE` tokens."""

SHORT_PIECE, LONG_PIECE = 256, 1024

FEW_SEGMENTS: Final = 24
"""Most requests and most segments of a step that is planned one by one, which is then quicker."""


ITEM_SHAPES: Final[Mapping[str, ItemShape]] = {
    "mixed": ItemShape(264, 64),
    "decode": ItemShape(264, 64),
}
"""Shapes of items for two programs on each multiprocessor of an H200."""


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
    """Plans the steps of one model and pool. Blocks of the pool are base 0 of the tables.

    `gapless`: positions within a run, and from a tail to its row, must be consecutive, as ALiBi and
    sliding windows need. `shapes`: of the kernels' items, by kind of step.
    """

    def __init__(
        self,
        pool: BlockPool,
        heads: HeadLayout,
        *,
        gapless: bool = False,
        shapes: Mapping[str, ItemShape] = ITEM_SHAPES,
    ) -> None:
        self.pool, self.heads, self.gapless = pool, heads, gapless
        self._pool_base = KVBase(pool.keys, pool.values)
        self._segments = SegmentPlanner(self._pool_base)
        self._blocks = BlockPlanner(self._pool_base, pool.block_size, gapless=gapless)
        self.shapes = shapes

    def plan_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        tables: AttentionTables,
        decoding: DecodeBatch,
        square_rows: int = 0,
    ) -> DeviceBatch:
        """Set the plan of a step and fill its arrays, which are then to be uploaded. Raises
        `TableOverflow`, and changes nothing, if the tables are too small.

        Args:
            chunks: Chunks of the step beside the decode batch.
            tables: The tables.
            decoding: The first rows of the step.
            square_rows: Fewest new tokens of a chunk that are a square, in steps of few
                chunks and segments. 0 makes no squares.
        """
        segments = sum(len(chunk.segments) for chunk in chunks)
        segments += decoding.segments if decoding.rows else 0
        few = max(segments, decoding.rows + len(chunks)) <= FEW_SEGMENTS
        if decoding.rows and (few or self.gapless):
            chunks, decoding = [*decoding.chunks(), *chunks], DecodeBatch()
        rows = StepRows.of(decoding, chunks, square_rows if few else 0)
        plan, tails, hidden_from = self._plan(rows, tables, few=few)
        tables.set_plan(plan)
        tables.begin_step(rows.rows)
        step = tables.step
        logits = _put_rows(step, rows)
        if tails is None:
            self._put_writes(step, rows, plan)
            return DeviceBatch("mixed", rows.rows, logits, plan, step, None)
        self._put_tails(step, rows, tails)
        continuation = _Continuation(rows.tables, tails, hidden_from)
        return DeviceBatch("decode", rows.rows, logits, plan, step, continuation)

    def forget(self) -> None:
        """Let go of segments, which are kept from one step to the next."""
        self._segments.forget()

    def _plan(
        self, rows: StepRows, tables: AttentionTables, *, few: bool
    ) -> tuple[AttentionPlan, Ints | None, Ints | None]:
        """Plan a step. Also returns the first block of each tail in a decode step, and the position
        from which each row sees one more segment."""
        options: dict[str, Any] = {
            "rows": rows.rows,
            "heads": self.heads,
            "capacity": tables.capacity,
            "min_keys": LONG_PIECE if rows.rows >= MANY_ROWS else SHORT_PIECE,
        }
        if few:
            reads, hidden_from = self._segments.reads(rows.placed)
            tails = self._blocks.reads(rows, reads)
            plan = build_plan(reads, pool=self._pool_base, **options | self._shape(tails))
            plan.squares = [Square(e.first_row, e.end_row) for e in rows.placed if e.square]
            return plan, tails, hidden_from
        arrays, hidden_from = self._segments.arrays(rows)
        if self.gapless:
            reads = []
            tails = self._blocks.reads(rows, reads)
            own = ReadArrays.of(reads, self._pool_base)
        else:
            own, tails = self._blocks.arrays(rows)
        plan = plan_arrays(arrays.followed_by(own), **options | self._shape(tails))
        return plan, tails, hidden_from

    def _shape(self, tails: Ints | None) -> dict[str, Any]:
        """The shape of items of a step with or without tails."""
        return self.shapes["mixed" if tails is None else "decode"]._asdict()

    def _put_tails(self, step: StepArrays, rows: StepRows, tails: Ints) -> None:
        size, count, blocks = self.pool.block_size, rows.decoding.rows, rows.decoding.blocks
        lengths = rows.past // size + 1 - tails
        width = int(lengths.max())
        assert width <= MAX_TAIL_BLOCKS <= step.pages.shape[1]
        if count:
            row, most = np.arange(count)[:, None], blocks.shape[1]
            at = np.minimum(tails[:count, None] + np.arange(width), most - 1)
            step.pages[:count, :width] = blocks.take(most * row + at)
        for each, begin, length in zip(
            rows.placed, tails[count:].tolist(), lengths[count:].tolist(), strict=True
        ):
            table = each.chunk.private
            assert isinstance(table, BlockTable)
            step.pages[each.first_row, :length] = table.block_ids[begin : begin + length]
        step.tail_length[: rows.rows] = rows.past - tails * size

    def _put_writes(self, step: StepArrays, rows: StepRows, plan: AttentionPlan) -> None:
        size, slots = self.pool.block_size, list[range]()
        step.write_base[: rows.rows] = 0
        batch, past = rows.decoding, rows.decoding.length
        block_id = batch.blocks[np.arange(batch.rows), past // size]
        step.write_slot[: batch.rows] = block_id * size + past % size
        for each in rows.placed:
            private = each.chunk.private
            if isinstance(private, ContiguousKV):
                assert each.tokens <= private.keys.shape[2]
                base = plan.base_number(private.keys)
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
        behind = rows.rows - batch.rows
        step.write_slot[batch.rows : rows.rows] = np.fromiter(
            chain.from_iterable(slots), np.int32, behind
        )


def _put_rows(step: StepArrays, rows: StepRows) -> int:
    """Fill tokens, positions and the rows whose logits are wanted. Returns the number of these."""
    count, behind = rows.decoding.rows, rows.rows - rows.decoding.rows
    step.position_ids[:count] = rows.decoding.position
    step.token_ids[:count] = 0  # the device knows them
    chunks = [each.chunk for each in rows.placed]
    positions = chain.from_iterable(chunk.position_ids for chunk in chunks)
    step.position_ids[count : rows.rows] = np.fromiter(positions, np.int64, behind)
    tokens = chain.from_iterable(chunk.token_ids for chunk in chunks)
    step.token_ids[count : rows.rows] = np.fromiter(tokens, np.int64, behind)
    wanted = [row for each in rows.placed for row in each.chunk.logit_rows(each.end_row)]
    step.logit_rows[:count] = np.arange(count)
    step.logit_rows[count : count + len(wanted)] = wanted
    return count + len(wanted)
