"""The pool of chunks: who gets which, and that none is lost or given out twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache.engine.pool import CHUNK, ChunkPool
from ragcache.errors import ConfigurationError
from ragcache.models import CausalLM


def make_pool(total: int, chunk: int = 2) -> ChunkPool:
    states = torch.zeros(1, 1, total * chunk, 1)
    return ChunkPool(states, states.clone(), chunk)


def some_of(pool: ChunkPool, count: int, after: int | None = None) -> list[int]:
    chunks = pool.allocate(count, after)
    assert chunks is not None
    return chunks


def pool_with_free(total: int, free: list[int]) -> ChunkPool:
    pool = make_pool(total)
    some_of(pool, total)
    pool.free(free)
    return pool


def test_a_pool_is_as_large_as_its_bytes_allow(causal: CausalLM) -> None:
    per_chunk = CHUNK * causal.bytes_per_token
    pool = ChunkPool.create(causal, 3 * per_chunk + per_chunk // 2)
    assert (pool.total, pool.free_count, pool.used_count) == (3, 3, 0)
    assert pool.chunk == CHUNK
    assert pool.bytes_per_chunk == per_chunk
    assert pool.keys.shape == pool.values.shape == (2, 2, 3 * CHUNK, 16)
    assert (pool.keys.dtype, pool.keys.device) == (causal.dtype, causal.device)


def test_a_pool_for_less_than_one_chunk_is_refused(causal: CausalLM) -> None:
    per_chunk = 8 * causal.bytes_per_token
    assert ChunkPool.create(causal, per_chunk, chunk=8).total == 1
    with pytest.raises(ConfigurationError, match=f"{per_chunk} bytes"):
        ChunkPool.create(causal, per_chunk - 1, chunk=8)


def test_a_fresh_pool_gives_one_run() -> None:
    assert some_of(make_pool(8), 5) == [0, 1, 2, 3, 4]


def test_what_follows_comes_first() -> None:
    pool = pool_with_free(8, [0, 3, 4, 7])
    assert some_of(pool, 1, after=2) == [3]
    assert some_of(pool, 2, after=6) == [7, 0]


def test_the_rest_after_what_follows_is_one_run() -> None:
    pool = pool_with_free(10, [0, 3, 6, 7, 8])
    assert some_of(pool, 3, after=2) == [3, 6, 7]


def test_the_shortest_run_that_holds_all_is_taken() -> None:
    pool = pool_with_free(12, [0, 2, 3, 4, 5, 8, 9, 11])
    assert some_of(pool, 2) == [8, 9]
    assert some_of(pool, 3) == [2, 3, 4]


def test_scattered_chunks_are_taken_from_the_lowest_on() -> None:
    pool = pool_with_free(9, [7, 1, 5, 3])
    assert some_of(pool, 3) == [1, 3, 5]


def test_neighbors_given_back_are_one_run_again() -> None:
    pool = pool_with_free(6, [2, 4, 3])
    assert some_of(pool, 3) == [2, 3, 4]


def test_too_few_chunks_give_none_and_take_nothing() -> None:
    pool = pool_with_free(4, [1, 3])
    assert pool.allocate(3, after=0) is None
    assert pool.free_count == 2
    assert some_of(pool, 2) == [1, 3]
    assert pool.allocate(1) is None


def test_nothing_can_be_asked_for() -> None:
    assert make_pool(2).allocate(0) == []


@pytest.mark.parametrize("chunk_id", [1, 2, 3])
def test_a_double_free_is_noticed(chunk_id: int) -> None:
    pool = pool_with_free(6, [1, 2, 3])
    with pytest.raises(AssertionError, match="twice"):
        pool.free([chunk_id])


@pytest.mark.parametrize("chunk_id", [-1, 2])
def test_a_chunk_of_no_pool_is_noticed(chunk_id: int) -> None:
    pool = pool_with_free(2, [])
    with pytest.raises(AssertionError, match="no chunk"):
        pool.free([chunk_id])


def test_a_copy_is_of_one_chunk_in_all_layers(causal: CausalLM) -> None:
    pool = ChunkPool.create(causal, 4 * 8 * causal.bytes_per_token, chunk=8)
    keys, values = torch.randn_like(pool.keys), torch.randn_like(pool.values)
    pool.keys.copy_(keys)
    pool.values.copy_(values)
    pool.copy(3, 1)
    keys[:, :, 8:16], values[:, :, 8:16] = keys[:, :, 24:32], values[:, :, 24:32]
    assert torch.equal(pool.keys, keys)
    assert torch.equal(pool.values, values)


def longest_run(numbers: set[int]) -> int:
    longest = length = 0
    for number in range(max(numbers, default=-1) + 1):
        length = length + 1 if number in numbers else 0
        longest = max(longest, length)
    return longest


def expected(free: set[int], count: int, after: int | None) -> tuple[list[int], int]:
    """What must follow `after`, and how many more are wanted, of the free numbers."""
    front = []
    while after is not None and len(front) < count and after + 1 in free:
        after += 1
        front.append(after)
    return front, count - len(front)


@given(st.integers(1, 24), st.data())
def test_no_chunk_is_lost_or_given_out_twice(total: int, data: st.DataObject) -> None:
    pool, used = make_pool(total), list[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        free = set(range(total)) - set(used)
        if used and data.draw(st.booleans()):
            back = data.draw(st.lists(st.sampled_from(used), unique=True))
            pool.free(back)
            used = [chunk_id for chunk_id in used if chunk_id not in back]
        else:
            count = data.draw(st.integers(0, total))
            after = data.draw(st.none() | st.sampled_from(used)) if used else None
            taken = pool.allocate(count, after)
            assert (taken is None) == (count > len(free))
            if taken is not None:
                assert set(taken) <= free
                assert len(set(taken)) == count
                check_preferences(taken, free, after)
                used += taken
        assert pool.used_count == len(used)
        assert pool.free_count + pool.used_count == total


def check_preferences(taken: list[int], free: set[int], after: int | None) -> None:
    front, more = expected(free, len(taken), after)
    assert taken[: len(front)] == front
    rest, left = taken[len(front) :], free - set(front)
    if more and longest_run(left) >= more:
        assert rest == list(range(rest[0], rest[0] + more)), "consecutive where possible"
    else:
        assert rest == sorted(left)[:more], "else the lowest"
