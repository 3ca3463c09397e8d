"""Key and value states of a module, when they arrive on a device, and the key of stored states."""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    from torch import Tensor  # the ledger knows keys, and opens without torch

capture_lock = threading.RLock()
"""Held while a graph is captured on a stream that computes, and while another thread queues
anything there, which would become part of the graph."""


class CopyEvent(Protocol):
    """The end of a queued copy, as `torch.cuda.Event` tells it."""

    def query(self) -> bool: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Arrival:
    """When states that are on their way to a device are there. Those that were copied in one go
    share an arrival. Thread-safe.

    Sources are kept alive until the copies have ended: a copy reads pinned memory when the device
    comes to it, not when it is queued.
    """

    def __init__(
        self, events: Sequence[CopyEvent], ends: Sequence[int] = (), sources: object = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """events: at least one, in the order in which the copies end; event n follows the layers
        below ends[n] of all states, and the last one all layers. sources: what the copies read.
        stream: the one on which the states are written, which needs to wait for nothing."""
        assert events
        assert len(ends) in (len(events), len(events) - 1)
        self._events, self._ends = tuple(events), tuple(ends)
        self._sources, self._stream = sources, stream
        self._ended = False

    def wait(self, stream: Any, layer: int | None = None) -> None:
        """Makes what is queued on a stream from now on wait for this layer's keys and values, or
        for those of all layers. The calling thread does not wait."""
        if self.ready(stream):
            return
        last = len(self._events) - 1
        number = last if layer is None else min(bisect_right(self._ends, layer), last)
        self._events[number].wait(stream)

    def ready(self, stream: Any = None) -> bool:
        """Whether everything is there, now or for what is queued on `stream` from now on."""
        if stream is not None and stream == self._stream:
            return True
        if not self._ended and self._events[-1].query():
            self._end()
        return self._ended

    def synchronize(self) -> None:
        """Waits in the calling thread until everything is there."""
        if not self._ended:
            self._events[-1].synchronize()
            self._end()

    def _end(self) -> None:
        self._ended, self._sources = True, None


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


KVKey = NewType("KVKey", str)
"""Digest of everything that states depend on: 64 hexadecimal digits.

Equal keys mean interchangeable states.
"""


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
    names = (str(FORMAT_VERSION), model, tokenizer, scheme, mode, str(start), root or "")
    for name in names:
        digest.update(f"{len(name)}:{name},".encode())
    digest.update(_packed(token_ids))
    if offsets is not None and list(offsets) != list(range(len(token_ids))):
        digest.update(b"offsets" + _packed(offsets))
    return KVKey(digest.hexdigest())


def _packed(numbers: Sequence[int]) -> bytes:
    """As int32, little-endian; of Python's integers in less than half of numpy's time."""
    return struct.pack(f"<{len(numbers)}i", *numbers)
