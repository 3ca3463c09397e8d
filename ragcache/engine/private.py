"""A request's private states: room for its own tokens, filled step by step."""

from __future__ import annotations

from torch import Tensor

from ragcache.attention import PrivateRun
from ragcache.models import CausalLM
from ragcache.states import KVStates


class PrivateStates:
    """keys, values: [L, Hkv, capacity, D], of which the first `length` tokens are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.length = 0

    @classmethod
    def allocate(cls, model: CausalLM, capacity: int) -> PrivateStates:
        return cls(*model.new_states(capacity))

    def run(self, begin: int, end: int, slot: int) -> PrivateRun:
        """The part of a step in which rows begin:end are this request's next tokens."""
        assert self.length + end - begin <= self.keys.shape[2]
        return PrivateRun(self.keys, self.values, self.length, begin, end, slot)

    def advance(self, tokens: int) -> None:
        """The step has written this many tokens."""
        self.length += tokens

    def as_states(self, start: int) -> KVStates:
        """The filled room as states of their own, encoded from position `start` on."""
        return KVStates(self.keys[:, :, : self.length], self.values[:, :, : self.length], start)
