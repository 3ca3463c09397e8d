"""The tier protocol, and files that are written whole.

A tier stores and counts; admission and eviction are decided above it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from ragcache.errors import (
    StateMissing,
    StoreBudgetExceeded,
    StoreError,
    StoreFull,
    StoreUnwritable,
)
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates


class Tier(Protocol):
    """States by key, under a budget of bytes. Safe to use from several threads.

    Equal keys mean interchangeable states, so that a reader sees one whole put or none, whichever
    of several that run at once comes last. Nothing is ever evicted here. persistent: whether what
    is here outlives the process, and other processes may see it. kv_dtype: how states are kept.
    budget_bytes: the most that may be allocated, None for no limit; never exceeded.
    """

    name: str  # `device`, `host`, `disk` or `remote`
    persistent: bool
    kv_dtype: KVDtype
    budget_bytes: int | None

    @property
    def used_bytes(self) -> int:
        """Bytes really allocated now, with what rounding and headers add."""

    def size_of(self, states: StoredStates) -> int:
        """How many bytes `put` would allocate, at most."""

    def put(self, key: KVKey, states: StoredStates) -> int:
        """Stores states in place of those that the key had; returns the bytes allocated for them.
        Raises `StoreBudgetExceeded` where they do not fit beside what is there (also the states
        that the key has already), `StoreFull`, `StoreUnwritable`, or `RemoteUnavailable`. After an
        error the tier is as it was."""

    def get(self, key: KVKey) -> StoredStates:
        """The states, verified if they were outside of memory, and as they were kept: quantized
        ones are not restored. They stay as they are when the key is deleted or put again. Raises
        `StateMissing`, `StateCorrupt`, `StoreUnreadable` or `RemoteUnavailable`."""

    def delete(self, key: KVKey) -> None:
        """Forgets a key; one that is not here is no error. Raises `StoreUnwritable` or
        `RemoteUnavailable`."""

    def __contains__(self, key: KVKey) -> bool:
        """Whether the tier has a key now, be it sound or not. Raises `RemoteUnavailable`."""

    def keys(self) -> Iterator[KVKey]:
        """The keys that were here at some moment during the call. Raises `RemoteUnavailable`."""


class StatesInMemory:
    """Entries of a tier in memory, by key."""

    name: str
    persistent = False

    def __init__(self) -> None:
        self._states: dict[KVKey, StoredStates] = {}
        self._lock = threading.RLock()

    def get(self, key: KVKey) -> StoredStates:
        """As `Tier.get`."""
        states = self._states.get(key)
        if states is None:
            raise StateMissing(f"the {self.name} tier does not hold {key}")
        return states

    def delete(self, key: KVKey) -> None:
        """As `Tier.delete`."""
        with self._lock:
            self._states.pop(key, None)

    def __contains__(self, key: KVKey) -> bool:
        return key in self._states

    def keys(self) -> Iterator[KVKey]:
        """As `Tier.keys`."""
        with self._lock:
            return iter(tuple(self._states))


def check_budget(name: str, budget: int | None, used: int, nbytes: int) -> None:
    """Raises `StoreBudgetExceeded` where `nbytes` more do not fit."""
    if budget is not None and used + nbytes > budget:
        raise StoreBudgetExceeded(
            f"the {name} tier may hold {budget:,} bytes, of which {used:,} are taken; {nbytes:,} "
            f"more do not fit. Raise {name}_bytes, or ask with a smaller k or fewer questions at "
            "once"
        )


SUFFIX = ".safetensors"
PART = ".part"
_DIGITS = frozenset("0123456789abcdef")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def key_of(name: str) -> KVKey | None:
    """The key of a blob's file name; None for any other file."""
    digest = name.removesuffix(SUFFIX)
    known = name.endswith(SUFFIX) and len(digest) == 64 and not set(digest) - _DIGITS
    return KVKey(digest) if known else None


def write_atomically(path: Path, parts: Sequence[memoryview]) -> int:
    """Temporary name, fsync, rename, fsync of the folder; returns the bytes allocated. Raises
    `OSError`; nothing is left then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}{PART}")
    try:
        write_through(part, parts)
        nbytes = allocated(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return nbytes


def write_through(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes a new file and returns when it is on the disk."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def allocated(path: Path) -> int:
    """Bytes that a file takes on its disk, where the system knows; else its length."""
    found = path.stat()
    blocks = getattr(found, "st_blocks", None)
    return found.st_size if blocks is None else 512 * int(blocks)


def named_os_error(error: Exception, where: object) -> StoreError:
    """Turns an operating-system error into one that says what to do."""
    if getattr(error, "errno", None) in _FULL:
        return StoreFull(
            f"no space left for states under {where}; free some space or move the state folder. "
            "What was stored before stays usable"
        )
    reason = getattr(error, "strerror", None) or error
    return StoreUnwritable(f"cannot write under {where}: {reason}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
