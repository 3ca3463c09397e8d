"""The states themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVStates:
    """Keys and values of a run of tokens, encoded at positions start, start+1, ...

    keys, values: [L, Hkv, S, D] in the model's dtype. Rotary keys carry their
    rotation at those positions; a prompt that wants the run elsewhere turns its queries.
    """

    keys: Tensor
    values: Tensor
    start: int

    @property
    def length(self) -> int:
        """S, in tokens."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes

    def part(self, begin: int, end: int, start: int) -> KVStates:
        """Tokens begin:end as states of their own, encoded from position `start` on. A view."""
        return KVStates(self.keys[:, :, begin:end], self.values[:, :, begin:end], start)
