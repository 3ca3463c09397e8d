"""The base of all tiers, and files that are written whole.

A tier stores and counts; admission and eviction are decided above it.
"""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from ragcache.db.ledger import Ledger
from ragcache.errors import (
    StateMissing,
    StoreBudgetExceeded,
    StoreError,
    StoreFull,
    StoreUnwritable,
)
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates
from ragcache.states.serialization import Allocate
from ragcache.tiers import TIERS, TierTraits


class Tier(ABC):
    """States by key, under a budget of bytes. Safe to use from several threads.

    Equal keys mean interchangeable states, so that a reader sees one whole put or none, whichever
    of several that run at once comes last. Nothing is ever evicted here. The store reads `traits`
    and calls methods; no code outside a tier's file asks for its class.
    """

    name: str
    """Name in `ragcache.tiers.TIERS`."""
    traits: TierTraits
    """Facts about this tier: those of its kind, unless an opened tier differs."""
    kv_dtype: KVDtype = "model"
    """How states are kept."""
    budget_bytes: int | None = None
    """Bytes that may be allocated at most; never exceeded. None for no limit."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that are allocated now, with what rounding and headers add."""

    @abstractmethod
    def size_of(self, states: StoredStates) -> int:
        """How many bytes `put` would allocate, at most."""

    @abstractmethod
    def put(self, key: KVKey, states: StoredStates) -> int:
        """Store states in place of those that the key had; return the bytes allocated for them.

        After an error the tier is as it was.

        Raises:
            StoreBudgetExceeded: They do not fit beside what is there, which includes the states
                that the key has already.
            StoreFull: The medium has no room.
            StoreUnwritable: The medium refuses.
            RemoteUnavailable: The remote does not answer.
        """

    @abstractmethod
    def get(self, key: KVKey) -> StoredStates:
        """Return the states as they were kept, quantized or not, verified if they were outside of
        memory. They stay as they are when the key is deleted or put again.

        Raises:
            StateMissing: The key is not here.
            StateCorrupt: The states fail their checksum.
            StoreUnreadable: The medium refuses.
            RemoteUnavailable: The remote does not answer.
        """

    @abstractmethod
    def delete(self, key: KVKey) -> None:
        """Forget a key, if it is here. Raises `StoreUnwritable` or `RemoteUnavailable`."""

    @abstractmethod
    def __contains__(self, key: KVKey) -> bool:
        """Whether the tier has a key now, be it sound or not. Raises `RemoteUnavailable`."""

    @abstractmethod
    def keys(self) -> Iterator[KVKey]:
        """The keys that were here at some moment during the call. Raises `RemoteUnavailable`."""

    # Behavior that most tiers do not need.

    def load(self, key: KVKey, allocate: Allocate) -> StoredStates:  # noqa: ARG002
        """As `get`, but read into memory from `allocate`; a tier that is not `mapped` gets."""
        return self.get(key)

    def put_all(self, entries: Sequence[tuple[KVKey, StoredStates]]) -> list[int]:
        """As `put` for each key, all or none of them; for `grouped` tiers."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Tensor:
        """Memory to load states into, uint8 [nbytes], which `put` keeps; for `buffers`."""
        raise NotImplementedError

    def begin_copy(self, states: StoredStates) -> StoredStates:
        """A copy in the tier's memory that is no entry yet; for `buffers`."""
        raise NotImplementedError

    def owns(self, states: StoredStates) -> bool:  # noqa: ARG002
        """Whether states are in this tier's memory already, so that a put copies nothing."""
        return False

    def is_computed(self, states: StoredStates) -> bool:  # noqa: ARG002
        """Whether states were computed on the tier's device, and not loaded for it."""
        return False

    def bind(self, stream: Any, keep_free: int) -> None:  # noqa: B027  # a default
        """Connect with the engine that reads the tier; see `KVStore.bind_device`."""

    def settle(self) -> None:  # noqa: B027
        """Take notice of memory that was released and of copies that have ended."""

    def scan(self, known: Mapping[KVKey, int] | None = None) -> Collection[KVKey]:  # noqa: ARG002
        """Count all entries anew; return their keys. The sizes of `known` keys need no look."""
        return set(self.keys())

    def remove_parts(self, older_than: float) -> None:  # noqa: B027
        """Remove what writers left unfinished that died `older_than` seconds ago or more."""

    def check_identity(self, ledger: Ledger) -> None:  # noqa: B027
        """Compare a `shared` tier with the one that the ledger names, or name a new one. Raises
        `RemoteMismatch`, `RemoteUnavailable` and other `StoreError`s."""


class MemoryTier(Tier):
    """A tier whose entries are objects of this process, by key."""

    def __init__(self) -> None:
        self._states: dict[KVKey, StoredStates] = {}
        self._lock = threading.RLock()

    def get(self, key: KVKey) -> StoredStates:
        states = self._states.get(key)
        if states is None:
            raise StateMissing(f"the {self.name} tier does not hold {key}")
        return states

    def delete(self, key: KVKey) -> None:
        with self._lock:
            self._states.pop(key, None)

    def __contains__(self, key: KVKey) -> bool:
        return key in self._states

    def keys(self) -> Iterator[KVKey]:
        with self._lock:
            return iter(tuple(self._states))


def check_budget(name: str, budget: int | None, used: int, nbytes: int) -> None:
    """Raises `StoreBudgetExceeded` where `nbytes` more do not fit."""
    if budget is not None and used + nbytes > budget:
        raise StoreBudgetExceeded(
            f"the {name} tier may hold {budget:,} bytes, of which {used:,} are taken; {nbytes:,} "
            f"more do not fit. Raise {TIERS[name].budget_option}, or ask with a smaller k or fewer "
            "questions at once"
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
