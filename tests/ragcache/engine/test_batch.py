"""Ragged steps: tokens in one row, and the plan over them."""

# MERGED tests.ragcache.engine.test_layout: Who reads what: which states are one run, for whom,
#   and what is left to pages.

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ragcache.attention import CausalBlock, PageWrite, Rotation, RunWrite
from ragcache.engine import Segment
from ragcache.engine.batch import (
    LONG,
    DecodeTail,
    Layout,
    ScheduledChunk,
    SharedPrefixGroup,
    StepBuilder,
    lay_out,
)
from ragcache.engine.kv_cache import BlockPool, BlockTable, ContiguousKV, RequestKV
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.ragcache.engine.asked import (
    CHUNK,
    CLOSE,
    as_alone,
    in_pages,
    in_room,
    module,
    small_pool,
    together,
)


@pytest.fixture
def pool(causal: CausalLM) -> BlockPool:
    return small_pool(causal)


def test_the_works_are_flattened_in_order(causal: CausalLM) -> None:
    works = [
        in_room(causal, [], [4, 5, 9]),
        in_room(causal, [], [7], wants_logits=False),
        in_room(causal, [], [0, 1]),
    ]
    step = StepBuilder(causal).build(works)
    assert step.token_ids.tolist() == [t for w in works for t in w.token_ids]
    assert step.position_ids.tolist() == [4, 5, 9, 7, 0, 1]
    assert step.logit_rows.tolist() == [2, 5], "the last row of each work that asks"
    assert step.plan.squares == (CausalBlock(0, 3), CausalBlock(3, 4), CausalBlock(4, 6))
    assert (step.plan.asking, step.plan.runs, step.plan.pages) == (None, (), None)
    assert step.plan.table.shape == (0, 6)
    assert step.plan.own is None, "squares in the order of the rows"


def test_paged_rows_before_squares_are_put_in_order(causal: CausalLM, pool: BlockPool) -> None:
    first, last = (in_pages(causal, pool, 3, seed) for seed in (1, 2))
    works = [first.work(), in_room(causal, [], [0, 1]), last.work()]
    plan = StepBuilder(causal).build(works).plan
    assert plan.pages is not None
    assert plan.pages.rows.tolist() == [0, 3]
    assert plan.own is not None
    assert plan.own.tolist() == [2, 0, 1, 3]


def test_runs_are_asked_by_their_readers_and_found_by_the_table(causal: CausalLM) -> None:
    a, b = module(causal, 8), module(causal, 5)
    works = [
        in_room(causal, [Segment(a, 0), Segment(b, 8)], [13, 14]),
        in_room(causal, [], [0]),
        in_room(causal, [Segment(b, 0), Segment(a, 5)], [13]),
    ]
    plan = StepBuilder(causal).build(works).plan
    assert plan.asking is not None
    assert plan.asking.rows.tolist() == [0, 1, 3, 0, 1, 3]
    assert [(run.begin, run.end) for run in plan.runs] == [(0, 3), (3, 6)]
    assert [run.keys is states.keys for run, states in zip(plan.runs, (a, b), strict=True)]
    assert plan.table.tolist() == [[0, 1, 6, 2], [3, 4, 6, 5]]


def test_an_unmoved_segment_turns_no_query(causal: CausalLM) -> None:
    states = module(causal, 6, start=20)
    plan = StepBuilder(causal).build([in_room(causal, [Segment(states, 20)], [26, 27])]).plan
    assert plan.asking is not None
    assert plan.asking.rotation is None
    assert plan.asking.distance is None, "that is for ALiBi"


def test_every_asking_row_turns_as_its_run_was_moved(causal: CausalLM) -> None:
    states = module(causal, 6, start=20)
    works = [
        in_room(causal, [Segment(states, 3)], [9, 10]),
        in_room(causal, [Segment(states, 20)], [26]),
    ]
    asking = StepBuilder(causal).build(works).plan.asking
    assert asking is not None
    assert asking.rotation is not None
    expected = causal.scheme.relocation(torch.tensor([-17, -17, 0]))
    assert isinstance(expected, Rotation)
    torch.testing.assert_close(asking.rotation.sin, expected.sin[:, None])
    torch.testing.assert_close(asking.rotation.cos, expected.cos[:, None])


def test_states_are_grouped_by_memory_not_by_content(causal: CausalLM) -> None:
    one = module(causal, 6)
    twin = KVStates(one.keys.clone(), one.values.clone(), one.start)
    works = [in_room(causal, [Segment(states, 0)], [6]) for states in (one, twin, one)]
    plan = StepBuilder(causal).build(works).plan
    assert plan.asking is not None
    assert plan.asking.rows.tolist() == [0, 2, 1]
    assert [run.keys is states.keys for run, states in zip(plan.runs, (one, twin), strict=True)]


def test_pages_are_written_at_once_and_every_room_by_itself(
    causal: CausalLM, pool: BlockPool
) -> None:
    a, b = (in_pages(causal, pool, 3, seed) for seed in (1, 2))
    [for_all] = StepBuilder(causal).build([a.work(), b.work(3)]).plan.writes
    assert isinstance(for_all, PageWrite)
    assert for_all.rows is None, "all rows of the step"
    assert for_all.index.tolist() == [0, 4, 5, 6]
    rooms = [in_room(causal, [], [0, 1]), in_room(causal, [], [5])]
    writes = StepBuilder(causal).build([rooms[0], b.work(2), rooms[1], a.work()]).plan.writes
    assert [(w.begin, w.end) for w in writes if isinstance(w, RunWrite)] == [(0, 2), (4, 5)]
    [paged] = [w for w in writes if isinstance(w, PageWrite)]
    assert paged.rows is not None
    assert (paged.rows.tolist(), paged.index.tolist()) == ([2, 3, 5], [4, 5, 0])


def test_a_room_takes_no_more_than_its_capacity(causal: CausalLM) -> None:
    given = in_room(causal, [], [0, 1, 2])
    given.private.advance([0, 1])
    [write] = StepBuilder(causal).build([ScheduledChunk((), given.private, [7], [2])]).plan.writes
    assert isinstance(write, RunWrite)
    assert (write.past, write.begin, write.end) == (2, 0, 1)
    with pytest.raises(AssertionError):
        StepBuilder(causal).build([ScheduledChunk((), given.private, [7, 8], [2, 3])])


def test_a_token_before_a_gap_answers_as_if_the_later_segment_were_absent(
    causal: CausalLM,
) -> None:
    early, late = Segment(module(causal, 4), 0), Segment(module(causal, 5, start=6), 6)

    def logits(segments: Sequence[Segment], positions: Sequence[int]) -> Tensor:
        return causal.forward(StepBuilder(causal).build([in_room(causal, segments, positions)]))

    with_late = logits([early, late], [4, 5])
    torch.testing.assert_close(with_late, logits([early], [4, 5]), **CLOSE)
    behind, alone = logits([early, late], [11, 12]), logits([early], [11, 12])
    assert not torch.allclose(behind, alone, atol=1e-3), "a token behind it does see it"


def test_what_another_request_left_in_its_chunk_is_never_read(
    causal: CausalLM, pool: BlockPool
) -> None:
    """A row with fewer pages than its neighbors is filled up with a page that is hidden: states
    that are not finite, of whomever, must not reach it."""
    broken = in_pages(causal, pool, CHUNK, seed=1)
    assert isinstance(broken.private, BlockTable)
    asked = [in_pages(causal, pool, count, seed=count) for count in (3, 11)]
    together(StepBuilder(causal), asked, [2, 10])
    pool.keys[:, :, : CHUNK * (broken.private.chunk_ids[0] + 1)] = torch.inf
    pool.values[:, :, : CHUNK * (broken.private.chunk_ids[0] + 1)] = torch.nan
    as_alone(together(StepBuilder(causal), asked), asked)


CHUNK_layout = 4
Readers = list[tuple[int, int]]


@pytest.fixture
def pool_layout() -> BlockPool:
    """Every token's states hold its number in the pool."""
    keys = torch.arange(20.0 * CHUNK_layout).view(1, 1, -1, 1)
    return BlockPool(keys, -keys, CHUNK_layout)


def pages(
    pool_layout: BlockPool,
    chunk_ids: Sequence[int],
    filled: int,
    positions: Sequence[int] | None = None,
) -> BlockTable:
    private = BlockTable(pool_layout)
    private.chunk_ids += chunk_ids
    private.advance(range(100, 100 + filled) if positions is None else positions)
    return private


def room(filled: int, capacity: int = 12) -> ContiguousKV:
    private = ContiguousKV(torch.zeros(1, 1, capacity, 1), torch.zeros(1, 1, capacity, 1))
    private.advance(range(100, 100 + filled))
    return private


def work(private: RequestKV, count: int = 1, segments: Sequence[Segment] = ()) -> ScheduledChunk:
    """Its next `count` tokens."""
    start = private.positions[-1] + 1 if private.length else 100
    return ScheduledChunk(tuple(segments), private, [7] * count, range(start, start + count))


def states(length: int, start: int = 0) -> KVStates:
    return KVStates(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), start)


def chunks(run: SharedPrefixGroup) -> list[int]:
    """The chunks of a run of the pool."""
    tokens = run.keys.flatten().int().tolist()
    assert run.values.flatten().neg().int().tolist() == tokens
    assert tokens == list(range(tokens[0], tokens[-1] + 1))
    assert tokens[0] % CHUNK_layout == 0
    return list(range(tokens[0] // CHUNK_layout, tokens[-1] // CHUNK_layout + 1))


def private_runs(layout: Layout) -> list[tuple[list[int], Readers]]:
    return [(chunks(run), run.readers) for run in layout.runs]


def tails(layout: Layout) -> list[tuple[int, list[int]]]:
    """Row and pool chunks of each."""
    return [(tail.row, [tail.private.chunk_ids[n] for n in tail.chunks]) for tail in layout.tails]


def test_rows_follow_one_another_and_several_new_tokens_are_a_square(
    pool_layout: BlockPool,
) -> None:
    works = [
        work(pages(pool_layout, [0], 2)),
        work(room(0), 3),
        work(pages(pool_layout, [1], 0), 2),
        work(room(5)),
        work(pages(pool_layout, [2], 0)),
    ]
    layout = lay_out(works)
    assert layout.rows == ((0, 1), (1, 4), (4, 6), (6, 7), (7, 8))
    assert layout.squares == ((1, 4), (4, 6), (6, 7)), "a room has no pages, even for one token"
    assert tails(layout) == [(0, [0]), (7, [2])]


def test_a_room_is_a_run_behind_its_square() -> None:
    private = room(5)
    [run] = lay_out([work(private, 2)]).runs
    assert run.keys.shape[2] == 5
    assert run.keys.data_ptr() == private.keys.data_ptr()
    assert (run.readers, run.deltas, run.starts) == ([(0, 2)], [0], [100])


def test_a_prefilling_request_reads_its_filling_chunk_as_a_run(pool_layout: BlockPool) -> None:
    layout = lay_out([work(pages(pool_layout, [3, 7], 6), 2)])
    assert [(run.keys.flatten().tolist(), run.readers) for run in layout.runs] == [
        ([12, 13, 14, 15], [(0, 2)]),
        ([28, 29], [(0, 2)]),
    ]
    assert layout.tails == ()


@pytest.mark.parametrize("filled", [0, 1, 3, 4, 5, 7, 8])
def test_the_chunk_that_fills_is_in_the_tail_and_never_in_a_run(
    pool_layout: BlockPool, filled: int
) -> None:
    """At 4 and 8 tokens the step begins a chunk."""
    private = pages(pool_layout, [3, 4, 5], filled)
    sharer = pages(pool_layout, [3, 4, 6], filled // CHUNK_layout * CHUNK_layout)
    layout = lay_out([work(private), work(sharer)])
    filling = private.chunk_ids[filled // CHUNK_layout]
    [mine, _] = tails(layout)
    assert mine[1][-1] == filling
    full = private.chunk_ids[: filled // CHUNK_layout]
    assert [each for run in layout.runs for each in chunks(run)] == full
    assert mine[1] == [filling], "full chunks are shared here"


def test_a_tail_is_every_short_stretch_and_the_filling_chunk(pool_layout: BlockPool) -> None:
    private = pages(pool_layout, [3, 7, 5], 10)
    layout = lay_out([work(private)])
    assert layout.tails == (DecodeTail(0, private, (0, 1, 2)),)
    assert layout.runs == ()


def test_shared_chunks_are_one_run_for_their_readers(pool_layout: BlockPool) -> None:
    mine, yours = pages(pool_layout, [0, 1, 5], 10), pages(pool_layout, [0, 1, 8], 9)
    layout = lay_out([work(mine), work(yours), work(pages(pool_layout, [9], 2))])
    assert private_runs(layout) == [([0, 1], [(0, 1), (1, 2)])]
    assert (layout.runs[0].deltas, layout.runs[0].starts) == ([0, 0], [100, 100])
    assert tails(layout) == [(0, [5]), (1, [8]), (2, [9])]


def test_a_prefilling_and_a_decoding_request_share(pool_layout: BlockPool) -> None:
    layout = lay_out(
        [work(pages(pool_layout, [0, 1, 5], 8), 3), work(pages(pool_layout, [0, 1, 8], 9))]
    )
    assert private_runs(layout) == [([0, 1], [(0, 3), (3, 4)])]
    turned = lay_out(
        [work(pages(pool_layout, [0, 1, 8], 9)), work(pages(pool_layout, [0, 1, 5], 8), 3)]
    )
    assert private_runs(turned) == [([0, 1], [(0, 1), (1, 4)])]


def test_chunks_that_are_not_neighbors_are_runs_of_their_own(pool_layout: BlockPool) -> None:
    layout = lay_out(
        [work(pages(pool_layout, [0, 2, 1, 5], 12)), work(pages(pool_layout, [0, 2, 1, 8], 13))]
    )
    both = [(0, 1), (1, 2)]
    assert private_runs(layout) == [([0], both), ([2], both), ([1], both)]


def test_a_tree_of_three_requests_gives_the_runs_of_the_tree(pool_layout: BlockPool) -> None:
    """Hydragen §3.3: a trunk for all, a branch for two, and their leaves."""
    layout = lay_out(
        [
            work(pages(pool_layout, [0, 1, 2, 3], 16), 2),
            work(pages(pool_layout, [0, 1, 2, 4], 16), 2),
            work(pages(pool_layout, [0, 1, 6], 12), 3),
        ]
    )
    assert private_runs(layout) == [
        ([0, 1], [(0, 2), (2, 4), (4, 7)]),
        ([2], [(0, 2), (2, 4)]),
        ([3], [(0, 2)]),
        ([4], [(2, 4)]),
        ([6], [(4, 7)]),
    ]


def test_a_decoding_tree_leaves_its_leaves_to_pages(pool_layout: BlockPool) -> None:
    layout = lay_out(
        [
            work(pages(pool_layout, [0, 1, 2, 3], 14)),
            work(pages(pool_layout, [0, 1, 2, 4, 9], 17)),
            work(pages(pool_layout, [0, 6], 7)),
        ]
    )
    assert private_runs(layout) == [
        ([0], [(0, 1), (1, 2), (2, 3)]),
        ([1, 2], [(0, 1), (1, 2)]),
    ]
    assert tails(layout) == [(0, [3]), (1, [4, 9]), (2, [6])]


def test_a_long_stretch_of_one_request_is_a_run(pool_layout: BlockPool) -> None:
    ids = list(range(3, 3 + LONG))
    layout = lay_out([work(pages(pool_layout, [*ids, 12], LONG * CHUNK_layout + 1))])
    assert private_runs(layout) == [(ids, [(0, 1)])]
    assert tails(layout) == [(0, [12])]


def test_a_long_stretch_does_not_hold_the_filling_chunk(pool_layout: BlockPool) -> None:
    """LONG chunks in a row, of which the last still fills: all are pages."""
    ids = list(range(3, 3 + LONG))
    layout = lay_out([work(pages(pool_layout, ids, LONG * CHUNK_layout - 1))])
    assert layout.runs == ()
    assert tails(layout) == [(0, ids)]


def test_a_short_stretch_beside_a_long_one_stays_in_pages(pool_layout: BlockPool) -> None:
    long = list(range(8, 8 + LONG))
    layout = lay_out([work(pages(pool_layout, [2, *long, 5, 17], (LONG + 2) * CHUNK_layout + 1))])
    assert private_runs(layout) == [(long, [(0, 1)])]
    assert tails(layout) == [(0, [2, 5, 17])]


def test_without_gaps_nothing_is_cut(pool_layout: BlockPool) -> None:
    works = [work(pages(pool_layout, [0, 1, 5], 10)), work(pages(pool_layout, [0, 1, 8], 9))]
    assert private_runs(lay_out(works, gapless=True)) == [([0, 1], [(0, 1), (1, 2)])]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 1, 2, 3, 9, 10, 11, 12], [((0, 4), 0), ((4, 8), 9)]),
        ([0, 1, 5, 6, 7, 8, 9, 10], [((0, 2), 0), ((2, 8), 5)]),
        ([0, 1, 2, 3, 4, 5, 9, 10], [((0, 6), 0), ((6, 8), 9)]),
        ([0, 2, 4, 5, 6, 7, 8, 20], [((0, 1), 0), ((1, 2), 2), ((2, 7), 4), ((7, 8), 20)]),
    ],
)
def test_gapless_runs_are_cut_at_gaps_between_positions(
    pool_layout: BlockPool, positions: list[int], expected: list[tuple[tuple[int, int], int]]
) -> None:
    for count in (1, 2):
        works = [
            work(pages(pool_layout, [0, 1, 5], 8, positions), count),
            work(pages(pool_layout, [0, 1, 6], 8, positions), count),
        ]
        layout = lay_out(works, gapless=True)
        found = [(run.keys.flatten().int().tolist(), run.starts) for run in layout.runs]
        assert found == [(list(range(*tokens)), [at, at]) for tokens, at in expected]
        assert all(run.readers == [(0, count), (count, 2 * count)] for run in layout.runs)
        assert len(lay_out(works).runs) == 1, "other schemes do not mind"


def test_gapless_rooms_are_cut_too() -> None:
    private = room(0)
    private.advance([0, 1, 5, 6, 7])
    layout = lay_out([work(private, 2)], gapless=True)
    assert [(run.keys.shape[2], run.starts) for run in layout.runs] == [(2, [0]), (3, [5])]


def test_gapless_chunks_of_one_decoding_request_stay_in_pages_however_long(
    pool_layout: BlockPool,
) -> None:
    ids = list(range(3, 3 + LONG + 1))
    gaps = [*range(6), *range(40, 40 + LONG * CHUNK_layout - 6)]
    layout = lay_out([work(pages(pool_layout, ids, len(gaps), gaps))], gapless=True)
    assert layout.runs == ()
    assert tails(layout) == [(0, ids)], "each chunk once"


def test_segments_are_runs_by_the_memory_that_they_read(pool_layout: BlockPool) -> None:
    one, other = states(8), states(8)
    works = [
        work(pages(pool_layout, [0], 0), 2, [Segment(one, 0), Segment(other, 8)]),
        work(pages(pool_layout, [1], 0), 1, [Segment(other, 0)]),
        work(pages(pool_layout, [2], 0), 1, [Segment(other, 20), Segment(one, 40)]),
    ]
    of_one, of_other = lay_out(works).runs
    assert of_one.keys is one.keys
    assert of_one.values is one.values
    assert (of_one.readers, of_one.deltas, of_one.starts) == ([(0, 2), (3, 4)], [0, 40], [0, 40])
    assert of_other.readers == [(0, 2), (2, 3), (3, 4)]
    assert (of_other.deltas, of_other.starts) == ([8, 0, 20], [8, 0, 20])


def test_a_segment_is_moved_from_where_it_was_encoded(pool_layout: BlockPool) -> None:
    [run] = lay_out([work(pages(pool_layout, [0], 0), 2, [Segment(states(5, start=30), 12)])]).runs
    assert (run.deltas, run.starts) == ([-18], [12])


def test_views_of_one_modules_states_are_one_run(pool_layout: BlockPool) -> None:
    whole = states(12, start=10)
    parts = [whole.part(4, 9, 14), whole.part(4, 9, 14), whole.part(4, 8, 14), whole.part(0, 5, 10)]
    works = [
        work(pages(pool_layout, [n], 0), 1, [Segment(part, 20)]) for n, part in enumerate(parts)
    ]
    layout = lay_out(works)
    assert [(run.readers, run.keys.shape[2]) for run in layout.runs] == [
        ([(0, 1), (1, 2)], 5),
        ([(2, 3)], 4),
        ([(3, 4)], 5),
    ]


def test_one_module_twice_in_a_prompt_is_asked_twice(pool_layout: BlockPool) -> None:
    twice = states(8)
    segments = [Segment(twice, 0), Segment(twice, 8)]
    [run] = lay_out([work(pages(pool_layout, [0], 0), 2, segments)]).runs
    assert (run.readers, run.deltas) == ([(0, 2), (0, 2)], [0, 8])


def test_a_token_does_not_see_a_segment_that_starts_after_it() -> None:
    early, late = Segment(states(4), 0), Segment(states(4), 6)
    given = ScheduledChunk((early, late), room(0), [7] * 5, [4, 5, 6, 10, 11])
    of_early, of_late = lay_out([work(room(0), 2), given]).runs
    assert of_early.readers == [(2, 7)]
    assert of_late.readers == [(4, 7)], "it starts at the third token's position"


def test_a_segment_that_no_token_sees_is_left_out() -> None:
    unseen = Segment(states(4), 50)
    given = ScheduledChunk((unseen,), room(0), [7, 7], [48, 49])
    assert lay_out([given]).runs == ()
    seeing = ScheduledChunk((unseen,), room(0), [7, 7], [54, 55])
    [run] = lay_out([given, seeing]).runs
    assert run.readers == [(2, 4)]
