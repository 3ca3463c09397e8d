"""Ragged batches: rows and their metadata, and the layout of what each row reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from ragcache.attention import CausalBlock, ContiguousWrite, PagedWrite
from ragcache.engine import Segment
from ragcache.engine.batch import (
    LONG_SPAN,
    BatchBuilder,
    BatchLayout,
    DecodeTail,
    ScheduledChunk,
    SharedPrefixGroup,
    lay_out_batch,
)
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.kv_cache import BlockPool, BlockTable, RequestKV
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.ragcache.engine.portioned_requests import (
    BLOCK_SIZE,
    assert_same_alone,
    contiguous_chunk,
    encoded_module,
    request_in_blocks,
    run_step,
    small_pool,
)


@pytest.fixture
def pool(causal: CausalLM) -> BlockPool:
    return small_pool(causal)


def test_chunks_are_flattened_in_order(causal: CausalLM) -> None:
    chunks = [
        contiguous_chunk(causal, [], [4, 5, 9]),
        contiguous_chunk(causal, [], [7], wants_logits=False),
        contiguous_chunk(causal, [], [0, 1]),
    ]
    step = BatchBuilder(causal).build_batch(chunks)
    assert step.token_ids.tolist() == [t for w in chunks for t in w.token_ids]
    assert step.position_ids.tolist() == [4, 5, 9, 7, 0, 1]
    assert step.logit_rows.tolist() == [2, 5], "the last row of each chunk that asks"
    assert step.metadata.causal_blocks == (CausalBlock(0, 3), CausalBlock(3, 4), CausalBlock(4, 6))
    metadata = step.metadata
    assert metadata.shared_queries is metadata.paged_queries is None
    assert metadata.shared_kv == ()
    assert step.metadata.shared_index.shape == (0, 6)
    assert step.metadata.own_index is None, "causal blocks in the order of the rows"


def test_an_unmoved_segment_turns_no_query(causal: CausalLM) -> None:
    states = encoded_module(causal, 6, start=20)
    metadata = (
        BatchBuilder(causal)
        .build_batch([contiguous_chunk(causal, [Segment(states, 20)], [26, 27])])
        .metadata
    )
    assert metadata.shared_queries is not None
    assert metadata.shared_queries.rotation is None
    assert metadata.shared_queries.distance is None, "that is for ALiBi"


def test_states_are_grouped_by_memory_not_by_content(causal: CausalLM) -> None:
    one = encoded_module(causal, 6)
    twin = KVStates(one.keys.clone(), one.values.clone(), one.start)
    chunks = [contiguous_chunk(causal, [Segment(states, 0)], [6]) for states in (one, twin, one)]
    metadata = BatchBuilder(causal).build_batch(chunks).metadata
    assert metadata.shared_queries is not None
    assert metadata.shared_queries.rows.tolist() == [0, 2, 1]
    assert [
        run.keys is states.keys for run, states in zip(metadata.shared_kv, (one, twin), strict=True)
    ]


def test_paged_rows_are_one_write_and_contiguous_rows_one_each(
    causal: CausalLM, pool: BlockPool
) -> None:
    a, b = (request_in_blocks(causal, pool, 3, seed) for seed in (1, 2))
    [for_all] = BatchBuilder(causal).build_batch([a.next_chunk(), b.next_chunk(3)]).metadata.writes
    assert isinstance(for_all, PagedWrite)
    assert for_all.rows is None, "all rows of the step"
    assert for_all.slots.tolist() == [0, 4, 5, 6]
    rooms = [contiguous_chunk(causal, [], [0, 1]), contiguous_chunk(causal, [], [5])]
    writes = (
        BatchBuilder(causal)
        .build_batch([rooms[0], b.next_chunk(2), rooms[1], a.next_chunk()])
        .metadata.writes
    )
    assert [(w.begin, w.end) for w in writes if isinstance(w, ContiguousWrite)] == [(0, 2), (4, 5)]
    [paged] = [w for w in writes if isinstance(w, PagedWrite)]
    assert paged.rows is not None
    assert (paged.rows.tolist(), paged.slots.tolist()) == ([2, 3, 5], [4, 5, 0])


def test_blocks_of_other_requests_are_never_read(causal: CausalLM, pool: BlockPool) -> None:
    """A row with fewer pages than its neighbors is filled up with a page that is hidden: states
    that are not finite, of whomever, must not reach it."""
    broken = request_in_blocks(causal, pool, BLOCK_SIZE, seed=1)
    assert isinstance(broken.private, BlockTable)
    asked = [request_in_blocks(causal, pool, count, seed=count) for count in (3, 11)]
    run_step(BatchBuilder(causal), asked, [2, 10])
    pool.keys[:, :, : BLOCK_SIZE * (broken.private.block_ids[0] + 1)] = torch.inf
    pool.values[:, :, : BLOCK_SIZE * (broken.private.block_ids[0] + 1)] = torch.nan
    assert_same_alone(run_step(BatchBuilder(causal), asked), asked)


Readers = list[tuple[int, int]]


@pytest.fixture
def numbered_pool() -> BlockPool:
    """Every token's states hold its number in the pool."""
    keys = torch.arange(20.0 * BLOCK_SIZE).view(1, 1, -1, 1)
    return BlockPool(keys, -keys, BLOCK_SIZE)


def block_table(
    numbered_pool: BlockPool,
    block_ids: Sequence[int],
    filled: int,
    positions: Sequence[int] | None = None,
) -> BlockTable:
    private = BlockTable(numbered_pool)
    private.block_ids += block_ids
    private.advance(range(100, 100 + filled) if positions is None else positions)
    return private


def contiguous_kv(filled: int, capacity: int = 12) -> ContiguousKV:
    private = ContiguousKV(torch.zeros(1, 1, capacity, 1), torch.zeros(1, 1, capacity, 1))
    private.advance(range(100, 100 + filled))
    return private


def chunk(private: RequestKV, count: int = 1, segments: Sequence[Segment] = ()) -> ScheduledChunk:
    """Its next `count` tokens."""
    start = private.positions[-1] + 1 if private.length else 100
    return ScheduledChunk(tuple(segments), private, [7] * count, range(start, start + count))


def states(length: int, start: int = 0) -> KVStates:
    return KVStates(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), start)


def blocks_of(group: SharedPrefixGroup) -> list[int]:
    """The blocks of a group of the pool."""
    tokens = group.keys.flatten().int().tolist()
    assert group.values.flatten().neg().int().tolist() == tokens
    assert tokens == list(range(tokens[0], tokens[-1] + 1))
    assert tokens[0] % BLOCK_SIZE == 0
    return list(range(tokens[0] // BLOCK_SIZE, tokens[-1] // BLOCK_SIZE + 1))


def private_groups(layout: BatchLayout) -> list[tuple[list[int], Readers]]:
    return [(blocks_of(group), group.readers) for group in layout.groups]


def tails(layout: BatchLayout) -> list[tuple[int, list[int]]]:
    """Row and pool blocks of each."""
    return [(tail.row, [tail.private.block_ids[n] for n in tail.blocks]) for tail in layout.tails]


def test_several_new_tokens_are_a_causal_block(numbered_pool: BlockPool) -> None:
    chunks = [
        chunk(block_table(numbered_pool, [0], 2)),
        chunk(contiguous_kv(0), 3),
        chunk(block_table(numbered_pool, [1], 0), 2),
        chunk(contiguous_kv(5)),
        chunk(block_table(numbered_pool, [2], 0)),
    ]
    layout = lay_out_batch(chunks)
    assert layout.rows == ((0, 1), (1, 4), (4, 6), (6, 7), (7, 8))
    assert layout.causal_blocks == ((1, 4), (4, 6), (6, 7)), (
        "a room has no pages, even for one token"
    )
    assert tails(layout) == [(0, [0]), (7, [2])]


def test_contiguous_states_are_a_group() -> None:
    private = contiguous_kv(5)
    [group] = lay_out_batch([chunk(private, 2)]).groups
    assert group.keys.shape[2] == 5
    assert group.keys.data_ptr() == private.keys.data_ptr()
    assert (group.readers, group.deltas, group.starts) == ([(0, 2)], [0], [100])


def test_prefilling_request_reads_its_partial_block_as_a_group(numbered_pool: BlockPool) -> None:
    layout = lay_out_batch([chunk(block_table(numbered_pool, [3, 7], 6), 2)])
    assert [(group.keys.flatten().tolist(), group.readers) for group in layout.groups] == [
        ([12, 13, 14, 15], [(0, 2)]),
        ([28, 29], [(0, 2)]),
    ]
    assert layout.tails == ()


@pytest.mark.parametrize("filled", [0, 1, 3, 4, 5, 7, 8])
def test_the_partial_block_is_in_the_tail_and_never_in_a_group(
    numbered_pool: BlockPool, filled: int
) -> None:
    """At 4 and 8 tokens the step begins a block."""
    private = block_table(numbered_pool, [3, 4, 5], filled)
    sharer = block_table(numbered_pool, [3, 4, 6], filled // BLOCK_SIZE * BLOCK_SIZE)
    layout = lay_out_batch([chunk(private), chunk(sharer)])
    filling = private.block_ids[filled // BLOCK_SIZE]
    [mine, _] = tails(layout)
    assert mine[1][-1] == filling
    full = private.block_ids[: filled // BLOCK_SIZE]
    assert [each for group in layout.groups for each in blocks_of(group)] == full
    assert mine[1] == [filling], "full blocks are shared here"


def test_a_tail_is_every_short_span_and_the_filling_block(numbered_pool: BlockPool) -> None:
    private = block_table(numbered_pool, [3, 7, 5], 10)
    layout = lay_out_batch([chunk(private)])
    assert layout.tails == (DecodeTail(0, private, (0, 1, 2)),)
    assert layout.groups == ()


LONG_IDS = list(range(8, 8 + LONG_SPAN))
LONG_TOKENS = LONG_SPAN * BLOCK_SIZE
LONG_GAPS = [*range(6), *range(40, 40 + LONG_TOKENS - 6)]


@dataclass(frozen=True)
class Layout:
    """Requests as (blocks, filled tokens or their positions, new tokens), and what is laid out:
    groups as (blocks, readers), tails as (row, blocks)."""

    requests: list[tuple[list[int], int | list[int], int]]
    groups: list[tuple[list[int], Readers]]
    tails: list[tuple[int, list[int]]]
    gapless: bool = False


LAYOUTS = {
    "shared blocks are one group for their readers": Layout(
        [([0, 1, 5], 10, 1), ([0, 1, 8], 9, 1), ([9], 2, 1)],
        [([0, 1], [(0, 1), (1, 2)])],
        [(0, [5]), (1, [8]), (2, [9])],
    ),
    "also where positions have to be gapless": Layout(
        [([0, 1, 5], 10, 1), ([0, 1, 8], 9, 1)],
        [([0, 1], [(0, 1), (1, 2)])],
        [(0, [5]), (1, [8])],
        gapless=True,
    ),
    "a prefilling and a decoding request share": Layout(
        [([0, 1, 5], 8, 3), ([0, 1, 8], 9, 1)], [([0, 1], [(0, 3), (3, 4)])], [(3, [8])]
    ),
    "blocks that are no neighbors are groups of their own": Layout(
        [([0, 2, 1, 5], 12, 1), ([0, 2, 1, 8], 13, 1)],
        [([0], [(0, 1), (1, 2)]), ([2], [(0, 1), (1, 2)]), ([1], [(0, 1), (1, 2)])],
        [(0, [5]), (1, [8])],
    ),
    "a tree has a trunk for all, a branch for two, and leaves (Hydragen §3.3)": Layout(
        [([0, 1, 2, 3], 16, 2), ([0, 1, 2, 4], 16, 2), ([0, 1, 6], 12, 3)],
        [
            ([0, 1], [(0, 2), (2, 4), (4, 7)]),
            ([2], [(0, 2), (2, 4)]),
            ([3], [(0, 2)]),
            ([4], [(2, 4)]),
            ([6], [(4, 7)]),
        ],
        [],
    ),
    "the leaves of a decoding tree are tails": Layout(
        [([0, 1, 2, 3], 14, 1), ([0, 1, 2, 4, 9], 17, 1), ([0, 6], 7, 1)],
        [([0], [(0, 1), (1, 2), (2, 3)]), ([1, 2], [(0, 1), (1, 2)])],
        [(0, [3]), (1, [4, 9]), (2, [6])],
    ),
    "a long span of one request is a group": Layout(
        [([*LONG_IDS, 15], LONG_TOKENS + 1, 1)], [(LONG_IDS, [(0, 1)])], [(0, [15])]
    ),
    "a long span whose last block still fills is a tail": Layout(
        [(LONG_IDS, LONG_TOKENS - 1, 1)], [], [(0, LONG_IDS)]
    ),
    "a short span beside a long one stays in the tail": Layout(
        [([2, *LONG_IDS, 5, 17], LONG_TOKENS + 2 * BLOCK_SIZE + 1, 1)],
        [(LONG_IDS, [(0, 1)])],
        [(0, [2, 5, 17])],
    ),
    "gapless blocks of one decoding request are a tail, however long": Layout(
        [([*LONG_IDS, 15], LONG_GAPS, 1)], [], [(0, [*LONG_IDS, 15])], gapless=True
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_private_blocks_are_laid_out_as_groups_and_tails(
    numbered_pool: BlockPool, name: str
) -> None:
    case = LAYOUTS[name]
    chunks = []
    for ids, filled, count in case.requests:
        positions = None if isinstance(filled, int) else filled
        length = filled if isinstance(filled, int) else len(filled)
        chunks.append(chunk(block_table(numbered_pool, ids, length, positions), count))
    layout = lay_out_batch(chunks, gapless=case.gapless)
    assert private_groups(layout) == case.groups
    assert tails(layout) == case.tails
    assert all(set(g.deltas) == {0} and set(g.starts) == {g.starts[0]} for g in layout.groups)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 1, 2, 3, 9, 10, 11, 12], [((0, 4), 0), ((4, 8), 9)]),
        ([0, 1, 5, 6, 7, 8, 9, 10], [((0, 2), 0), ((2, 8), 5)]),
        ([0, 1, 2, 3, 4, 5, 9, 10], [((0, 6), 0), ((6, 8), 9)]),
        ([0, 2, 4, 5, 6, 7, 8, 20], [((0, 1), 0), ((1, 2), 2), ((2, 7), 4), ((7, 8), 20)]),
    ],
)
def test_gapless_groups_are_cut_at_gaps_between_positions(
    numbered_pool: BlockPool, positions: list[int], expected: list[tuple[tuple[int, int], int]]
) -> None:
    for count in (1, 2):
        chunks = [
            chunk(block_table(numbered_pool, [0, 1, 5], 8, positions), count),
            chunk(block_table(numbered_pool, [0, 1, 6], 8, positions), count),
        ]
        layout = lay_out_batch(chunks, gapless=True)
        found = [(group.keys.flatten().int().tolist(), group.starts) for group in layout.groups]
        assert found == [(list(range(*tokens)), [at, at]) for tokens, at in expected]
        assert all(group.readers == [(0, count), (count, 2 * count)] for group in layout.groups)
        assert len(lay_out_batch(chunks).groups) == 1, "other schemes do not mind"


def test_gapless_contiguous_states_are_cut_too() -> None:
    private = contiguous_kv(0)
    private.advance([0, 1, 5, 6, 7])
    layout = lay_out_batch([chunk(private, 2)], gapless=True)
    assert [(group.keys.shape[2], group.starts) for group in layout.groups] == [(2, [0]), (3, [5])]


def test_segments_are_groups_by_the_memory_that_they_read(numbered_pool: BlockPool) -> None:
    one, other = states(8), states(8)
    chunks = [
        chunk(block_table(numbered_pool, [0], 0), 2, [Segment(one, 0), Segment(other, 8)]),
        chunk(block_table(numbered_pool, [1], 0), 1, [Segment(other, 0)]),
        chunk(block_table(numbered_pool, [2], 0), 1, [Segment(other, 20), Segment(one, 40)]),
    ]
    of_one, of_other = lay_out_batch(chunks).groups
    assert of_one.keys is one.keys
    assert of_one.values is one.values
    assert (of_one.readers, of_one.deltas, of_one.starts) == ([(0, 2), (3, 4)], [0, 40], [0, 40])
    assert of_other.readers == [(0, 2), (2, 3), (3, 4)]
    assert (of_other.deltas, of_other.starts) == ([8, 0, 20], [8, 0, 20])


def test_views_of_one_modules_states_are_one_group(numbered_pool: BlockPool) -> None:
    whole = states(12, start=10)
    parts = [whole.part(4, 9, 14), whole.part(4, 9, 14), whole.part(4, 8, 14), whole.part(0, 5, 10)]
    chunks = [
        chunk(block_table(numbered_pool, [n], 0), 1, [Segment(part, 20)])
        for n, part in enumerate(parts)
    ]
    layout = lay_out_batch(chunks)
    assert [(group.readers, group.keys.shape[2]) for group in layout.groups] == [
        ([(0, 1), (1, 2)], 5),
        ([(2, 3)], 4),
        ([(3, 4)], 5),
    ]


def test_a_segment_that_no_token_sees_is_left_out() -> None:
    unseen = Segment(states(4), 50)
    given = ScheduledChunk((unseen,), contiguous_kv(0), [7, 7], [48, 49])
    assert lay_out_batch([given]).groups == ()
    seeing = ScheduledChunk((unseen,), contiguous_kv(0), [7, 7], [54, 55])
    [group] = lay_out_batch([given, seeing]).groups
    assert group.readers == [(2, 4)]
