"""Collectives of GPUs, without GPUs: which sums are left to NCCL, and how they end."""

from __future__ import annotations

from threading import Event

import pytest
import torch
from torch import Tensor

from ragcache.models.parallel.collectives import RankLost
from ragcache.models.parallel.device_collectives import DeviceCollectives

pytest.importorskip("triton", reason="triton is not installed")

from ragcache.models.parallel.one_shot import OneShot


class Kernels:
    """`OneShot` for sums of up to four rows."""

    released = False

    def holds(self, rows: int, nbytes: int) -> bool:
        return rows <= 4

    def sum_parts(self, part: Tensor) -> Tensor:
        return part

    def release(self) -> None:
        self.released = True


class Nccl:
    """`torch.distributed` and its group, whose sums nobody joins."""

    def __init__(self) -> None:
        self.sums, self.aborted = 0, Event()

    def all_reduce(self, part: Tensor) -> None:
        self.sums += 1

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl() -> Nccl:
    return Nccl()


@pytest.fixture
def collectives(nccl: Nccl) -> DeviceCollectives:
    made = DeviceCollectives.__new__(DeviceCollectives)  # without GPUs
    made._shared, made._distributed, made._group = Kernels(), nccl, nccl
    made.alone = made._released = False
    return made


def test_a_release_ends_small_and_large_sums(collectives: DeviceCollectives, nccl: Nccl) -> None:
    collectives.sum_parts(torch.zeros(4, 8))
    assert nccl.sums == 0
    collectives.sum_parts(torch.zeros(5, 8))
    assert nccl.sums == 1
    collectives.release()
    assert collectives._shared.released
    assert nccl.aborted.wait(10)


def test_a_release_before_all_ranks_have_met_ends_nccl(
    collectives: DeviceCollectives, nccl: Nccl
) -> None:
    collectives._shared = None
    collectives.release()
    assert nccl.aborted.wait(10)


def test_a_pass_begins_with_the_first_slot() -> None:
    shared = OneShot.__new__(OneShot)  # without GPUs
    shared._next = 1  # as after an odd number of sums, in a capture that failed
    shared.begin_pass()
    assert shared._next == 0


def test_no_large_sum_begins_once_a_rank_is_lost(
    collectives: DeviceCollectives, nccl: Nccl
) -> None:
    collectives.release()
    with pytest.raises(RankLost):
        collectives.sum_parts(torch.zeros(5, 8))
    assert nccl.sums == 0
