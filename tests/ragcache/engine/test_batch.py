"""Ragged steps: tokens in one row, and the plan over them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ragcache.attention import PageWrite, Rotation, RunWrite, Square
from ragcache.engine import Segment
from ragcache.engine.batch import StepBuilder
from ragcache.engine.layout import Work
from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import Pages
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
def pool(causal: CausalLM) -> ChunkPool:
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
    assert step.plan.squares == (Square(0, 3), Square(3, 4), Square(4, 6))
    assert (step.plan.asking, step.plan.runs, step.plan.pages) == (None, (), None)
    assert step.plan.table.shape == (0, 6)
    assert step.plan.own is None, "squares in the order of the rows"


def test_paged_rows_before_squares_are_put_in_order(causal: CausalLM, pool: ChunkPool) -> None:
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
    causal: CausalLM, pool: ChunkPool
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
    [write] = StepBuilder(causal).build([Work((), given.private, [7], [2])]).plan.writes
    assert isinstance(write, RunWrite)
    assert (write.past, write.begin, write.end) == (2, 0, 1)
    with pytest.raises(AssertionError):
        StepBuilder(causal).build([Work((), given.private, [7, 8], [2, 3])])


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
    causal: CausalLM, pool: ChunkPool
) -> None:
    """A row with fewer pages than its neighbors is filled up with a page that is hidden: states
    that are not finite, of whomever, must not reach it."""
    broken = in_pages(causal, pool, CHUNK, seed=1)
    assert isinstance(broken.private, Pages)
    asked = [in_pages(causal, pool, count, seed=count) for count in (3, 11)]
    together(StepBuilder(causal), asked, [2, 10])
    pool.keys[:, :, : CHUNK * (broken.private.chunk_ids[0] + 1)] = torch.inf
    pool.values[:, :, : CHUNK * (broken.private.chunk_ids[0] + 1)] = torch.nan
    as_alone(together(StepBuilder(causal), asked), asked)
