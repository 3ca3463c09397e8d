"""Messages: tensors in shared memory cross as places, others as bytes or as copies there."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ragcache.models.parallel.memory import MappedMemory, SharedArena
from ragcache.models.parallel.messages import MOST_INLINE, MessageWriter, read_message


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """As those of attention's metadata."""

    tensors: tuple[Tensor, ...]
    name: str


@pytest.fixture(scope="module")
def arena() -> SharedArena:
    return SharedArena.create()


def crossed(arena: SharedArena, message: object) -> object:
    writer = MessageWriter(arena)
    return read_message(writer.dumps(message), MappedMemory(arena.descriptor, arena.nbytes))


def test_tensors_arrive_with_their_kinds_and_values(arena: SharedArena) -> None:
    shared = arena.copy(torch.arange(24.0).view(2, 3, 4))
    given = (
        shared[:, 1:],
        nn.Parameter(shared[1], requires_grad=False),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor([True, False]),
    )
    found = crossed(arena, Step(given, "step"))
    assert isinstance(found, Step)
    assert found.name == "step"
    for ours, theirs in zip(given, found.tensors, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert type(ours) is type(theirs)
        assert torch.equal(ours, theirs)
    found.tensors[0].zero_()
    assert not shared[:, 1:].any(), "the same memory"


def test_a_large_tensor_is_copied_once_while_it_lives(arena: SharedArena) -> None:
    writer = MessageWriter(arena)
    states = torch.randn(MOST_INLINE // 4 + 1)
    messages = [writer.dumps(states) for _ in range(3)]
    assert messages[0] == messages[1] == messages[2], "at one place"
    assert len(messages[0]) < 1000
    memory = MappedMemory(arena.descriptor, arena.nbytes)
    assert torch.equal(read_message(messages[0], memory), states)
    assert len(writer._copies) == 1
    del states
    gc.collect()
    assert len(writer._copies) == 0
