"""A lease: states in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from ragcache.states import KVKey, KVStates


class Lease:
    """States in use: no tier lets go of them until the lease is released.

    states: in the order of the keys. source: for each key the tier that it was found in (`device`,
    `host`, `disk` or `remote`) or `encoded`. admitted: for keys that were not in the first tier,
    whether they may push others out. moved: bytes read from each tier below the first.
    """

    def __init__(
        self, keys: Sequence[KVKey], release: Callable[[Lease], None], below: Sequence[str]
    ) -> None:
        self.keys = tuple(keys)
        self.found: dict[KVKey, KVStates] = {}
        self.source: dict[KVKey, str] = {}
        self.admitted: dict[KVKey, bool] = {}
        self.moved: dict[str, int] = dict.fromkeys(below, 0)
        self._release = release
        self._released = False

    @property
    def states(self) -> tuple[KVStates, ...]:
        return tuple(self.found[key] for key in self.keys)

    @property
    def missing(self) -> list[KVKey]:
        """The keys whose states are not here yet, once each."""
        return [key for key in dict.fromkeys(self.keys) if key not in self.found]

    def release(self) -> None:
        """Ends the lease; once is enough."""
        if not self._released:
            self._released = True
            self._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
