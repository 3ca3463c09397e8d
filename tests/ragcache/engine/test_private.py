"""Room and pages: where tokens go, and what a request can read of them."""

from __future__ import annotations

import pytest
import torch

from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import Pages, PrivateStates, Room, Stretch
from ragcache.models import CausalLM


def make_pages(chunk_ids: list[int], filled: int = 0, chunk: int = 4, total: int = 8) -> Pages:
    states = torch.zeros(2, 3, total * chunk, 5)
    pages = Pages(ChunkPool(states, states.clone(), chunk))
    pages.chunk_ids += chunk_ids
    pages.advance(range(filled))
    return pages


def make_room(capacity: int, filled: int = 0) -> Room:
    room = Room(torch.zeros(2, 3, capacity, 5), torch.zeros(2, 3, capacity, 5))
    room.advance(range(filled))
    return room


def bounds(private: PrivateStates) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in private.stretches()]


def step(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New states of a step: key t of head h holds 10 h + t, and values their negatives."""
    key = 10.0 * torch.arange(3)[:, None] + torch.arange(1, rows + 1)
    key = key[..., None].expand(3, rows, 5)
    return key, -key


def test_a_room_is_allocated_in_the_shape_of_the_model(causal: CausalLM) -> None:
    room = Room.allocate(causal, 6)
    assert room.keys.shape == room.values.shape == (2, 2, 6, 16)
    assert room.keys.dtype == causal.dtype
    assert (room.length, room.stretches()) == (0, [])


def test_a_room_is_one_stretch_that_grows() -> None:
    room = make_room(8, filled=3)
    assert bounds(room) == [(0, 3)]
    room.advance([7, 9])
    assert (bounds(room), room.length) == ([(0, 5)], 5)
    assert list(room.positions) == [0, 1, 2, 7, 9]
    [stretch] = room.stretches()
    assert stretch.keys is room.keys
    assert stretch.values is room.values


def test_a_room_is_written_behind_what_it_holds() -> None:
    room = make_room(8, filled=3)
    key, value = step(6)
    room.write(2, 5).write(1, key, value)
    assert torch.equal(room.keys[1, :, 3:6], key[:, 2:5])
    assert torch.equal(room.values[1, :, 3:6], value[:, 2:5])
    room.keys[1, :, 3:6], room.values[1, :, 3:6] = 0, 0
    assert not room.keys.any(), "nothing else is"
    assert not room.values.any()


def test_a_room_takes_no_more_than_its_capacity() -> None:
    room = make_room(8, filled=3)
    room.write(0, 5)
    with pytest.raises(AssertionError):
        room.write(0, 6)


def test_a_filled_room_becomes_states_without_a_copy() -> None:
    room = make_room(8, filled=3)
    states = room.as_states(40)
    assert (states.start, states.length) == (40, 3)
    assert states.keys.data_ptr() == room.keys.data_ptr()
    assert states.values.data_ptr() == room.values.data_ptr()
    assert states.values.shape == (2, 3, 3, 5)


@pytest.mark.parametrize(
    ("filled", "expected"),
    [
        (0, []),
        (1, [(20, 21)]),
        (4, [(20, 24)]),
        (5, [(20, 24), (8, 9)]),
        (12, [(20, 24), (8, 12), (12, 16)]),
    ],
)
def test_pages_are_one_stretch_a_chunk(filled: int, expected: list[tuple[int, int]]) -> None:
    pages = make_pages([5, 2, 3], filled)
    assert bounds(pages) == expected
    assert all(each.keys is pages.pool.keys for each in pages.stretches())
    assert all(each.values is pages.pool.values for each in pages.stretches())


def test_slots_follow_the_chunks_in_the_order_of_the_request() -> None:
    pages = make_pages([5, 2, 3], filled=3)
    assert pages.slots(7) == [23, 8, 9, 10, 11, 12, 13]
    assert pages.slots(0) == []
    pages.advance(range(3, 8))
    assert pages.slots(1) == [12], "the first of a chunk"


def test_pages_have_room_for_whole_chunks() -> None:
    pages = make_pages([5, 2], filled=3)
    assert (pages.capacity, pages.length) == (8, 3)
    assert len(pages.slots(5)) == 5
    with pytest.raises(AssertionError):
        pages.slots(6)
    with pytest.raises(AssertionError):
        make_pages([], 0).slots(1)
    pages.chunk_ids.append(0)
    assert pages.slots(6)[-1] == 0


def test_pages_are_written_row_by_row_to_their_slots() -> None:
    pages = make_pages([5, 2, 3], filled=3)
    key, value = step(6)
    pages.write(1, 4).write(1, key, value)
    keys, values = pages.pool.keys, pages.pool.values
    assert torch.equal(keys[1][:, [23, 8, 9]], key[:, 1:4])
    assert torch.equal(values[1][:, [23, 8, 9]], value[:, 1:4])
    keys[1][:, [23, 8, 9]], values[1][:, [23, 8, 9]] = 0, 0
    assert not keys.any(), "nothing else is"
    assert not values.any()


def test_positions_of_pages_may_leave_gaps() -> None:
    pages = make_pages([5, 2])
    pages.advance([3, 4, 90])
    pages.advance([91, 95])
    assert (list(pages.positions), pages.length) == ([3, 4, 90, 91, 95], 5)


def test_stretches_of_the_same_memory_have_one_place() -> None:
    mine, yours = make_pages([5, 2], filled=6), make_pages([5, 3], filled=6)
    yours.pool = mine.pool
    (a, b), (c, d) = mine.stretches(), yours.stretches()
    assert a.place == c.place
    assert len({a.place, b.place, d.place}) == 3
    other = make_pages([5], filled=4).stretches()[0]
    assert other.place != a.place, "another pool"
    assert Stretch(a.keys, a.values, a.begin, a.end - 1).place != a.place
