"""Steps as followers receive them: the numbers and lines of a step's tables."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ragcache.attention.triton.plan import TableCapacity
from ragcache.attention.triton.tables import AttentionTables, TableContent
from ragcache.engine.device_ranks import FollowedStep, Prepare, read_device_message
from ragcache.models.parallel.device_memory import FollowerRegions
from ragcache.models.parallel.memory import SharedArena

CAPACITY = TableCapacity(rows=64, entries=256, items=64, bases=32, pages_per_row=4)


@pytest.mark.parametrize("bucket", [None, 32])
@pytest.mark.parametrize(("waits", "others"), [((), ()), ((4, 9), (11,))])
def test_a_step_crosses_as_it_is(
    bucket: int | None, waits: tuple[int, ...], others: tuple[int, ...]
) -> None:
    parts = [memoryview(bytes([number] * 128)) for number in range(3)]
    content = TableContent([1, 0, 2], parts)
    step = FollowedStep(7, True, "mixed", 24, 2, bucket, 5, True, waits, others, content)
    memory = memoryview(b"".join(step.parts()))
    found = read_device_message(memory, SharedArena.create(), FollowerRegions(torch.device("cpu")))
    assert isinstance(found, FollowedStep)
    for name in FollowedStep.__slots__[:-3]:
        assert getattr(found, name) == getattr(step, name), name
    assert (tuple(found.waits), tuple(found.others)) == (waits, others)
    assert list(found.content.lines) == [1, 0, 2]
    assert b"".join(found.content.parts) == b"".join(parts)


def test_other_messages_cross_beside_steps() -> None:
    message = memoryview(pickle.dumps(Prepare(3)))
    memory, regions = SharedArena.create(), FollowerRegions(torch.device("cpu"))
    assert read_device_message(message, memory, regions) == Prepare(3)


def test_received_tables_are_those_that_were_uploaded() -> None:
    given, taken = (AttentionTables(CAPACITY, "cpu") for _ in range(2))
    sent: list[bytes] = []

    def send(content: TableContent) -> None:
        step = FollowedStep(1, False, "decode", 40, 1, None, 0, False, (), (), content)
        sent.append(b"".join(step.parts()))

    rng = np.random.default_rng(2)
    for rows in (40, 12, 64):
        given.begin_step(rows)
        given.step.token_ids[:rows] = rng.integers(0, 1000, rows)
        given.step.pages[:rows] = rng.integers(0, 1000, (rows, given.step.pages.shape[1]))
        given.step.write_slot[:rows] = np.arange(rows)
        given.upload(send)
        taken.receive(FollowedStep.read(memoryview(sent.pop())).content, lambda _: None)
        for name in given.step.__dataclass_fields__:
            ours, theirs = getattr(taken.views, name), getattr(given.views, name)
            assert torch.equal(ours[:rows], theirs[:rows]), name
    assert taken.views.write_slot[12:40].tolist() == given.views.write_slot[12:40].tolist()
