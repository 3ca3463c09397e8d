"""Messages in memory that all ranks map: a ring, which every follower reads at its own pace.

A follower that waits polls the ring for a while, and then sleeps on its connection until a message
wakes it. The number of messages is written after their content, in an order that x86 keeps. A call
that is lost between the two checks of a sleeper costs `_NAP` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from ragcache.models.parallel.collectives import SignsOfLife

SLOTS, SLOT_BYTES = 8, 2**20
RING_BYTES = SLOTS * (8 + SLOT_BYTES)
_SPIN = 0.02  # seconds for which a follower polls
_NAP = 0.02  # seconds that it sleeps at most
_LONG = -1  # length of a message that crosses the connection


class _Ring:
    def __init__(self, memory: NDArray[np.uint8], signs: SignsOfLife) -> None:
        assert memory.nbytes == RING_BYTES
        self._lengths = memory[: 8 * SLOTS].view(np.int64)
        self._slots = memory[8 * SLOTS :].reshape(SLOTS, SLOT_BYTES)
        self._signs = signs


class RingWriter(_Ring):
    """The leader's end. Not thread-safe.

    Args:
        memory: uint8 [`RING_BYTES`], zeros.
        signs: Signs of life, in which ranks count messages.
        send: Sends bytes to a follower over its connection.
        check: Raises `EngineFailed` once a rank has failed.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        signs: SignsOfLife,
        send: Callable[[int, bytes], None],
        check: Callable[[], None],
    ) -> None:
        super().__init__(memory, signs)
        self._send, self._check = send, check

    def write(self, message: bytes) -> None:
        """Send a message to all followers. Raises `EngineFailed`."""
        self._check()
        signs, written = self._signs, int(self._signs.messages[0])
        while written - signs.messages[1:].min() >= SLOTS:
            self._check()
            time.sleep(0)
        slot, size, ranks = written % SLOTS, len(message), range(1, len(signs.messages))
        if size <= SLOT_BYTES:
            self._slots[slot, :size] = np.frombuffer(message, np.uint8)
        self._lengths[slot] = size if size <= SLOT_BYTES else _LONG
        signs.messages[0] = written + 1
        for rank in ranks:
            if size > SLOT_BYTES:
                self._send(rank, message)
            elif signs.sleeping[rank]:
                self._send(rank, b"")


class RingReader(_Ring):
    """A follower's end.

    Args:
        memory: The ring, uint8 [`RING_BYTES`].
        signs: Signs of life, in which ranks count messages.
        rank: Number of the rank.
        connection: Wakes the rank, and carries long messages.
    """

    def __init__(
        self, memory: NDArray[np.uint8], signs: SignsOfLife, rank: int, connection: Connection
    ) -> None:
        super().__init__(memory, signs)
        self._rank, self._connection = rank, connection

    def read(self) -> bytes:
        """Wait for the next message, which stays until `done`. Raises `EOFError` when the leader
        has closed the connection."""
        signs, rank = self._signs, self._rank
        number = signs.messages[rank]
        end = time.monotonic() + _SPIN
        while signs.messages[0] <= number:
            if time.monotonic() > end:
                self._sleep()
        slot = int(number) % SLOTS
        length = int(self._lengths[slot])
        if length != _LONG:
            return self._slots[slot, :length].tobytes()
        while not (message := self._connection.recv_bytes()):
            pass  # the byte of a wake-up that came late
        return message

    def done(self) -> None:
        """Count a message."""
        self._signs.messages[self._rank] += 1

    def _sleep(self) -> None:
        signs, rank = self._signs, self._rank
        signs.sleeping[rank] = 1.0
        try:
            if signs.messages[0] <= signs.messages[rank] and self._connection.poll(_NAP):
                # an empty message; a long one is left for `read`
                self._wake()
        finally:
            signs.sleeping[rank] = 0.0

    def _wake(self) -> None:
        if self._signs.messages[0] > self._signs.messages[self._rank]:
            slot = int(self._signs.messages[self._rank]) % SLOTS
            if self._lengths[slot] == _LONG:
                return
        self._connection.recv_bytes()
