"""Memory of texts that are computed as a whole, such as modules that are encoded.

Each text has contiguous memory of its own, outside the pool of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ragcache.attention import ContiguousWrite
from ragcache.attention.recurrent import RecordedMaps, RecurrentRun
from ragcache.models import CausalLM
from ragcache.states import KVStates
from ragcache.states.recurrent import RecurrentSnapshot, RecurrentStates


@dataclass(frozen=True, slots=True, eq=False)
class KVSpan:
    """Tokens begin:end of keys and values [L, Hkv, tokens, D], contiguous in every layer."""

    keys: Tensor
    values: Tensor
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def memory(self) -> tuple[int, int, int]:
        """Identity of the memory: equal for spans of the same tokens."""
        return (self.keys.data_ptr(), self.begin, self.end)


class ContiguousKV:
    """Contiguous memory [L, Hkv, capacity, D] for the tokens of a text, filled step by step.

    `positions` lists the positions of the filled tokens; finished states are converted to
    `states_dtype`.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, states_dtype: torch.dtype | None = None
    ) -> None:
        self.keys, self.values = keys, values
        self.states_dtype = states_dtype or keys.dtype
        self.positions: list[int] = []

    @classmethod
    def allocate(cls, model: CausalLM, capacity: int) -> Self:
        """Allocate memory for `capacity` tokens."""
        return cls(*model.new_states(capacity), model.states_dtype)

    @property
    def length(self) -> int:
        return len(self.positions)

    def spans(self) -> list[KVSpan]:
        """The filled tokens, as at most one span."""
        return [KVSpan(self.keys, self.values, 0, self.length)] if self.length else []

    def write_rows(self, begin: int, end: int) -> ContiguousWrite:
        """Write the step's rows begin:end behind the filled tokens."""
        assert self.length + end - begin <= self.keys.shape[2]
        return ContiguousWrite(self.keys, self.values, self.length, begin, end)

    def advance(self, positions: Sequence[int]) -> None:
        """Count tokens that a step has written, at these positions."""
        self.positions.extend(positions)

    def as_states(self, start: int) -> KVStates:
        """The filled tokens as states encoded from position `start` on, in `states_dtype`."""
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        return KVStates(keys.to(self.states_dtype), values.to(self.states_dtype), start)


class EncodedKV(ContiguousKV):
    """Memory for a module that is encoded, with the map of its tokens so far.

    A step writes new states and maps, which `advance` takes over.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, states_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(keys, values, states_dtype)
        self.root: tuple[RecurrentStates, ...] = ()
        """Map of the text before the module."""
        self._states: RecurrentSnapshot | None = None
        self._maps = RecordedMaps()
        self._launched: tuple[RecurrentSnapshot, RecordedMaps] | None = None

    def runs(self, begin: int, end: int) -> list[RecurrentRun]:
        """The run of the step's rows begin:end."""
        maps, after = RecordedMaps(self._maps.after), RecurrentSnapshot()
        self._launched = after, maps
        documents = () if self.length else self.root
        return [RecurrentRun(begin, end, self._states, after, documents, maps=maps)]

    def advance(self, positions: Sequence[int]) -> None:
        super().advance(positions)
        if self._launched is not None:
            self._states, self._maps = self._launched
            self._launched = None

    def as_states(self, start: int) -> KVStates:
        """See `ContiguousKV.as_states`. Adds the map of the tokens."""
        maps = [each for _, each in sorted(self._maps.after.items())]
        recurrent = RecurrentStates.of(maps, self.states_dtype)
        return replace(super().as_states(start), recurrent=recurrent)
