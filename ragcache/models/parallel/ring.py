"""Messages in memory that all ranks map: a ring, which every follower reads at its own pace.

A follower that waits polls the ring for a while, and then sleeps on its connection until a message
wakes it. The number of messages is written after their content, in an order that x86 keeps. A call
that is lost between the two checks of a sleeper costs `_NAP` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragcache.models.parallel.collectives import SignsOfLife

SLOTS, SLOT_BYTES = 8, 2**20
RING_BYTES = SLOTS * (8 + SLOT_BYTES)
Part: TypeAlias = bytes | memoryview
"""Bytes of a message. A view has elements of one byte."""
_SPIN = 0.02  # seconds for which a follower polls
_NAP = 0.02  # seconds that it sleeps at most
_LONG = -1  # length of a message that crosses the connection


class _Ring:
    def __init__(self, memory: NDArray[np.uint8], signs: SignsOfLife) -> None:
        assert memory.nbytes == RING_BYTES
        self._lengths = memory[: 8 * SLOTS].view(np.int64)
        self._slots = [each.data for each in memory[8 * SLOTS :].reshape(SLOTS, SLOT_BYTES)]
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
        self._ranks = range(1, len(signs.messages))
        self._written = self._read = 0  # messages; read: by the slowest follower, when last seen

    def write(self, *parts: Part) -> None:
        """Send a message, in one or more parts, to all followers. Raises `EngineFailed`."""
        self._check()
        if self._is_full():
            waiting, began = self._signs.waiting, self._signs.waiting[0]
            waiting[0] = 0.0  # a wait for the followers is no work of the leader's
            while self._is_full():
                self._check()
                time.sleep(0)
            waiting[0] = began
        slot = self._written % SLOTS
        if sum(map(len, parts)) > SLOT_BYTES:
            self._write_long(slot, b"".join(parts))
            return
        into, end = self._slots[slot], 0
        for part in parts:
            begin, end = end, end + len(part)
            into[begin:end] = part
        self._lengths[slot] = end
        self._count()
        self.wake()

    def wake(self) -> None:
        """Wake followers that sleep. They poll again for a while."""
        for rank in self._ranks:
            if self._signs.sleeping[rank]:
                self._send(rank, b"")

    def _is_full(self) -> bool:
        """Whether the slowest follower has not read the slot that is written next."""
        if self._written - self._read >= SLOTS:
            self._read = int(self._signs.messages[1:].min())
        return self._written - self._read >= SLOTS

    def _write_long(self, slot: int, message: bytes) -> None:
        self._lengths[slot] = _LONG
        self._count()
        for rank in self._ranks:
            self._send(rank, message)

    def _count(self) -> None:
        self._written += 1
        self._signs.messages[0] = self._written


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
        self._rank, self._connection, self._number = rank, connection, 0

    def read(self) -> memoryview:
        """Wait for the next message, which lies in the ring until `done`. Raises `EOFError` when
        the leader has closed the connection."""
        messages, number = self._signs.messages, self._number
        end = time.monotonic() + _SPIN
        while messages[0] <= number:
            if time.monotonic() > end and self._sleep():
                end = time.monotonic() + _SPIN
        slot = number % SLOTS
        length = int(self._lengths[slot])
        if length != _LONG:
            return self._slots[slot][:length]
        while not (message := self._connection.recv_bytes()):
            pass  # the byte of a wake-up that came late
        return memoryview(message)

    def done(self) -> None:
        """Count a message, whose slot is then written again."""
        self._number += 1
        self._signs.messages[self._rank] = self._number

    def _sleep(self) -> bool:
        """Sleep for a while. Returns whether a call has come."""
        signs, rank = self._signs, self._rank
        signs.sleeping[rank] = 1.0
        try:
            if signs.messages[0] <= self._number and self._connection.poll(_NAP):
                # an empty message; a long one is left for `read`
                self._wake()
                return True
        finally:
            signs.sleeping[rank] = 0.0
        return False

    def _wake(self) -> None:
        if self._signs.messages[0] > self._number and self._lengths[self._number % SLOTS] == _LONG:
            return
        self._connection.recv_bytes()
