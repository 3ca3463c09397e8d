"""What every tier offers. A tier stores and counts; who enters and who leaves is decided above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates


class Tier(Protocol):
    """States by key, under a budget of bytes. Safe to use from several threads.

    Equal keys mean interchangeable states, so that a reader sees one whole put or none, whichever
    of several that run at once comes last. Nothing is ever evicted here.
    """

    name: str
    """`device`, `host`, `disk` or `remote`."""

    persistent: bool
    """Whether what is here outlives the process, and other processes may see it."""

    kv_dtype: KVDtype
    """How states are kept: `put` quantizes, and nothing restores before it is asked to."""

    budget_bytes: int | None
    """The most that may be allocated, None for no limit. Never exceeded."""

    @property
    def used_bytes(self) -> int:
        """Bytes really allocated now, with what rounding and headers add."""

    def size_of(self, states: StoredStates) -> int:
        """How many bytes `put` would allocate, at most."""

    def put(self, key: KVKey, states: StoredStates) -> int:
        """Keeps states, in place of those that the key had; returns the bytes allocated for them.

        Raises `StoreBudgetExceeded` where the budget has no room for them beside what is there
        (also where the key has states already that would make room), `StoreFull`,
        `StoreUnwritable`, or `RemoteUnavailable`. After an error the tier is as it was.
        """

    def get(self, key: KVKey) -> StoredStates:
        """The states, verified if they were outside of memory, and as they were kept: quantized
        ones are not restored.

        They stay as they are when the key is deleted or put again. Raises `StateMissing`,
        `StateCorrupt`, `StoreUnreadable` or `RemoteUnavailable`.
        """

    def delete(self, key: KVKey) -> None:
        """Forgets a key; one that is not here is no error. Raises `StoreUnwritable` or
        `RemoteUnavailable`."""

    def __contains__(self, key: KVKey) -> bool:
        """Whether the tier has a key now, be it sound or not. Raises `RemoteUnavailable`."""

    def keys(self) -> Iterator[KVKey]:
        """The keys that were here at some moment during the call. Raises `RemoteUnavailable`."""


def check_budget(name: str, budget: int | None, used: int, nbytes: int) -> None:
    """Raises `StoreBudgetExceeded` where `nbytes` more do not fit."""
    if budget is not None and used + nbytes > budget:
        raise StoreBudgetExceeded(
            f"the {name} tier may hold {budget:,} bytes, of which {used:,} are taken; {nbytes:,} "
            f"more do not fit. Raise {name}_bytes, or ask with a smaller k or fewer questions at "
            "once"
        )
