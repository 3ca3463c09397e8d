"""Sequences that decode, as rows of arrays that change in place when one joins or leaves.

A step that is launched ahead of its device knows everything about such a sequence but its token:
where it is, which blocks it has, and which row of the running step samples the token. From one step
to the next only numbers grow. Hundreds of sequences therefore cost a step a few operations on
arrays, and objects are made for the sequences that join.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from ragcache.engine.batch import Ints, ScheduledChunk
from ragcache.engine.kv_cache import BlockTable
from ragcache.engine.sampler import SamplerState
from ragcache.engine.sequence import Sequence

_SERIAL, _LENGTH, _POSITION, _LEFT, _FOLLOWS, _SEGMENTS = range(6)

_serials: Final = count(1)
_versions: Final = count(1)


class FilledBlock(NamedTuple):
    """A sequence whose last block a step fills."""

    sequence: Sequence
    table: BlockTable
    """Its blocks, which it has unless it was preempted since."""
    length: int
    """Number of its tokens whose states are then computed."""


class DecodeBatch:
    """The first rows of a step: one for each sequence that decodes.

    A sequence joins behind the last row, and the order of rows never changes.

    Attributes:
        rows: Number of rows.
        sequences: Sequence of each row.
        states: Sampler state of each sequence.
        tables: Blocks of each sequence.
        version: Number of the present rows and blocks. Equal versions are the same sequences, each
            one token further; a block that was added behind the others changes no version.
        blocks: Block ids of each row, padded, [R, W].
    """

    def __init__(self) -> None:
        self.rows = 0
        self.sequences: list[Sequence] = []
        self.states: list[SamplerState] = []
        self.tables: list[BlockTable] = []
        self.version = next(_versions)
        self.blocks: Ints = np.zeros((0, 4), dtype=np.int64)
        self._columns: Ints = np.zeros((6, 0), dtype=np.int64)

    @property
    def serials(self) -> Ints:
        """Number of each row that no other row ever has, ascending, [R]."""
        return self._column(_SERIAL)

    @property
    def length(self) -> Ints:
        """Tokens of each sequence before the row's own, [R]."""
        return self._column(_LENGTH)

    @property
    def position(self) -> Ints:
        """Position of each row's token, [R]."""
        return self._column(_POSITION)

    @property
    def follows(self) -> Ints:
        """Row of the running step that samples each row's token, [R]."""
        return self._column(_FOLLOWS)

    def _column(self, number: int) -> Ints:
        column: Ints = self._columns[number]
        return column

    @property
    def segments(self) -> int:
        """Number of segments that the rows read."""
        return int(self._columns[_SEGMENTS].sum())

    def leave(self) -> None:
        """Remove the sequences that have finished or get no further token."""
        goes_on = (self._columns[_LEFT] > 0).tolist()
        rows = [
            row for row, each in enumerate(self.sequences) if goes_on[row] and not each.finished
        ]
        if len(rows) == self.rows:
            return
        self.rows = len(rows)
        self.sequences = [self.sequences[row] for row in rows]
        self.states = [self.states[row] for row in rows]
        self.tables = [self.tables[row] for row in rows]
        self.blocks, self._columns = self.blocks[rows], self._columns.take(rows, axis=1)
        self.version = next(_versions)

    def join(self, sequences: Seq[Sequence], first: int) -> None:
        """Add sequences, of which the running step samples the first or a further token.

        Args:
            sequences: The sequences. The ones that have finished, or get no token after the next
                one, do not join.
            first: Row of the running step that samples the token of the first sequence. The others
                follow in order.
        """
        columns = []
        for row, sequence in enumerate(sequences, first):
            table, state, left = sequence.private, sequence.sampler, sequence.tokens_left - 1
            if sequence.finished or table is None or state is None or left <= 0:
                continue
            context = sequence.request.context
            position, segments = context.next_position + sequence.generated, len(context.segments)
            columns.append((next(_serials), table.length, position, left, row, segments))
            self.sequences.append(sequence)
            self.states.append(state)
            self.tables.append(table)
        if not columns:
            return
        self.rows = len(self.sequences)
        self._columns = np.concatenate([self._columns, np.array(columns).T], axis=1)
        room = np.zeros((len(columns), self.blocks.shape[1]), dtype=np.int64)
        self.blocks = np.concatenate([self.blocks, room])
        for row in range(self.rows - len(columns), self.rows):
            self.put_blocks(row)
        self.version = next(_versions)

    def full_rows(self) -> list[int]:
        """Rows whose sequences need another block for their token."""
        size = self.tables[0].pool.block_size if self.tables else 1
        candidates = np.flatnonzero(self.length % size == 0).tolist()
        return [row for row in candidates if self.tables[row].capacity == self.length[row]]

    def put_blocks(self, row: int) -> None:
        """Take over the present blocks of a row's sequence."""
        ids = self.tables[row].block_ids
        width = self.blocks.shape[1]
        if len(ids) > width:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, max(len(ids), 2 * width) - width)))
        self.blocks[row, : len(ids)] = ids

    def exchange(self, sequence: Sequence) -> None:
        """Take over the blocks of a sequence of which some were replaced, if it has a row."""
        for row, each in enumerate(self.sequences):
            if each is sequence:
                self.put_blocks(row)
                self.version = next(_versions)

    def advance(self) -> list[FilledBlock]:
        """Move every row on by one token, once the step was launched. There must be a row.

        Returns:
            The blocks that the tokens fill.
        """
        for table, position in zip(self.tables, self.position.tolist(), strict=True):
            table.append(position)
        size = self.tables[0].pool.block_size
        self._columns[_LENGTH] += 1
        self._columns[_POSITION] += 1
        self._columns[_LEFT] -= 1
        self._columns[_FOLLOWS] = np.arange(self.rows)
        return [
            FilledBlock(self.sequences[row], self.tables[row], int(self.length[row]))
            for row in np.flatnonzero(self.length % size == 0).tolist()
        ]

    def chunks(self) -> list[ScheduledChunk]:
        """The rows as chunks, of one token each, which the host does not know."""
        rows = zip(self.sequences, self.tables, self.position.tolist(), strict=True)
        return [
            ScheduledChunk(sequence.request.context.segments, table, (0,), (position,))
            for sequence, table, position in rows
        ]
