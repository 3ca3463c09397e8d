"""Which states are worth a place in a tier. One-off questions cannot push documents out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from ragcache.states import KVKey

Origin = Literal["ingest", "warm", "question"]
"""What made states be encoded or read: documents coming in, a call that asks for them, or a
question that happened to need them."""


def admits(origin: Origin, previous_use: int | None, tick: int, window: int) -> bool:
    """Whether states may enter a tier: from ingestion and warm calls always; from a question where
    an earlier one used the same states at most `window` ticks ago (`previous_use`, or None)."""
    if origin != "question":
        return True
    return previous_use is not None and tick - previous_use <= window


class Sightings:
    """When keys were last used that hold no place, for `admits`. Bounded: of the last `window`
    uses, each an integer and a key. Ticks must not run backwards."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._last: OrderedDict[KVKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def see(self, key: KVKey, tick: int) -> int | None:
        """Notes a use; returns the tick of the one before, None where it is forgotten."""
        previous = self._last.pop(key, None)
        self._last[key] = tick
        while len(self._last) > self.window or tick - next(iter(self._last.values())) > self.window:
            self._last.popitem(last=False)
        if previous is not None and tick - previous > self.window:
            return None
        return previous

    def admits(self, origin: Origin, key: KVKey, tick: int) -> bool:
        """Notes a use and decides."""
        return admits(origin, self.see(key, tick), tick, self.window)
