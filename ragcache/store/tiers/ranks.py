"""Tiers of a model that several devices compute: each device has states of its own heads.

Main memory and all blobs have the states of all heads, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragcache.states import Arrival
from ragcache.states.kv import CopyEvent
from ragcache.states.quantization import StoredStates

Way = Literal["compute", "upload", "download"]
CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies the second tensor to the first, without waiting for a device."""


class RankCopies(Protocol):
    """Copies that all ranks of a model make at once, each of its own heads."""

    @property
    def heads(self) -> int:
        """Key heads of a device's states."""

    @property
    def whole_heads(self) -> int:
        """Key heads of states in main memory."""

    def new_memory(self, nbytes: int) -> Tensor:
        """Allocate zeros, uint8 [nbytes], on all devices."""

    def new_host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate main memory that all ranks map, uint8 [nbytes]."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register the other ranks' mappings of some of this memory with CUDA."""

    def unpin(self, address: int) -> None:
        """End these registrations. May be called in a finalizer."""

    def copying(self, way: Way) -> AbstractContextManager[tuple[CopyTensor, int]]:
        """Yield a function that copies on all ranks, and the number of these copies.

        This rank queues its copies at the end of the block, each on the stream that was current
        when it was asked for.
        """

    def upload(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        ends: Sequence[int],
        record: Callable[[], CopyEvent],
    ) -> tuple[list[CopyEvent], int]:
        """Copy states to the devices of all ranks, on the current stream: the first layers of all
        of them, and so on.

        Args:
            pairs: Tensors of this rank's device, and sources of all heads in main memory.
            ends: Layers with which the pieces end.
            record: Returns an event behind the copies that are queued on the current stream.

        Returns:
            The events of this rank's pieces, and the number of the copies.
        """

    def event(self, event: CopyEvent | None, way: Way, number: int) -> CopyEvent:
        """Return the end of numbered copies on all ranks. `event`: end of this rank's part."""

    def note_arrival(self, arrival: Arrival, number: int, event: CopyEvent) -> None:
        """Remember which upload an arrival is of. `event`: end of this rank's part."""


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copy a tensor, without waiting for a device."""
    target.copy_(source, non_blocking=True)


def own_heads(states: StoredStates, ranks: RankCopies | None) -> StoredStates:
    """Return a view of as many heads as a device has of some states, for their sizes."""
    if ranks is None or states.keys.shape[1] == ranks.heads:
        return states
    return replace(
        states, keys=states.keys[:, : ranks.heads], values=states.values[:, : ranks.heads]
    )
