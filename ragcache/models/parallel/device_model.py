"""Models of ranks on devices: each has the states of its own heads, in regions of its own device.

The leader's model has callers, scheduler, sampler and store around it. Each allocation and each
copy of states on the leader's device is a message, and every rank does the same on its device.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import EngineFailed
from ragcache.models.families import wrap_causal
from ragcache.models.model import CausalLM, Dimensions
from ragcache.models.parallel.collectives import Collectives, SignsOfLife
from ragcache.models.parallel.device_copies import LeaderCopies
from ragcache.models.parallel.device_memory import LeaderRegions
from ragcache.models.parallel.layer_copies import copy_layers
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.messages import MessageWriter
from ragcache.models.parallel.ranks import FollowerProcesses
from ragcache.models.parallel.ring import Part, RingWriter
from ragcache.states.kv import capture_lock


@dataclass(frozen=True, slots=True)
class WholeSizes:
    """Sizes of the whole model that every rank needs."""

    num_kv_heads: int
    logits_width: int
    fingerprint: str
    states_dtype: torch.dtype

    @classmethod
    def of(cls, whole: CausalLM) -> WholeSizes:
        """Read the sizes of a model that is not split."""
        return cls(whole.num_kv_heads, whole.logits_width, whole.fingerprint, whole.states_dtype)


class DeviceRankLM(CausalLM):
    """The part of a model that a rank computes on its device.

    Args:
        shard: The rank's Hugging Face model, on its device.
        sizes: Sizes of the whole model.
        key_heads: The rank's key heads, among all.
        collectives: Joint computations with the other ranks.
    """

    whole_layers = True  # ranks meet in the sums behind the last attention

    def __init__(
        self, shard: Any, sizes: WholeSizes, key_heads: slice, collectives: Collectives
    ) -> None:
        part = wrap_causal(shard)
        own = Dimensions(
            part.num_layers, part.num_heads, part.num_kv_heads, part.head_dim, part.window
        )
        super().__init__(
            part.model,
            part.scheme,
            part.backend,
            own,
            part.windows,
            part.softcap,
            kernels=part.kernels,
        )
        self.sizes, self.key_heads, self.collectives = sizes, key_heads, collectives
        self.fingerprint, self.states_dtype = sizes.fingerprint, sizes.states_dtype
        self.logits_width = sizes.logits_width

    def gather_logits(self, part: Tensor) -> Tensor:
        """Return the logits of all ranks to the leader.

        Args:
            part: This rank's columns, as `forward` returns them.
        """
        return self.collectives.gather_columns(part, self.logits_width)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute passes within the block without the other ranks."""
        self.collectives.alone = True
        try:
            yield
        finally:
            self.collectives.alone = False

    def copy_heads(self, target: Tensor, source: Tensor) -> None:
        """Copy states [L, Hkv, S, D], between tensors of the rank's heads and of all heads."""
        ours = min(target.shape[1], source.shape[1])
        target, source = (
            each if each.shape[1] == ours else each[:, self.key_heads] for each in (target, source)
        )
        copy_layers(target, source)


@dataclass(frozen=True, slots=True)
class CopyStates:
    """Message: copy states."""

    target: Tensor
    source: Tensor

    def run(self, follower: Any) -> None:
        """Copy the heads of a follower."""
        follower.model.copy_heads(self.target, self.source)


class DeviceChannel:
    """Messages from the leader to all followers, in the order of the leader's work. Thread-safe.

    Attributes:
        lock: Held while a message is sent and the leader queues its own part of the work.
        ended: Messages about objects that have ended, which precede the next message. Finalizers
            append to it in any thread.
        arena: Main memory that all ranks map.
        regions: Device memory that every rank has.
    """

    def __init__(
        self,
        device: torch.device,
        arena: SharedArena,
        followers: FollowerProcesses,
        signs: SignsOfLife,
        ring: NDArray[np.uint8],
    ) -> None:
        self.lock = threading.RLock()
        self.ended = deque[Any]()
        self.regions = LeaderRegions(device, self._post, self.lock)
        self.arena = arena
        self._followers, self._signs = followers, signs
        self._writer = MessageWriter(arena, self.regions)
        self._ring = RingWriter(ring, signs, followers.send, followers.check)
        self._numbers = 0

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Hold the lock while this thread sends messages and queues its own part of the work. An
        error within ends all ranks, which are in step no more."""
        signs = self._signs
        with self.lock, self._followers.computing():
            begin = signs.waiting[0] or time.monotonic()
            signs.waiting[0] = begin
            try:
                yield
            finally:
                signs.waiting[0] = 0.0
                signs.worked[0] = max(time.monotonic() - begin, 0.9 * signs.worked[0])

    def number(self) -> int:
        """Return a number that no other object of the ranks has."""
        with self.lock:
            self._numbers += 1
            return self._numbers

    def send(self, message: Any) -> None:
        """Send a message. Raises `EngineFailed` once a rank has failed."""
        with self.lock:
            self._settle()
            self._post(message)

    def send_parts(self, *parts: Part) -> None:
        """Send a message that is laid out. Raises `EngineFailed` once a rank has failed."""
        with self.lock:
            self._settle()
            self._write(*parts)

    def wake(self) -> None:
        """Wake followers that sleep, shortly before a message."""
        with self.lock:
            self._ring.wake()

    def _settle(self) -> None:
        """Send what precedes every message: the ends of objects."""
        self.regions.settle()
        while self.ended:
            self._post(self.ended.popleft())

    def _post(self, message: Any) -> None:
        self._write(self._writer.dumps(message))

    def _write(self, *parts: Part) -> None:
        try:
            self._ring.write(*parts)
        except BaseException:
            with self._followers.sending():
                raise


class DeviceParallelLM(DeviceRankLM):
    """A model that several devices compute together: the leader's part, with its own heads.

    Bytes of kept states count all heads. Bytes of states on the device count the heads of one
    rank.

    Args:
        shard: The leader's Hugging Face model, on its device.
        sizes: Sizes of the whole model.
        key_heads: The leader's key heads.
        collectives: Joint computations with the followers.
        channel: Messages to the followers.
        followers: The other ranks.
        signs: Signs of life of all ranks.

    Attributes:
        copies: Copies of states between tiers.
    """

    def __init__(
        self,
        shard: Any,
        sizes: WholeSizes,
        key_heads: slice,
        collectives: Collectives,
        channel: DeviceChannel,
        followers: FollowerProcesses,
        signs: SignsOfLife,
    ) -> None:
        super().__init__(shard, sizes, key_heads, collectives)
        self.channel, self._followers = channel, followers
        self.copies = LeaderCopies(self, signs)
        self.ranks = collectives.ranks

    @property
    def failure(self) -> EngineFailed | None:
        """See `CausalLM.failure`."""
        return self._followers.failure

    def on_failure(self, call: Callable[[EngineFailed], object]) -> None:
        """See `CausalLM.on_failure`."""
        self._followers.on_failure.append(call)

    @property
    def kept_heads(self) -> int:
        """See `CausalLM.kept_heads`."""
        return self.sizes.num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """See `CausalLM.bytes_per_token`. Of all heads."""
        width = self.head_dim + self.value_dim
        return self.num_layers * self.kept_heads * width * self.states_dtype.itemsize

    def new_states(
        self, capacity: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `CausalLM.new_states`. On the devices of all ranks."""
        if device is not None and device != self.device:
            return super().new_states(capacity, device)
        shape = (self.num_layers, self.num_kv_heads, capacity)
        keys = self.channel.regions.empty((*shape, self.head_dim), self.dtype)
        return keys, self.channel.regions.empty((*shape, self.value_dim), self.dtype)

    def copy_states(self, target: Tensor, source: Tensor) -> None:
        """See `CausalLM.copy_states`. On every rank."""
        with self.channel.launching():
            self.channel.send(CopyStates(target, source))
            self.copy_heads(target, source)

    def close(self) -> None:
        """End the followers, and free the memory of this rank's device, whoever still refers to the
        model. It computes nothing afterwards."""
        self._followers.close()
        with capture_lock:  # freeing memory synchronizes, which a capture forbids
            self.collectives.close()
        for each in chain(self.model.parameters(), self.model.buffers()):
            each.data = each.data.new_empty(0)


def finalize(owner: object, channel: DeviceChannel, message: Any) -> None:
    """Send a message with the next one after the end of an object."""
    weakref.finalize(owner, channel.ended.append, message).atexit = False


def devices_of(device: torch.device, ranks: int) -> Sequence[torch.device]:
    """Return the devices of all ranks. A CPU serves all of them, in tests."""
    if device.type != "cuda":
        return [device] * ranks
    first = device.index or 0
    return [torch.device("cuda", first + rank) for rank in range(ranks)]
