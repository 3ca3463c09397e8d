"""Messages in a ring: their order, long ones, sleepers, and a reader that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest

from ragcache.errors import EngineFailed
from ragcache.models.parallel.collectives import SignsOfLife
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.ring import RING_BYTES, SLOT_BYTES, SLOTS, RingReader, RingWriter


class Ends:
    """The ends of a ring with one reader."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        ours, theirs = socket.socketpair()
        self.connection, self.other = Connection(ours.detach()), Connection(theirs.detach())
        arena = SharedArena.create()
        self.signs, memory = SignsOfLife(arena, 2), arena.allocate(RING_BYTES)
        self.writer = RingWriter(
            memory, self.signs, lambda _, content: self.connection.send_bytes(content), check
        )
        self.reader = RingReader(memory, self.signs, 1, self.other)

    def take(self) -> bytes:
        message = bytes(self.reader.read())
        self.reader.done()
        return message


def test_messages_come_in_their_order() -> None:
    ends, found = Ends(), list[bytes]()
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 5000, 300).tolist()
    sizes[::50] = [SLOT_BYTES + 1] * len(sizes[::50])
    sent = [rng.bytes(size) for size in sizes]
    reader = threading.Thread(target=lambda: found.extend(ends.take() for _ in sent))
    reader.start()
    for number, message in enumerate(sent):
        ends.writer.write(message)
        if number % 60 == 0:
            time.sleep(0.045)  # the reader falls asleep
    reader.join(20)
    assert found == sent


def test_a_wait_for_the_reader_is_no_work_of_the_leader() -> None:
    """Otherwise a reader that hangs would have the time of a leader that computes."""
    seen = list[float]()
    ends = Ends(lambda: seen.append(float(ends.signs.waiting[0])))
    ends.signs.waiting[0] = 5.0
    for _ in range(SLOTS):
        ends.writer.write(b"message")
    seen.clear()
    writer = threading.Thread(target=lambda: ends.writer.write(b"one more"))
    writer.start()
    while 0.0 not in seen:
        assert writer.is_alive()
    ends.take()
    writer.join(20)
    assert ends.signs.waiting[0] == 5.0


def test_a_message_may_have_parts() -> None:
    ends = Ends()
    ends.writer.write(b"ab", memoryview(b"cde"), b"")
    assert ends.take() == b"abcde"
    reader = threading.Thread(target=lambda: found.append(ends.take()))
    found = list[bytes]()
    reader.start()
    ends.writer.write(b"a", memoryview(bytes(SLOT_BYTES)))
    reader.join(20)
    assert found == [b"a" + bytes(SLOT_BYTES)]


def test_a_sleeper_that_is_woken_polls_again() -> None:
    ends, found = Ends(), list[bytes]()
    reader = threading.Thread(target=lambda: found.append(ends.take()))
    reader.start()
    signs = ends.writer._signs
    for _ in range(500):
        ends.writer.wake()
        if signs.sleeping[1]:
            break
        time.sleep(0.001)
    ends.writer.wake()
    time.sleep(0.01)
    assert not signs.sleeping[1], "it polls for a while, without a message"
    ends.writer.write(b"x")
    reader.join(20)
    assert found == [b"x"]


def test_a_writer_waits_for_a_slot() -> None:
    ends, written = Ends(), threading.Event()
    for number in range(SLOTS):
        ends.writer.write(b"%d" % number)

    def write() -> None:
        ends.writer.write(b"last")
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not written.wait(0.05)
    assert [ends.take() for _ in range(SLOTS + 1)] == [*(b"%d" % n for n in range(SLOTS)), b"last"]
    assert written.wait(5)
    thread.join()


def test_a_writer_does_not_wait_for_a_dead_reader() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > SLOTS + 3:
            raise EngineFailed("rank 1 of 2 ended")

    ends = Ends(check)
    for _ in range(SLOTS):
        ends.writer.write(b"x")
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended"):
        ends.writer.write(b"x")


def test_a_reader_sees_the_end_of_the_connection() -> None:
    ends = Ends()
    ends.connection.close()
    with pytest.raises(EOFError):
        ends.take()
