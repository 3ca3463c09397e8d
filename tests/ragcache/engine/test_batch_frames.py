"""Frames that stay while requests decode, and requests beside others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ragcache.engine import Segment
from ragcache.engine.batch import StepBuilder
from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import Pages, Room
from ragcache.models import CausalLM
from tests.conftest import random_tokens
from tests.ragcache.engine.asked import (
    CHUNK,
    CLOSE,
    Asked,
    as_alone,
    in_pages,
    module,
    small_pool,
    together,
)


@pytest.fixture
def pool(causal: CausalLM) -> ChunkPool:
    return small_pool(causal)


def decoding(causal: CausalLM, pool: ChunkPool, filled: Sequence[int]) -> list[Asked]:
    segment = Segment(module(causal, 9, start=3), 0)
    asked = [
        in_pages(causal, pool, 40, seed, [segment] if seed % 2 else [], 9)
        for seed in range(len(filled))
    ]
    together(StepBuilder(causal), asked, filled)
    return asked


def test_a_frame_stays_until_a_chunk_fills(causal: CausalLM, pool: ChunkPool) -> None:
    """Chunks of 4: the second request begins one with its 9th and 13th token, the first at 9."""
    builder, asked = StepBuilder(causal), decoding(causal, pool, [5, 6])
    rebuilt = []
    for _ in range(8):
        as_alone(together(builder, asked), asked)
        rebuilt.append(builder.rebuilt)
    assert rebuilt == [1, 1, 2, 3, 3, 3, 4, 5]


def test_a_frame_ends_when_a_request_joins_or_leaves(causal: CausalLM, pool: ChunkPool) -> None:
    builder, (a, b, c) = StepBuilder(causal), decoding(causal, pool, [4, 4, 4])
    rebuilt = []
    for batch in ([a, b], [a, b], [a, b, c], [a, c], [a], [b, c], [c, b]):
        as_alone(together(builder, batch), batch)
        rebuilt.append(builder.rebuilt)
    assert rebuilt == [1, 1, 2, 3, 4, 5, 6]


def test_a_frame_ends_when_other_logits_are_wanted(causal: CausalLM, pool: ChunkPool) -> None:
    builder, (a, b) = StepBuilder(causal), decoding(causal, pool, [4, 4])
    assert builder.build([a.work(), b.work()]).logit_rows.tolist() == [0, 1]
    assert builder.build([a.work(), b.work(wants_logits=False)]).logit_rows.tolist() == [0]
    assert builder.rebuilt == 2


def test_a_frame_ends_when_a_token_comes_to_see_a_segment(
    causal: CausalLM, pool: ChunkPool
) -> None:
    """A prompt's own tokens before and behind a segment, computed one by one."""
    segment = Segment(module(causal, 5, start=3), 2)
    asked = in_pages(causal, pool, 4, 1, [segment])
    asked.positions = [0, 1, 7, 8]
    builder = StepBuilder(causal)
    for _ in asked.tokens:
        as_alone(together(builder, [asked]), [asked])


def test_an_equal_request_in_the_place_of_another_is_noticed(
    causal: CausalLM, pool: ChunkPool
) -> None:
    builder = StepBuilder(causal)
    for seed in (1, 2):
        [asked] = decoding(causal, pool, [5])
        asked.tokens = [*asked.tokens[:5], *random_tokens(5, seed=seed)]
        as_alone(together(builder, [asked]), [asked])
    assert builder.rebuilt == 2


def test_no_frame_stays_while_a_request_prefills_or_has_a_room(
    causal: CausalLM, pool: ChunkPool
) -> None:
    builder, [asked] = StepBuilder(causal), decoding(causal, pool, [4])
    prefilling = in_pages(causal, pool, 40, seed=5)
    for _ in range(2):
        together(builder, [asked, prefilling], [1, 2])
    assert builder.rebuilt == 2
    room = Asked(causal, Room.allocate(causal, 9), random_tokens(9))
    [asked] = decoding(causal, pool, [4])
    for _ in range(2):
        together(builder, [asked, room])
    assert builder.rebuilt == 4


def test_a_builder_that_forgot_builds_again(causal: CausalLM, pool: ChunkPool) -> None:
    builder, asked = StepBuilder(causal), decoding(causal, pool, [5])
    together(builder, asked)
    builder.forget()
    as_alone(together(builder, asked), asked)
    assert builder.rebuilt == 2


def test_a_step_of_a_kept_frame_equals_a_fresh_one(causal: CausalLM, pool: ChunkPool) -> None:
    builder, asked = StepBuilder(causal), decoding(causal, pool, [8, 9, 9])
    for _ in range(3):
        works = [each.work() for each in asked]
        fresh = causal.forward(StepBuilder(causal).build(works))
        assert torch.equal(causal.forward(builder.build(works)), fresh)
        for each in asked:
            each.computed()
    assert builder.rebuilt == 1, "the case that this is about"


def test_mixed_batches_give_every_request_what_it_has_alone(
    causal: CausalLM, pool: ChunkPool
) -> None:
    """Two prefill in portions, one decodes all the while, one encodes in a room."""
    a, b = module(causal, 7, start=30), module(causal, 12)
    decodes = in_pages(causal, pool, 30, 1, [Segment(a, 0), Segment(b, 7)], 19)
    prefills = in_pages(causal, pool, 30, 2, [Segment(b, 0)], 12)
    joins = in_pages(causal, pool, 30, 3)
    encodes = Asked(causal, Room.allocate(causal, 12), random_tokens(12), [Segment(a, 0)], 7)
    builder = StepBuilder(causal)
    together(builder, [decodes], [6])
    for counts in ([1, 5, 3], [1, 7, 1], [1, 1, 4]):
        batch = [decodes, prefills, encodes]
        as_alone(together(builder, batch, counts), batch)
    for counts in ([2, 1, 1, 2], [5, 1, 1, 1], [1, 1, 1, 1]):
        batch = [joins, decodes, prefills, encodes]
        as_alone(together(builder, batch, counts), batch)
    as_alone(together(builder, [prefills, joins]), [prefills, joins])
    room, alone = encodes.private, encodes.alone(12)[1]
    assert isinstance(room, Room)
    torch.testing.assert_close(room.keys, alone.keys, **CLOSE)
    torch.testing.assert_close(room.values, alone.values, **CLOSE)


def test_requests_that_share_chunks_answer_as_with_copies(
    causal: CausalLM, pool: ChunkPool
) -> None:
    """A tree: all three share two chunks, the last two a third."""
    segment = Segment(module(causal, 7, start=30), 0)
    first = in_pages(causal, pool, 30, 1, [segment], 7)
    builder = StepBuilder(causal)
    together(builder, [first], [10])
    second = sharing(first, 2, seed=2)
    as_alone(together(builder, [first, second], [1, 6]), [first, second])
    third = sharing(second, 3, seed=3)
    asked = [first, second, third]
    as_alone(together(builder, asked, [1, 1, 2]), asked)
    for _ in range(6):
        as_alone(together(builder, asked), asked)
    runs = builder.build([each.work() for each in asked]).plan.runs
    assert sorted(run.keys.shape[2] for run in runs) == [CHUNK, 7, 2 * CHUNK]


def sharing(other: Asked, chunks: int, seed: int) -> Asked:
    """A request with the same first chunks, which it does not compute, and its own tokens."""
    theirs = other.private
    assert isinstance(theirs, Pages)
    same = chunks * CHUNK
    mine = in_pages(other.causal, theirs.pool, 30, seed, other.segments, other.positions[0])
    assert isinstance(mine.private, Pages)
    mine.private.chunk_ids[:chunks] = theirs.chunk_ids[:chunks]
    mine.tokens = [*other.tokens[:same], *mine.tokens[same:]]
    mine.computed(same)
    return mine
