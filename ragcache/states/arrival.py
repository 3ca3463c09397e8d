"""The arrival of states on a device: copies that are queued, layer by layer, and not waited for."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

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
