"""A follower on a device of its own: a process that executes the leader's messages."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import nullcontext

import torch
from torch._dynamo.callback import callback_handler
from triton import knobs

from ragcache.engine.device_ranks import DeviceFollower, read_device_message
from ragcache.machine import frozen_heap
from ragcache.models.parallel.collectives import Collectives, GlooCollectives, SignsOfLife
from ragcache.models.parallel.device_leader import DeviceSetup
from ragcache.models.parallel.device_memory import FollowerRegions
from ragcache.models.parallel.device_model import DeviceRankLM
from ragcache.models.parallel.follower import RankProcess, run_process
from ragcache.models.parallel.messages import read_message
from ragcache.models.parallel.plans import attach
from ragcache.models.parallel.ranks import COMPILING
from ragcache.models.parallel.ring import RingReader

TRACES_VARIABLE = "RAGCACHE_RANK_TRACES"
"""Environment variable: if set, SIGUSR1 writes the stacks of a follower's threads to stderr."""


def main() -> None:
    """Run a follower until the leader closes the connection or ends."""
    run_process(_serve)


def _serve(process: RankProcess) -> None:
    if os.environ.get(TRACES_VARIABLE):
        faulthandler.register(signal.SIGUSR1)
    setup: DeviceSetup = read_message(process.connection.recv_bytes(), process.memory)
    device = setup.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shard = setup.shard.to(device)
    process.connection.send_bytes(b"")
    collectives: Collectives
    if device.type == "cuda":
        from ragcache.models.parallel.device_collectives import DeviceCollectives

        collectives = DeviceCollectives(process.folder, process.rank, process.ranks, device)
    else:
        collectives = GlooCollectives(process.folder, process.rank, process.ranks, process.signs)
    collectives.connect()
    attach(shard, collectives)
    model = DeviceRankLM(shard, setup.sizes, setup.key_heads, collectives)
    regions = FollowerRegions(device)
    ring = RingReader(setup.ring.numpy(), process.signs, process.rank, process.connection)
    follower = DeviceFollower(model, regions, process.memory, process.signs, process.rank)
    Compilations(process.signs, process.rank).report()
    with frozen_heap():
        follow_device(follower, process, ring)


class Compilations:
    """Tells the leader's watch that this rank compiles, which is no hang.

    The leader's own time for a message is no measure of it: if its process had a model before, it
    has compiled the kernels already, and new followers have not. So the time since which the watch
    waits for the message moves on: by `COMPILING` while PyTorch compiles a graph, and to the
    present with each kernel that Triton has compiled. A single kernel has the watch's `PATIENCE`.

    Args:
        signs: Signs of life of all ranks.
        rank: Number of this rank.
    """

    def __init__(self, signs: SignsOfLife, rank: int) -> None:
        self._waiting, self._rank = signs.waiting, rank

    def report(self) -> None:
        """Report graphs that PyTorch compiles in this process, and kernels that Triton loads."""
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        knobs.runtime.kernel_load_start_hook.add(self._load)

    def _begin(self, _: object) -> None:
        self._move(time.monotonic() + COMPILING)

    def _end(self, _: object) -> None:
        self._move(time.monotonic())

    def _load(self, *_: object) -> None:
        """Triton has compiled a kernel, perhaps within a graph's time."""
        self._move(max(time.monotonic(), self._waiting[self._rank]))

    def _move(self, begin: float) -> None:
        if self._waiting[self._rank]:  # between messages nothing is awaited
            self._waiting[self._rank] = begin


@torch.inference_mode()
def follow_device(follower: DeviceFollower, process: RankProcess, ring: RingReader) -> None:
    """Carry out messages until the leader closes the connection."""
    waiting, rank, stream = process.signs.waiting, process.rank, follower.stream
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        while True:
            content = ring.read()
            waiting[rank] = time.monotonic()
            read_device_message(content, process.memory, follower.regions).run(follower)
            ring.done()
            waiting[rank] = 0.0
