"""The requests of a GPU's step at their rows: a decode batch, then chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from ragcache.attention.triton.array_plan import counted
from ragcache.engine.batch import Ints, ScheduledChunk
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.kv_cache import BlockTable


@dataclass(slots=True, eq=False)
class PlacedChunk:
    """A chunk at its rows of the step."""

    chunk: ScheduledChunk
    first_row: int
    end_row: int
    past: int
    """Number of tokens before the new ones."""
    tokens: int
    """Number of tokens, with the new ones."""
    square: bool = False
    """Whether the new tokens read each other by a product of their own."""

    @property
    def read(self) -> int:
        """Number of tokens that the items of the step read."""
        return self.past if self.square else self.tokens

    def position(self, token: int) -> int:
        """Position of one of the request's own tokens."""
        if token < self.past:
            return self.chunk.private.positions[token]
        return self.chunk.position_ids[token - self.past]

    def gapless_parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Tokens begin:end, cut at gaps between their positions."""
        if self.position(end - 1) - self.position(begin) == end - 1 - begin:
            return [(begin, end)]  # positions ascend
        past = self.chunk.private.positions[begin:end]
        new = self.chunk.position_ids[max(0, begin - self.past) : max(0, end - self.past)]
        cuts = np.flatnonzero(np.diff(ints([*past, *new])) != 1) + begin + 1
        edges = [begin, *cuts.tolist(), end]
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The requests of a step. Arrays have an element for each of them, [P]."""

    decoding: DecodeBatch
    placed: Sequence[PlacedChunk]
    """The chunks, whose requests follow the rows of the decode batch."""
    past: Ints
    """Number of tokens before the new ones."""
    tokens: Ints
    """Number of tokens, with the new ones."""
    first_row: Ints
    end_row: Ints

    @classmethod
    def of(
        cls, decoding: DecodeBatch, chunks: Sequence[ScheduledChunk], square_rows: int = 0
    ) -> StepRows:
        """Give each chunk its rows, behind the decode batch. Chunks of `square_rows` new tokens or
        more are squares, unless it is 0."""
        placed, row = [], decoding.rows
        for chunk in chunks:
            length, new = chunk.private.length, len(chunk.position_ids)
            square = 0 < square_rows <= new
            placed.append(PlacedChunk(chunk, row, row + new, length, length + new, square))
            row += new
        sizes = [(each.past, each.tokens, each.first_row, each.end_row) for each in placed]
        arrays = ints(sizes).reshape(-1, 4).T
        if decoding.rows:
            own, rows = decoding.length, np.arange(decoding.rows)
            arrays = np.concatenate([[own, own + 1, rows, rows + 1], arrays], axis=1)
        return cls(decoding, placed, *arrays)

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.past)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.placed[-1].end_row if self.placed else self.decoding.rows

    @property
    def tables(self) -> list[BlockTable]:
        """Blocks of each request that has blocks of the pool."""
        private = (each.chunk.private for each in self.placed)
        return [*self.decoding.tables, *(each for each in private if isinstance(each, BlockTable))]

    @property
    def decodes(self) -> bool:
        """Whether each request has one row, and blocks of the pool."""
        return all(
            each.tokens - each.past == 1 and isinstance(each.chunk.private, BlockTable)
            for each in self.placed
        )

    def block_ids(self, until: Ints) -> Ints:
        """Ids of the first `until` blocks of each request, one after another, [N]. Requests in
        contiguous memory have none."""
        count, blocks = self.decoding.rows, self.decoding.blocks
        width = int(until[:count].max()) if count else 0
        ids: Ints = blocks[:, :width][np.arange(width) < until[:count, None]]
        if not self.placed:
            return ids
        tables = (each.chunk.private for each in self.placed)
        behind = [
            table.block_ids[:end]
            for table, end in zip(tables, until[count:].tolist(), strict=True)
            if isinstance(table, BlockTable)
        ]
        return np.concatenate([ids, ints([*chain.from_iterable(behind)])])

    def blocks(self, until: Ints) -> tuple[Ints, Ints, Ints]:
        """Request, number in its table and id of the blocks of `block_ids`, [N] each."""
        counts = until.copy()
        for owner, each in enumerate(self.placed, self.decoding.rows):
            if not isinstance(each.chunk.private, BlockTable):
                counts[owner] = 0
        request = np.arange(self.requests).repeat(counts)
        return request, counted(counts), self.block_ids(until)


def ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    """Values as an array."""
    return np.asarray(values, dtype=np.int64)
