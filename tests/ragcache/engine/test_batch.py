"""The plan of a ragged step: which rows read which states, and how far each was moved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ragcache.attention.rotary import Rotation
from ragcache.engine import EncodeJob, Segment, encode
from ragcache.engine.batch import build_step
from ragcache.engine.layout import Work
from ragcache.engine.private import Room
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.conftest import random_tokens


def module(causal: CausalLM, length: int, start: int = 0) -> KVStates:
    [states] = encode(causal, [EncodeJob(random_tokens(length, seed=length), start)])
    return states


def work(
    causal: CausalLM,
    segments: Sequence[Segment],
    positions: Sequence[int],
    *,
    wants_logits: bool = True,
) -> Work:
    private = Room.allocate(causal, len(positions))
    tokens = random_tokens(len(positions), seed=3)
    return Work(tuple(segments), private, tokens, positions, wants_logits)


def expected(causal: CausalLM, deltas: list[int]) -> Rotation:
    return causal.scheme.relocation(torch.tensor(deltas))


def test_the_works_are_flattened_in_order(causal: CausalLM) -> None:
    works = [
        work(causal, [], [4, 5, 9]),
        work(causal, [], [7], wants_logits=False),
        work(causal, [], [0, 1]),
    ]
    step = build_step(causal, works)
    assert step.token_ids.tolist() == [t for w in works for t in w.token_ids]
    assert step.position_ids.tolist() == [4, 5, 9, 7, 0, 1]
    assert step.logit_rows.tolist() == [2, 5], "the last row of each work that asks"
    assert [(r.begin, r.end) for r in step.plan.runs] == [(0, 3), (3, 4), (4, 6)]
    assert (step.plan.num_rows, step.plan.num_slots) == (6, 1)
    assert step.plan.segments == ()


def test_a_segment_read_by_all_rows_in_one_slot_needs_no_index(causal: CausalLM) -> None:
    shared = Segment(module(causal, 8), 0)
    step = build_step(causal, [work(causal, [shared], [8, 9]), work(causal, [shared], [8])])
    [rows] = step.plan.segments
    assert rows.rows is None
    assert rows.slots is None
    assert (rows.slot, rows.rotation) == (0, None)
    assert [run.slot for run in step.plan.runs] == [1, 1]
    assert step.plan.num_slots == 2


def test_a_segment_read_by_some_rows_lists_them_with_their_slots(causal: CausalLM) -> None:
    a, b = module(causal, 8), module(causal, 5)
    step = build_step(
        causal,
        [
            work(causal, [Segment(a, 0), Segment(b, 8)], [13, 14]),
            work(causal, [], [0]),
            work(causal, [Segment(b, 0), Segment(a, 5)], [13]),
        ],
    )
    of_a, of_b = step.plan.segments
    assert (of_a.rows.tolist(), of_a.slots.tolist()) == ([0, 1, 3], [0, 0, 1])
    assert (of_b.rows.tolist(), of_b.slots.tolist()) == ([0, 1, 3], [1, 1, 0])
    assert [run.slot for run in step.plan.runs] == [2, 0, 2], "private parts follow the segments"
    assert step.plan.num_slots == 3


def test_all_rows_in_different_slots_still_list_their_slots(causal: CausalLM) -> None:
    a, b = module(causal, 8), module(causal, 8)
    step = build_step(
        causal,
        [
            work(causal, [Segment(a, 0), Segment(b, 8)], [16]),
            work(causal, [Segment(b, 0), Segment(a, 8)], [16]),
        ],
    )
    assert [s.slots.tolist() for s in step.plan.segments] == [[0, 1], [1, 0]]


def test_an_unmoved_segment_turns_no_query(causal: CausalLM) -> None:
    states = module(causal, 6, start=20)
    step = build_step(causal, [work(causal, [Segment(states, 20)], [26, 27])])
    assert (step.plan.segments[0].rotation, step.plan.turns) == (None, None)


def test_a_segment_moved_alike_for_all_turns_by_one_row(causal: CausalLM) -> None:
    states = module(causal, 6, start=20)
    works = [work(causal, [Segment(states, 3)], [9, 10]), work(causal, [Segment(states, 3)], [9])]
    plan = build_step(causal, works).plan
    assert (plan.segments[0].rotation, plan.segments[0].turn) == (None, 0)
    assert plan.turns is not None
    torch.testing.assert_close(plan.turns.sin, expected(causal, [-17]).sin[None, None])


def test_a_segment_moved_differently_turns_row_by_row(causal: CausalLM) -> None:
    states = module(causal, 6, start=20)
    works = [work(causal, [Segment(states, 3)], [9, 10]), work(causal, [Segment(states, 20)], [26])]
    rotation = build_step(causal, works).plan.segments[0].rotation
    assert rotation is not None
    assert rotation.cos.shape[0] == 3
    torch.testing.assert_close(rotation.sin, expected(causal, [-17, -17, 0]).sin)
    torch.testing.assert_close(rotation.cos, expected(causal, [-17, -17, 0]).cos)


def test_a_token_does_not_see_a_segment_that_starts_after_it(causal: CausalLM) -> None:
    early, late = module(causal, 4), module(causal, 4, start=6)
    positions = [4, 5, 10, 11]
    step = build_step(causal, [work(causal, [Segment(early, 0), Segment(late, 6)], positions)])
    seen = {s.slot: s.rows for s in step.plan.segments}
    assert seen[0] is None, "every row sees the first segment"
    assert seen[1] is not None
    assert seen[1].tolist() == [2, 3]


def test_a_segment_that_no_token_sees_is_left_out(causal: CausalLM) -> None:
    step = build_step(causal, [work(causal, [Segment(module(causal, 4), 2)], [0, 1])])
    assert step.plan.segments == ()


@torch.no_grad()
def test_a_token_before_a_gap_answers_as_if_the_later_segment_were_absent(
    causal: CausalLM,
) -> None:
    early, late = Segment(module(causal, 4), 0), Segment(module(causal, 5, start=6), 6)
    with_late = causal.forward(build_step(causal, [work(causal, [early, late], [4, 5])]))
    without = causal.forward(build_step(causal, [work(causal, [early], [4, 5])]))
    behind = causal.forward(build_step(causal, [work(causal, [early, late], [11, 12])]))
    torch.testing.assert_close(with_late, without)
    alone = causal.forward(build_step(causal, [work(causal, [early], [11, 12])]))
    assert not torch.allclose(behind, alone, atol=1e-3), "a token behind it does see it"


def test_states_are_grouped_by_identity_not_by_content(causal: CausalLM) -> None:
    one = module(causal, 6)
    twin = KVStates(one.keys.clone(), one.values.clone(), one.start)
    works = [
        work(causal, [Segment(one, 0)], [6]),
        work(causal, [Segment(twin, 0)], [6]),
        work(causal, [Segment(one, 0)], [6]),
    ]
    segments = build_step(causal, works).plan.segments
    assert [s.rows.tolist() for s in segments] == [[0, 2], [1]]
    assert segments[0].keys is one.keys
    assert segments[1].keys is twin.keys


def test_a_run_continues_after_the_private_past(causal: CausalLM) -> None:
    given = work(causal, [], [0, 1, 2])
    given.private.advance(2)
    follow = Work((), given.private, [7], [2])
    [run] = build_step(causal, [follow]).plan.runs
    assert (run.past, run.begin, run.end) == (2, 0, 1)
    overfull = Work((), given.private, [7, 8], [2, 3])
    with pytest.raises(AssertionError):
        build_step(causal, [overfull])
