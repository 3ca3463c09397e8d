"""Decode batches: rows that were kept from step to step are those of a batch that is built anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.engine import Context, Request
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.handle import RequestChannel
from ragcache.engine.kv_cache import BlockPool, BlockTable
from ragcache.engine.sequence import Sequence, SequenceGroup
from tests.conftest import scaled

BLOCK_SIZE = 4
POOL = BlockPool(torch.zeros(1, 1, 4000, 1), torch.zeros(1, 1, 4000, 1), BLOCK_SIZE)


def table_of(sequence: Sequence) -> BlockTable:
    assert sequence.private is not None
    return sequence.private


@dataclass
class DrawnSequences:
    """Sequences of a batch, and how many steps each has run in it."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    batch: DecodeBatch = field(default_factory=DecodeBatch)
    expected: list[Sequence] = field(default_factory=list)
    next_block: int = 1

    def new_blocks(self, count: int) -> list[int]:
        """Blocks that no other sequence has."""
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def sequence(self) -> Sequence:
        """A sequence whose prompt has just been computed."""
        own, most = self.draw(st.integers(1, 9)), self.draw(st.sampled_from([1, 2, 3, 20]))
        context = Context(
            (), tuple(range(own)), tuple(range(own)), own + self.draw(st.integers(0, 3))
        )
        group = SequenceGroup(Request(context, most), RequestChannel(lambda: None), 0.0)
        sequence = Sequence(group, 0, 0)
        table = BlockTable(POOL)
        table.block_ids += self.new_blocks(-(-own // BLOCK_SIZE))
        table.advance(range(own))
        sequence.private, sequence.sampler = table, sequence.new_sampler()
        return sequence

    def leave_and_join(self) -> None:
        """The plan of a step behind one that samples a token of each of these sequences."""
        for sequence in self.expected:
            sequence.finished = self.draw(st.sampled_from([False, False, False, True]))
        new = [self.sequence() for _ in range(self.draw(st.integers(0, 2)))]
        self.batch.leave()
        self.batch.join(new, self.batch.rows)
        kept = [each for each in (*self.expected, *new) if not each.finished]
        self.expected = [each for each in kept if self.left(each) > 0]

    def left(self, sequence: Sequence) -> int:
        """Tokens to come behind the one that the running step samples."""
        launched = table_of(sequence).length - sequence.prompt_length
        return sequence.request.max_tokens - 1 - launched

    def preempt(self) -> None:
        """The batch is forgotten, and built again from the sequences that stay."""
        going_on = [each for each in self.expected if self.left(each) > 0]
        self.expected = going_on[: self.draw(st.integers(0, len(going_on)))]
        self.batch = DecodeBatch()
        for sequence in self.expected:
            done = table_of(sequence).length - sequence.prompt_length
            sequence.tokens += [7] * (done - sequence.generated)
        self.batch.join(self.expected, 0)

    def allocate(self) -> None:
        """Rows get the blocks that their tokens need."""
        for row in self.batch.full_rows():
            self.batch.tables[row].block_ids += self.new_blocks(self.draw(st.integers(1, 3)))
            self.batch.put_blocks(row)

    def exchange(self) -> None:
        """A full block of a row turns out to equal another."""
        if self.expected and self.draw(st.booleans()):
            sequence = self.draw(st.sampled_from(self.expected))
            table_of(sequence).block_ids[:1] = self.new_blocks(1)
            self.batch.exchange(sequence)

    def check(self) -> None:
        """Every array of the batch says what its sequences say."""
        batch, tables = self.batch, [table_of(each) for each in self.expected]
        assert batch.rows == len(self.expected)
        assert batch.sequences == self.expected
        assert batch.tables == tables
        assert batch.states == [each.sampler for each in self.expected]
        assert batch.length.tolist() == [each.length for each in tables]
        positions = [
            each.request.context.next_position + table.length - each.prompt_length
            for each, table in zip(self.expected, tables, strict=True)
        ]
        assert batch.position.tolist() == positions
        for row, table in enumerate(tables):
            count = len(table.block_ids)
            assert batch.blocks[row, :count].tolist() == table.block_ids
            assert table.capacity > table.length, "there is room for the token"
        serials = batch.serials.tolist()
        assert serials == sorted(set(serials))


@settings(max_examples=scaled(100))
@given(st.data())
def test_rows_that_were_kept_equal_their_sequences(data: st.DataObject) -> None:
    drawn = DrawnSequences(data.draw)
    versions = set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.sampled_from([False, False, False, True])):
            drawn.preempt()
        else:
            before, version = list(drawn.expected), drawn.batch.version
            drawn.leave_and_join()
            same = drawn.expected == before
            assert (drawn.batch.version == version) == same, "only other rows are a new version"
            assert same or drawn.batch.version not in versions
        drawn.allocate()
        drawn.exchange()
        drawn.check()
        versions.add(drawn.batch.version)
        if drawn.batch.rows:
            lengths = [table_of(each).length for each in drawn.expected]
            filled = drawn.batch.advance()
            assert [(each.sequence, each.length) for each in filled] == [
                (sequence, length + 1)
                for sequence, length in zip(drawn.expected, lengths, strict=True)
                if (length + 1) % BLOCK_SIZE == 0
            ]
            assert drawn.batch.follows.tolist() == list(range(drawn.batch.rows))
