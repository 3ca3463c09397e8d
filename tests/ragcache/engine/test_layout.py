"""Who reads what: which states are one run, for whom, and what is left to pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ragcache.engine.context import Segment
from ragcache.engine.layout import LONG, Layout, Run, Tail, Work, lay_out
from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import Pages, PrivateStates, Room
from ragcache.states import KVStates

CHUNK = 4
Readers = list[tuple[int, int]]


@pytest.fixture
def pool() -> ChunkPool:
    """Every token's states hold its number in the pool."""
    keys = torch.arange(20.0 * CHUNK).view(1, 1, -1, 1)
    return ChunkPool(keys, -keys, CHUNK)


def pages(
    pool: ChunkPool, chunk_ids: Sequence[int], filled: int, positions: Sequence[int] | None = None
) -> Pages:
    private = Pages(pool)
    private.chunk_ids += chunk_ids
    private.advance(range(100, 100 + filled) if positions is None else positions)
    return private


def room(filled: int, capacity: int = 12) -> Room:
    private = Room(torch.zeros(1, 1, capacity, 1), torch.zeros(1, 1, capacity, 1))
    private.advance(range(100, 100 + filled))
    return private


def work(private: PrivateStates, count: int = 1, segments: Sequence[Segment] = ()) -> Work:
    """Its next `count` tokens."""
    start = private.positions[-1] + 1 if private.length else 100
    return Work(tuple(segments), private, [7] * count, range(start, start + count))


def states(length: int, start: int = 0) -> KVStates:
    return KVStates(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), start)


def chunks(run: Run) -> list[int]:
    """The chunks of a run of the pool."""
    tokens = run.keys.flatten().int().tolist()
    assert run.values.flatten().neg().int().tolist() == tokens
    assert tokens == list(range(tokens[0], tokens[-1] + 1))
    assert tokens[0] % CHUNK == 0
    return list(range(tokens[0] // CHUNK, tokens[-1] // CHUNK + 1))


def private_runs(layout: Layout) -> list[tuple[list[int], Readers]]:
    return [(chunks(run), run.readers) for run in layout.runs]


def tails(layout: Layout) -> list[tuple[int, list[int]]]:
    """Row and pool chunks of each."""
    return [(tail.row, [tail.private.chunk_ids[n] for n in tail.chunks]) for tail in layout.tails]


def test_rows_follow_one_another_and_several_new_tokens_are_a_square(pool: ChunkPool) -> None:
    works = [
        work(pages(pool, [0], 2)),
        work(room(0), 3),
        work(pages(pool, [1], 0), 2),
        work(room(5)),
        work(pages(pool, [2], 0)),
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


def test_a_prefilling_request_reads_its_filling_chunk_as_a_run(pool: ChunkPool) -> None:
    layout = lay_out([work(pages(pool, [3, 7], 6), 2)])
    assert [(run.keys.flatten().tolist(), run.readers) for run in layout.runs] == [
        ([12, 13, 14, 15], [(0, 2)]),
        ([28, 29], [(0, 2)]),
    ]
    assert layout.tails == ()


@pytest.mark.parametrize("filled", [0, 1, 3, 4, 5, 7, 8])
def test_the_chunk_that_fills_is_in_the_tail_and_never_in_a_run(
    pool: ChunkPool, filled: int
) -> None:
    """At 4 and 8 tokens the step begins a chunk."""
    private = pages(pool, [3, 4, 5], filled)
    sharer = pages(pool, [3, 4, 6], filled // CHUNK * CHUNK)
    layout = lay_out([work(private), work(sharer)])
    filling = private.chunk_ids[filled // CHUNK]
    [mine, _] = tails(layout)
    assert mine[1][-1] == filling
    full = private.chunk_ids[: filled // CHUNK]
    assert [each for run in layout.runs for each in chunks(run)] == full
    assert mine[1] == [filling], "full chunks are shared here"


def test_a_tail_is_every_short_stretch_and_the_filling_chunk(pool: ChunkPool) -> None:
    private = pages(pool, [3, 7, 5], 10)
    layout = lay_out([work(private)])
    assert layout.tails == (Tail(0, private, (0, 1, 2)),)
    assert layout.runs == ()


def test_shared_chunks_are_one_run_for_their_readers(pool: ChunkPool) -> None:
    mine, yours = pages(pool, [0, 1, 5], 10), pages(pool, [0, 1, 8], 9)
    layout = lay_out([work(mine), work(yours), work(pages(pool, [9], 2))])
    assert private_runs(layout) == [([0, 1], [(0, 1), (1, 2)])]
    assert (layout.runs[0].deltas, layout.runs[0].starts) == ([0, 0], [100, 100])
    assert tails(layout) == [(0, [5]), (1, [8]), (2, [9])]


def test_a_prefilling_and_a_decoding_request_share(pool: ChunkPool) -> None:
    layout = lay_out([work(pages(pool, [0, 1, 5], 8), 3), work(pages(pool, [0, 1, 8], 9))])
    assert private_runs(layout) == [([0, 1], [(0, 3), (3, 4)])]
    turned = lay_out([work(pages(pool, [0, 1, 8], 9)), work(pages(pool, [0, 1, 5], 8), 3)])
    assert private_runs(turned) == [([0, 1], [(0, 1), (1, 4)])]


def test_chunks_that_are_not_neighbors_are_runs_of_their_own(pool: ChunkPool) -> None:
    layout = lay_out([work(pages(pool, [0, 2, 1, 5], 12)), work(pages(pool, [0, 2, 1, 8], 13))])
    both = [(0, 1), (1, 2)]
    assert private_runs(layout) == [([0], both), ([2], both), ([1], both)]


def test_a_tree_of_three_requests_gives_the_runs_of_the_tree(pool: ChunkPool) -> None:
    """Hydragen §3.3: a trunk for all, a branch for two, and their leaves."""
    layout = lay_out(
        [
            work(pages(pool, [0, 1, 2, 3], 16), 2),
            work(pages(pool, [0, 1, 2, 4], 16), 2),
            work(pages(pool, [0, 1, 6], 12), 3),
        ]
    )
    assert private_runs(layout) == [
        ([0, 1], [(0, 2), (2, 4), (4, 7)]),
        ([2], [(0, 2), (2, 4)]),
        ([3], [(0, 2)]),
        ([4], [(2, 4)]),
        ([6], [(4, 7)]),
    ]


def test_a_decoding_tree_leaves_its_leaves_to_pages(pool: ChunkPool) -> None:
    layout = lay_out(
        [
            work(pages(pool, [0, 1, 2, 3], 14)),
            work(pages(pool, [0, 1, 2, 4, 9], 17)),
            work(pages(pool, [0, 6], 7)),
        ]
    )
    assert private_runs(layout) == [
        ([0], [(0, 1), (1, 2), (2, 3)]),
        ([1, 2], [(0, 1), (1, 2)]),
    ]
    assert tails(layout) == [(0, [3]), (1, [4, 9]), (2, [6])]


def test_a_long_stretch_of_one_request_is_a_run(pool: ChunkPool) -> None:
    ids = list(range(3, 3 + LONG))
    layout = lay_out([work(pages(pool, [*ids, 12], LONG * CHUNK + 1))])
    assert private_runs(layout) == [(ids, [(0, 1)])]
    assert tails(layout) == [(0, [12])]


def test_a_long_stretch_does_not_hold_the_filling_chunk(pool: ChunkPool) -> None:
    """LONG chunks in a row, of which the last still fills: all are pages."""
    ids = list(range(3, 3 + LONG))
    layout = lay_out([work(pages(pool, ids, LONG * CHUNK - 1))])
    assert layout.runs == ()
    assert tails(layout) == [(0, ids)]


def test_a_short_stretch_beside_a_long_one_stays_in_pages(pool: ChunkPool) -> None:
    long = list(range(8, 8 + LONG))
    layout = lay_out([work(pages(pool, [2, *long, 5, 17], (LONG + 2) * CHUNK + 1))])
    assert private_runs(layout) == [(long, [(0, 1)])]
    assert tails(layout) == [(0, [2, 5, 17])]


def test_without_gaps_nothing_is_cut(pool: ChunkPool) -> None:
    works = [work(pages(pool, [0, 1, 5], 10)), work(pages(pool, [0, 1, 8], 9))]
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
    pool: ChunkPool, positions: list[int], expected: list[tuple[tuple[int, int], int]]
) -> None:
    for count in (1, 2):
        works = [
            work(pages(pool, [0, 1, 5], 8, positions), count),
            work(pages(pool, [0, 1, 6], 8, positions), count),
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
    pool: ChunkPool,
) -> None:
    ids = list(range(3, 3 + LONG + 1))
    gaps = [*range(6), *range(40, 40 + LONG * CHUNK - 6)]
    layout = lay_out([work(pages(pool, ids, len(gaps), gaps))], gapless=True)
    assert layout.runs == ()
    assert tails(layout) == [(0, ids)], "each chunk once"


def test_segments_are_runs_by_the_memory_that_they_read(pool: ChunkPool) -> None:
    one, other = states(8), states(8)
    works = [
        work(pages(pool, [0], 0), 2, [Segment(one, 0), Segment(other, 8)]),
        work(pages(pool, [1], 0), 1, [Segment(other, 0)]),
        work(pages(pool, [2], 0), 1, [Segment(other, 20), Segment(one, 40)]),
    ]
    of_one, of_other = lay_out(works).runs
    assert of_one.keys is one.keys
    assert of_one.values is one.values
    assert (of_one.readers, of_one.deltas, of_one.starts) == ([(0, 2), (3, 4)], [0, 40], [0, 40])
    assert of_other.readers == [(0, 2), (2, 3), (3, 4)]
    assert (of_other.deltas, of_other.starts) == ([8, 0, 20], [8, 0, 20])


def test_a_segment_is_moved_from_where_it_was_encoded(pool: ChunkPool) -> None:
    [run] = lay_out([work(pages(pool, [0], 0), 2, [Segment(states(5, start=30), 12)])]).runs
    assert (run.deltas, run.starts) == ([-18], [12])


def test_views_of_one_modules_states_are_one_run(pool: ChunkPool) -> None:
    whole = states(12, start=10)
    parts = [whole.part(4, 9, 14), whole.part(4, 9, 14), whole.part(4, 8, 14), whole.part(0, 5, 10)]
    works = [work(pages(pool, [n], 0), 1, [Segment(part, 20)]) for n, part in enumerate(parts)]
    layout = lay_out(works)
    assert [(run.readers, run.keys.shape[2]) for run in layout.runs] == [
        ([(0, 1), (1, 2)], 5),
        ([(2, 3)], 4),
        ([(3, 4)], 5),
    ]


def test_one_module_twice_in_a_prompt_is_asked_twice(pool: ChunkPool) -> None:
    twice = states(8)
    segments = [Segment(twice, 0), Segment(twice, 8)]
    [run] = lay_out([work(pages(pool, [0], 0), 2, segments)]).runs
    assert (run.readers, run.deltas) == ([(0, 2), (0, 2)], [0, 8])


def test_a_token_does_not_see_a_segment_that_starts_after_it() -> None:
    early, late = Segment(states(4), 0), Segment(states(4), 6)
    given = Work((early, late), room(0), [7] * 5, [4, 5, 6, 10, 11])
    of_early, of_late = lay_out([work(room(0), 2), given]).runs
    assert of_early.readers == [(2, 7)]
    assert of_late.readers == [(4, 7)], "it starts at the third token's position"


def test_a_segment_that_no_token_sees_is_left_out() -> None:
    unseen = Segment(states(4), 50)
    given = Work((unseen,), room(0), [7, 7], [48, 49])
    assert lay_out([given]).runs == ()
    seeing = Work((unseen,), room(0), [7, 7], [54, 55])
    [run] = lay_out([given, seeing]).runs
    assert run.readers == [(2, 4)]
