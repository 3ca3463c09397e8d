"""Flights: keys that one thread of this process is reading, encoding or deleting."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ragcache.states import KVKey


class Flights:
    """At most one flight a key. Who finds a key in flight waits for its end and looks again, so
    that nothing is encoded twice, and what one thread failed to make another takes over."""

    def __init__(self) -> None:
        self._flights: dict[KVKey, tuple[threading.Event, int]] = {}
        self._lock = threading.Lock()

    def begin(self, keys: Iterable[KVKey]) -> tuple[list[KVKey], list[threading.Event]]:
        """The keys whose flights this thread begins now, and the flights of the others."""
        mine, others = [], []
        me = threading.get_ident()
        with self._lock:
            for key in keys:
                if key not in self._flights:
                    self._flights[key] = (threading.Event(), me)
                    mine.append(key)
                    continue
                flight, owner = self._flights[key]
                assert owner != me, f"{key} is leased to make itself; name it as the root"
                others.append(flight)
        return mine, others

    def end(self, keys: Iterable[KVKey]) -> None:
        """Ends flights that this thread began; those that have ended already are no error."""
        me = threading.get_ident()
        with self._lock:
            for key in keys:
                flight, owner = self._flights.get(key, (None, me))
                if flight is not None and owner == me:
                    del self._flights[key]
                    flight.set()
