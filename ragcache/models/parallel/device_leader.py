"""Splitting a model over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache.models.model import CausalLM
from ragcache.models.parallel.collectives import Collectives, GlooCollectives, SignsOfLife
from ragcache.models.parallel.device_model import (
    DeviceChannel,
    DeviceParallelLM,
    WholeSizes,
    devices_of,
)
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.messages import MessageWriter
from ragcache.models.parallel.plans import attach, check_model
from ragcache.models.parallel.ranks import FollowerProcesses
from ragcache.models.parallel.ring import RING_BYTES
from ragcache.models.parallel.shards import split_parts


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The first message to a follower."""

    shard: Any
    """The rank's Hugging Face model, whose weights lie in shared memory."""
    sizes: WholeSizes
    key_heads: slice
    device: torch.device
    ring: Tensor
    """Memory of later messages."""


def split_over_devices(whole: CausalLM, ranks: int, device: torch.device) -> DeviceParallelLM:
    """Split a model over devices, the first of which is this process's.

    Each rank copies its part of the weights to its device.

    Args:
        whole: A model in main memory. Its weights are moved to memory that all ranks map, which is
            free again when nothing refers to the model.
        ranks: Number of devices.
        device: The first device.

    Raises:
        UnsupportedModel: The model cannot be split.
        ConfigurationError: The system has no memory that processes share.
        EngineFailed: A process could not load its part.
    """
    check_model(whole.model, ranks)
    arena = SharedArena.create()
    signs = SignsOfLife(arena, ranks)
    followers = FollowerProcesses(ranks, arena, signs, devices=True)
    try:
        return _distribute(whole, arena, followers, signs, device)
    except BaseException:
        followers.close()
        raise


def _distribute(
    whole: CausalLM,
    arena: SharedArena,
    followers: FollowerProcesses,
    signs: SignsOfLife,
    device: torch.device,
) -> DeviceParallelLM:
    ranks, writer, sizes = followers.ranks, MessageWriter(arena), WholeSizes.of(whole)
    models, heads = split_parts(whole, ranks, arena)
    devices, ring = devices_of(device, ranks), arena.allocate(RING_BYTES)
    given = torch.from_numpy(ring)
    for rank in range(1, ranks):
        setup = DeviceSetup(models[rank], sizes, heads[rank], devices[rank], given)
        followers.send(rank, writer.dumps(setup))
    shard = models[0].to(devices[0])
    followers.wait_until_ready()
    collectives: Collectives
    if device.type == "cuda":
        from ragcache.models.parallel.device_collectives import DeviceCollectives

        torch.cuda.set_device(devices[0])
        collectives = DeviceCollectives(followers.folder, 0, ranks, devices[0])
    else:
        collectives = GlooCollectives(followers.folder, 0, ranks, signs)
    followers.on_failure.append(lambda _: collectives.release())
    try:
        followers.wait_for(collectives.connect)
        attach(shard, collectives)
        channel = DeviceChannel(devices[0], arena, followers, signs, ring)
        return DeviceParallelLM(shard, sizes, heads[0], collectives, channel, followers, signs)
    except BaseException:
        followers.close()
        collectives.release()  # a sum under way would not end, and its memory not be freed
        collectives.close()
        raise
