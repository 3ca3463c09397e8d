"""Regions that every rank has: places of tensors, addresses, and their end."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from ragcache.models.parallel.device_copies import RankedEvent
from ragcache.models.parallel.device_memory import (
    EndedRegions,
    FollowerRegions,
    LeaderRegions,
    NewRegion,
)
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.messages import MessageWriter, read_message

CPU = torch.device("cpu")


class Pair:
    """A leader and a follower, between which messages cross at once."""

    def __init__(self) -> None:
        self.regions = FollowerRegions(CPU)  # of the follower
        self.sent: list[Any] = []
        self.leader = LeaderRegions(CPU, self.send, threading.RLock())

    def send(self, message: Any) -> None:
        self.sent.append(message)
        message.run(self)


def test_a_tensor_crosses_as_its_place() -> None:
    pair, arena = Pair(), SharedArena.create()
    given = pair.leader.empty((2, 3, 4), torch.float32)
    writer = MessageWriter(arena, pair.leader)
    part = given[1, :, 1:3]
    found = read_message(writer.dumps(part), arena, pair.regions)
    assert (found.shape, found.stride(), found.dtype) == (part.shape, part.stride(), part.dtype)
    assert found.data_ptr() != part.data_ptr()
    found.fill_(7)
    whole = read_message(writer.dumps(given), arena, pair.regions)
    assert whole[1, :, 1:3].eq(7).all()


def test_zeros_are_zeros_on_every_rank() -> None:
    pair, arena = Pair(), SharedArena.create()
    given = pair.leader.empty((1000,), torch.uint8, zeros=True)
    found = read_message(MessageWriter(arena, pair.leader).dumps(given), arena, pair.regions)
    assert not given.any()
    assert not found.any()


def test_a_region_ends_with_its_last_view() -> None:
    pair = Pair()
    given = pair.leader.empty((8, 8), torch.float32)
    view = given[3:, 2:4].t()
    address = given.data_ptr()
    del given
    pair.leader.settle()
    assert pair.leader.place_of(view) is not None
    del view
    pair.leader.settle()
    assert [type(each) for each in pair.sent] == [NewRegion, EndedRegions]
    numbers = np.array([address], np.int64)
    pair.regions.move(numbers)
    assert numbers[0] == address, "addresses of no region stay"


def test_addresses_move_with_their_regions() -> None:
    pair, arena = Pair(), SharedArena.create()
    given = [pair.leader.empty((100 + n,), torch.float32) for n in range(5)]
    writer = MessageWriter(arena, pair.leader)
    theirs = [read_message(writer.dumps(each), arena, pair.regions) for each in given]
    addresses = np.array([each[n:].data_ptr() for n, each in enumerate(given)] + [0], np.int64)
    pair.regions.move(addresses)
    assert addresses.tolist() == [*(each[n:].data_ptr() for n, each in enumerate(theirs)), 0]


def test_an_empty_tensor_has_no_region() -> None:
    pair = Pair()
    assert pair.leader.empty((4, 0, 2), torch.float16).shape == (4, 0, 2)
    assert not pair.sent


def test_memory_of_the_host_has_no_place_in_a_region() -> None:
    pair = Pair()
    pair.leader.empty((100,), torch.float32)
    assert pair.leader.place_of(torch.zeros(10)) is None


def test_copies_end_when_every_rank_has_made_them() -> None:
    done = np.array([0.0, 3.0, 2.0])
    event = RankedEvent(None, done, 3, lambda: None)
    assert not event.query()
    threading.Timer(0.01, lambda: done.__setitem__(2, 3.0)).start()
    event.synchronize()
    assert event.query()


def test_copies_of_a_dead_rank_raise_its_failure() -> None:
    from ragcache.errors import EngineFailed

    event = RankedEvent(None, np.zeros(2), 1, lambda: EngineFailed("rank 1 of 2 ended"))
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended"):
        event.synchronize()
