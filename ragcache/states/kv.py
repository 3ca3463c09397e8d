"""KV states of a run of tokens, their arrival on a device, and the key that identifies them."""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType, Protocol

from ragcache.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor  # the ledger knows keys, and opens without torch

    from ragcache.states.recurrent import RecurrentStates

capture_lock = threading.RLock()
"""Held while a CUDA graph is captured on the compute stream, and by other threads while they queue
work there. Work queued during a capture would become part of the graph.
"""


class CopyEvent(Protocol):
    """The end of a queued copy, with the interface of `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Arrival:
    """The progress of copies to a device. Thread-safe.

    All states of one batch of copies share an arrival. It keeps the sources alive until the copies
    end: a copy reads pinned memory when the device executes it, not when it is queued.
    """

    def __init__(
        self,
        events: Sequence[CopyEvent],
        ends: Sequence[int] = (),
        sources: object = None,
        stream: Any = None,
    ) -> None:
        """Create the arrival of one batch of copies.

        Args:
            events: At least one event, in the order in which the copies end.
            ends: Event n follows the layers below `ends[n]` of all states. The last event follows
                all layers.
            sources: Objects that the copies read.
            stream: Stream that writes the states. Work on this stream never has to wait.
        """
        assert events
        assert len(ends) in (len(events), len(events) - 1)
        self._events, self._ends = tuple(events), tuple(ends)
        self._sources, self._stream = sources, stream
        self._ended = False

    def wait(self, stream: Any, layer: int | None = None) -> None:
        """Make later work on a stream wait for one layer's keys and values, or for all layers.

        The calling thread does not block.
        """
        if self.ready(stream):
            return
        last = len(self._events) - 1
        number = last if layer is None else min(bisect_right(self._ends, layer), last)
        self._events[number].wait(stream)

    def ready(self, stream: Any = None) -> bool:
        """Return whether all copies have ended, or precede everything queued on `stream` later."""
        if stream is not None and stream == self._stream:
            return True
        if not self._ended and self._events[-1].query():
            self._end()
        return self._ended

    def synchronize(self) -> None:
        """Block the calling thread until all copies have ended."""
        if not self._ended:
            self._events[-1].synchronize()
            self._end()

    def _end(self) -> None:
        self._ended, self._sources = True, None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KVStates:
    """Keys and values of a run of tokens, encoded at positions start, start+1, ...

    Rotary keys are rotated for those positions. A prompt that places the tokens elsewhere rotates
    its queries instead.
    """

    keys: Tensor
    """Shape [L, Hkv, S, D], in the model's `states_dtype`."""
    values: Tensor
    """Shape [L, Hkv, S, D]. D is 0 if the keys also serve as values (latent attention)."""
    start: int
    """Position of the first token."""
    arrival: Arrival | None = field(default=None, kw_only=True)
    """Progress of a copy to a device, to wait for before reading. Complete states have no arrival.
    """
    recurrent: RecurrentStates | None = field(default=None, kw_only=True)
    """Maps of recurrent layers, if the model has such layers. L counts the other layers."""

    @property
    def key_scales(self) -> None:
        """Always None: the keys are not quantized. See `QuantizedStates`."""

    @property
    def value_scales(self) -> None:
        """Always None: the values are not quantized."""

    @property
    def length(self) -> int:
        """Number of tokens (S)."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        recurrent = 0 if self.recurrent is None else self.recurrent.nbytes
        return self.keys.nbytes + self.values.nbytes + recurrent

    def part(self, begin: int, end: int, start: int) -> KVStates:
        """Return a view of tokens begin:end, encoded from position `start`.

        Raises `InvalidRequest` for states of recurrent layers, which cannot be cut.
        """
        check_divisible(self.recurrent)
        keys, values = self.keys[:, :, begin:end], self.values[:, :, begin:end]
        return KVStates(keys, values, start, arrival=self.arrival)

    def restore(self) -> KVStates:
        """Return the states without quantization: this object. See `QuantizedStates.restore`."""
        return self

    def readable(self) -> KVStates:
        """Return the states as attention reads them: this object."""
        return self


def check_divisible(recurrent: RecurrentStates | None) -> None:
    """Raise `InvalidRequest` for a part of states that have recurrent layers."""
    if recurrent is not None:
        raise InvalidRequest(
            "the states of this module have recurrent layers, which are one map of all its tokens; "
            "read the module as a whole, or ask in mode exact"
        )


FORMAT_VERSION = 3
"""Version of the encoding and of the blob format. A new version makes older states unreachable."""


KVKey = NewType("KVKey", str)
"""SHA-256 of everything that states depend on, as 64 hexadecimal digits.

States with equal keys are interchangeable.
"""


def state_key(
    *,
    model: str,
    tokenizer: str,
    scheme: str,
    mode: str,
    token_ids: Sequence[int],
    start: int,
    root: KVKey | None,
    offsets: Sequence[int] | None = None,
    salt: str = "",
) -> KVKey:
    """Return the key of the states of `token_ids`, encoded from position `start`.

    Args:
        model: Fingerprint of the weights, the configuration and the dtype.
        tokenizer: Fingerprint of the tokenizer.
        scheme: Fingerprint of the position scheme.
        mode: The encoding, or `root` or `schema`.
        token_ids: Tokens to encode.
        start: Position of the first token.
        root: Key of the preamble that preceded the tokens during encoding, if any.
        offsets: Offset of each token's position from `start`. Defaults to 0, 1, 2, ...
        salt: Salt of the namespace. Namespaces with different salts share no states.
    """
    digest = hashlib.sha256()
    if salt:  # a key without a salt starts with a digit
        digest.update(f"salt {len(salt)}:{salt},".encode())
    names = (str(FORMAT_VERSION), model, tokenizer, scheme, mode, str(start), root or "")
    for name in names:
        digest.update(f"{len(name)}:{name},".encode())
    digest.update(pack_numbers(token_ids))
    if offsets is not None and list(offsets) != list(range(len(token_ids))):
        digest.update(b"offsets" + pack_numbers(offsets))
    return KVKey(digest.hexdigest())


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Pack integers as little-endian int32, in less than half the time of numpy."""
    return struct.pack(f"<{len(numbers)}i", *numbers)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """Return the integers that `pack_numbers` has packed."""
    return struct.unpack(f"<{len(packed) // 4}i", packed)
