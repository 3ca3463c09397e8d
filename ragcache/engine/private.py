"""Where a request's own states stand: in one contiguous room, or in chunks of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragcache.attention import PageWrite, RunWrite, Write
from ragcache.engine.pool import ChunkPool
from ragcache.models import LanguageModel
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens begin:end of keys and values [L, Hkv, tokens, D]: contiguous in every layer."""

    keys: Tensor
    values: Tensor
    begin: int
    end: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Equal for stretches of the same memory."""
        return (self.keys.data_ptr(), self.begin, self.end)


class PrivateStates(Protocol):
    """Room for a request's own tokens, filled step by step."""

    @property
    def length(self) -> int:
        """Tokens filled."""
        ...

    @property
    def positions(self) -> Sequence[int]:
        """Where the filled tokens stand."""
        ...

    def stretches(self) -> list[Stretch]:
        """The filled tokens, chunk by chunk, in order."""
        ...

    def write(self, begin: int, end: int) -> Write:
        """How the step's rows begin:end follow the filled tokens."""
        ...

    def advance(self, positions: Sequence[int]) -> None:
        """A step has written tokens at these positions."""
        ...


class Room:
    """One contiguous room. keys, values: [L, Hkv, capacity, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.positions: list[int] = []

    @classmethod
    def allocate(cls, model: LanguageModel, capacity: int) -> Room:
        return cls(*model.new_states(capacity))

    @property
    def length(self) -> int:
        return len(self.positions)

    def stretches(self) -> list[Stretch]:
        return [Stretch(self.keys, self.values, 0, self.length)] if self.length else []

    def write(self, begin: int, end: int) -> RunWrite:
        assert self.length + end - begin <= self.keys.shape[2]
        return RunWrite(self.keys, self.values, self.length, begin, end)

    def advance(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)

    def as_states(self, start: int) -> KVStates:
        """The filled room as states of their own, encoded from position `start` on."""
        return KVStates(self.keys[:, :, : self.length], self.values[:, :, : self.length], start)


class Pages:
    """Chunks of the pool (ChunkAttention's PAKV). All but the last are full."""

    def __init__(self, pool: ChunkPool) -> None:
        self.pool = pool
        self.chunk_ids: list[int] = []
        self.positions: list[int] = []

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def capacity(self) -> int:
        """Tokens that the chunks held now have room for."""
        return len(self.chunk_ids) * self.pool.chunk

    def stretches(self) -> list[Stretch]:
        size, left = self.pool.chunk, self.length
        found = []
        for chunk in self.chunk_ids[: -(-left // size)]:
            begin = chunk * size
            found.append(Stretch(self.pool.keys, self.pool.values, begin, begin + min(size, left)))
            left -= size
        return found

    def slots(self, tokens: int) -> list[int]:
        """Where the next tokens go in the pool."""
        size = self.pool.chunk
        assert self.length + tokens <= self.capacity
        return [
            self.chunk_ids[at // size] * size + at % size
            for at in range(self.length, self.length + tokens)
        ]

    def write(self, begin: int, end: int) -> PageWrite:
        device = self.pool.keys.device
        index = torch.tensor(self.slots(end - begin), device=device)
        rows = torch.arange(begin, end, device=device)
        return PageWrite(self.pool.keys, self.pool.values, index, rows)

    def advance(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)
