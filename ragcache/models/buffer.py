"""Buffers: one contiguous stretch of keys and values a request, reused by later requests.

Prompt Cache §4.2: concatenating cached modules allocates memory for every prompt, so the states are
written into a buffer that is allocated once and taken again for the next prompt.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ragcache.models.language import LanguageModel

SMALLEST = 64
"""Tokens of the smallest buffer. Larger ones double, so that a growing request moves seldom."""


class Buffer:
    """keys, values: [L, Hkv, capacity, D], of which the first `length` tokens are filled.

    positions: [capacity] int64, where each filled token stands. seen_from: [capacity] int64, the
    first position that may see it: its own, or where its segment starts.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.positions = torch.empty(keys.shape[2], dtype=torch.int64, device=keys.device)
        self.seen_from = torch.empty_like(self.positions)
        self.length = 0

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def advance(self, positions: Tensor, seen_from: Tensor) -> None:
        """The next tokens stand, at these positions ([T]); seen_from: [T] or one for all."""
        here = slice(self.length, self.length + len(positions))
        self.positions[here] = positions
        self.seen_from[here] = seen_from
        self.length = here.stop

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, seen_from: Tensor | None = None
    ) -> None:
        """Copies tokens in as they are. keys, values: [L, Hkv, T, D]; seen_from: None where every
        token may be seen from its own position on."""
        here = slice(self.length, self.length + keys.shape[2])
        self.keys[:, :, here] = keys
        self.values[:, :, here] = values
        self.advance(positions, positions if seen_from is None else seen_from)


class BufferPool:
    """Buffers of powers of two, reused by capacity. Not thread-safe.

    keep_bytes: what unused buffers may take together; those unused for longest go first.
    """

    def __init__(self, model: LanguageModel, keep_bytes: int) -> None:
        self.model, self.keep_bytes = model, keep_bytes
        self._unused: deque[Buffer] = deque()
        self._unused_bytes = 0

    @property
    def unused(self) -> int:
        """How many buffers wait for a request."""
        return len(self._unused)

    def take(self, tokens: int) -> Buffer:
        """An empty buffer for at least `tokens`."""
        capacity = max(SMALLEST, 1 << (tokens - 1).bit_length())
        # the last one given back is the likeliest to be in the processor's caches
        for buffer in reversed(self._unused):
            if buffer.capacity == capacity:
                self._unused.remove(buffer)
                self._unused_bytes -= buffer.nbytes
                buffer.length = 0
                return buffer
        return Buffer(*self.model.new_states(capacity))

    def grown(self, buffer: Buffer, tokens: int) -> Buffer:
        """The buffer, or a larger one that took over what it held: room for `tokens` in all."""
        if tokens <= buffer.capacity:
            return buffer
        larger = self.take(tokens)
        filled = slice(0, buffer.length)
        keys, values = buffer.keys[:, :, filled], buffer.values[:, :, filled]
        larger.append(keys, values, buffer.positions[filled], buffer.seen_from[filled])
        self.give(buffer)
        return larger

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back."""
        self._unused.append(buffer)
        self._unused_bytes += buffer.nbytes
        while self._unused_bytes > self.keep_bytes:
            self._unused_bytes -= self._unused.popleft().nbytes


class BufferCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Writes each layer's new states behind the buffer's, and shows the layer all of them."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(layers=[])
        self.buffer = buffer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, Hkv, T, D]; returns views, [1, Hkv, length + T, D]."""
        buffer = self.buffer
        end = buffer.length + key_states.shape[2]
        buffer.keys[layer_idx, :, buffer.length : end] = key_states[0]
        buffer.values[layer_idx, :, buffer.length : end] = value_states[0]
        return buffer.keys[layer_idx, None, :, :end], buffer.values[layer_idx, None, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.buffer.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self.buffer.length + query_length, 0
