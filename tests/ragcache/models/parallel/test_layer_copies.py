"""Copies of a rank's heads as runs of bytes: pieces, other ranks' addresses, repeated heads."""

from __future__ import annotations

import pytest
import torch

from ragcache.models.parallel.device_copies import Crossings
from ragcache.models.parallel.device_memory import FollowerRegions, NewRegion
from ragcache.models.parallel.layer_copies import copy_layers, copy_runs, pieces_of, runs_of
from ragcache.models.parallel.memory import SharedArena

CPU = torch.device("cpu")
LAYERS, HEADS, TOKENS, DIM = 5, 4, 3, 2


def states(heads: int = HEADS) -> torch.Tensor:
    return torch.arange(LAYERS * heads * TOKENS * DIM).view(LAYERS, heads, TOKENS, DIM).float()


def test_pieces_copy_their_layers_alone() -> None:
    whole, part = states(), torch.zeros(LAYERS, 2, TOKENS, DIM)
    runs = runs_of([(part, whole[:, 1:3])])
    for end, piece in zip((2, 3, 5), pieces_of(runs, (2, 3, 5)), strict=True):
        copy_runs(piece, CPU)
        assert torch.equal(part[:end], whole[:end, 1:3])
        assert not part[end:].any()


def test_states_of_other_strides_do_not_cross() -> None:
    with pytest.raises(ValueError, match="strides"):
        runs_of([(torch.zeros(LAYERS, 2, TOKENS, DIM), states().transpose(1, 2))])
    with pytest.raises(ValueError, match="dtypes"):
        runs_of([(states().double(), states())])


def test_copies_on_one_device_may_have_any_strides() -> None:
    part = torch.zeros(LAYERS, HEADS, TOKENS, DIM)
    copy_layers(part.transpose(1, 2), states().transpose(1, 2))
    assert torch.equal(part, states())


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("own", "first"), [(2, 0), (2, 2), (HEADS, 0)])
def test_every_rank_copies_its_own_heads(up: bool, own: int, first: int) -> None:
    """A follower whose device memory lies elsewhere than the leader's."""
    arena = SharedArena.create()
    host = arena.copy(states() if up else torch.zeros_like(states()))
    leaders = torch.zeros(LAYERS, own, TOKENS, DIM)
    regions = FollowerRegions(CPU)
    regions.add(NewRegion(1, leaders.data_ptr(), leaders.nbytes, zeros=True))
    ours = regions._regions[1].view(torch.float32).view_as(leaders)
    if not up:
        ours.copy_(states()[:, first : first + own])
    pair = (leaders, host) if up else (host, leaders)
    crossings = Crossings.of([pair], arena.address, up=up)
    copy_runs(crossings.addressed(arena.address, first, regions.move), CPU)
    assert torch.equal(host[:, first : first + own], ours)
    assert torch.equal(ours, states()[:, first : first + own])
    assert not leaders.any()
