"""Key and value states of a module, and the key under which they are stored."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragcache.states.arrival import Arrival

if TYPE_CHECKING:
    from torch import Tensor  # the ledger knows keys, and opens without torch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KVStates:
    """Keys and values of a run of tokens, encoded at positions start, start+1, ...

    keys, values: [L, Hkv, S, D] in the model's `states_dtype`; D of the values is 0 where keys
    serve as values (latent attention). Rotary keys carry their rotation at those positions; a
    prompt that holds them elsewhere turns its queries.
    arrival: of states that are still being copied to a device, which is to be waited for before
    they are read; None for all others. They have no scales: see `QuantizedStates`.
    """

    keys: Tensor
    values: Tensor
    start: int
    arrival: Arrival | None = field(default=None, kw_only=True)

    @property
    def key_scales(self) -> None:
        """None: keys are as they were encoded."""

    @property
    def value_scales(self) -> None:
        """None: values are as they were encoded."""

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
        keys, values = self.keys[:, :, begin:end], self.values[:, :, begin:end]
        return KVStates(keys, values, start, arrival=self.arrival)

    def layer(self, number: int) -> KVStates:
        """One layer alone. A view."""
        here = slice(number, number + 1)
        return KVStates(self.keys[here], self.values[here], self.start, arrival=self.arrival)


FORMAT_VERSION = 3
"""Raised when encoding or the blob format changes, so that older states are not found."""


@dataclass(frozen=True, slots=True, order=True)
class KVKey:
    """A digest of everything that states depend on, 64 hexadecimal digits.

    Equal keys mean interchangeable states.
    """

    digest: str

    def __hash__(self) -> int:
        return hash(self.digest)  # which a string remembers

    def __str__(self) -> str:
        return self.digest


def state_key(
    *, model: str, tokenizer: str, scheme: str, mode: str, token_ids: Sequence[int], start: int,
    root: KVKey | None, offsets: Sequence[int] | None = None, salt: str = "",
) -> KVKey:  # fmt: skip
    """The key of the states of `token_ids` encoded from position `start`.

    model: the fingerprint of weights, configuration and dtype; tokenizer: that of the tokenizer;
    scheme: that of the position scheme; mode: `rooted` or `isolated`; root: the key of the states
    that preceded these while they were encoded (the preamble), if any; offsets: of the tokens'
    positions from `start`, if they have gaps; salt: of the namespace, so that no other finds them.
    """
    digest = hashlib.sha256()
    if salt:  # everything else begins with a digit
        digest.update(f"salt {len(salt)}:{salt},".encode())
    names = (str(FORMAT_VERSION), model, tokenizer, scheme, mode, str(start), str(root or ""))
    for name in names:
        digest.update(f"{len(name)}:{name},".encode())
    digest.update(_packed(token_ids))
    if offsets is not None and list(offsets) != list(range(len(token_ids))):
        digest.update(b"offsets" + _packed(offsets))
    return KVKey(digest.hexdigest())


def _packed(numbers: Sequence[int]) -> bytes:
    """As int32, little-endian; of Python's integers in less than half of numpy's time."""
    return struct.pack(f"<{len(numbers)}i", *numbers)
