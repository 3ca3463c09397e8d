"""Messages between ranks: pickled objects whose tensors cross as places in shared memory."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ragcache.models.parallel.device_memory import FollowerRegions, LeaderRegions, Place
from ragcache.models.parallel.memory import MappedMemory, SharedArena

MOST_INLINE = 2**16
"""Bytes up to which a tensor outside shared memory is a part of the message."""

_Reference: TypeAlias = tuple[bool, torch.dtype, tuple[int, ...], tuple[int, ...] | None, Any]
"""Whether a tensor is a parameter, its dtype and shape, and its strides and place in shared memory,
or None and its bytes."""


class MessageWriter:
    """Writes messages of the leader. Not thread-safe.

    A large tensor outside shared memory is copied there once, and the copy lives as long as the
    tensor: states that a file holds, or that were stored in eight bits.

    Args:
        arena: The memory that all ranks map.
        regions: Device memory that every rank has, if any.
    """

    def __init__(self, arena: SharedArena, regions: LeaderRegions | None = None) -> None:
        self.arena, self.regions = arena, regions
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def dumps(self, message: object) -> bytes:
        """Return the message as bytes. Tensors must not change before it has been read."""
        file = io.BytesIO()
        _Pickler(file, self).dump(message)
        return file.getvalue()

    def reference(self, tensor: Tensor) -> _Reference:
        """Describe a tensor for `MessageReader`."""
        given = tensor
        place: Place | int | None = None
        if self.regions is not None:
            place = self.regions.place_of(tensor)
        if place is None and tensor.is_cuda:
            raise ValueError("a tensor of a GPU crosses between ranks only as a part of a region")
        if place is None:
            place = self.arena.place_of(tensor)
        if place is None and tensor.nbytes > MOST_INLINE:
            if tensor not in self._copies:
                self._copies[tensor] = self.arena.copy(tensor)
            given = self._copies[tensor]
            place = self.arena.place_of(given)
        described = isinstance(tensor, nn.Parameter), tensor.dtype, tuple(tensor.shape)
        if place is not None:
            return *described, given.stride(), place
        if not tensor.numel():
            return *described, None, b""
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return *described, None, content.numpy().tobytes()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, writer: MessageWriter) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._writer = writer

    def persistent_id(self, thing: Any) -> _Reference | None:
        return self._writer.reference(thing) if isinstance(thing, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, memory: MappedMemory, regions: FollowerRegions | None
    ) -> None:
        super().__init__(file)
        self._memory, self._regions = memory, regions

    def persistent_load(self, pid: _Reference) -> Tensor:
        parameter, dtype, shape, strides, content = pid
        if isinstance(content, Place):
            assert self._regions is not None
            tensor = self._regions.tensor(content, dtype, shape, strides or ())
        elif strides is not None:
            tensor = self._memory.tensor(content, dtype, shape, strides)
        elif content:
            tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensor = tensor.view(dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        return nn.Parameter(tensor, requires_grad=False) if parameter else tensor


def read_message(
    content: bytes | memoryview, memory: MappedMemory, regions: FollowerRegions | None = None
) -> Any:
    """Return a message of the leader, whose tensors are views of `memory` and `regions`."""
    return _Unpickler(io.BytesIO(content), memory, regions).load()  # nosec B301: of the parent process
