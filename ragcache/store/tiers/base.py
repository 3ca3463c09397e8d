"""The base classes of tiers, and atomic writes of files.

A tier stores states and counts bytes. Admission and eviction are decided by the store.
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

import torch
from torch import Tensor

from ragcache.db.ledger import Ledger
from ragcache.errors import (
    StateMissing,
    StoreBudgetExceeded,
    StoreError,
    StoreFull,
    StoreUnwritable,
)
from ragcache.files import allocated, sync, write_parts
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates
from ragcache.states.serialization import Allocate
from ragcache.store.tiers.ranks import RankCopies
from ragcache.tiers import TIERS, TierOptions, TierTraits


class Tier(ABC):
    """States by key, within a budget of bytes. Thread-safe.

    Equal keys mean interchangeable states: a reader sees one complete put or none, and concurrent
    puts may finish in any order. A tier never evicts. The store reads `traits` and calls methods.
    No code outside a tier's file checks its class.
    """

    name: str
    """Name in `ragcache.tiers.TIERS`."""
    traits: TierTraits
    """Traits of this tier. An opened tier may differ from the registry."""
    kv_dtype: KVDtype = "model"
    """Storage format of the states."""
    budget_bytes: int | None = None
    """Maximum of allocated bytes, never exceeded. Defaults to no limit."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Allocated bytes, including alignment and headers."""

    @abstractmethod
    def size_of(self, states: StoredStates) -> int:
        """Return the maximum of bytes that `put` would allocate."""

    @abstractmethod
    def put(self, key: KVKey, states: StoredStates) -> int:
        """Store states, in place of earlier states of the key. Returns the allocated bytes.

        The tier is unchanged after an error.

        Raises:
            StoreBudgetExceeded: The states do not fit in addition to all entries, including the
                earlier states of the key.
            StoreFull: The medium has no room.
            StoreUnwritable: The medium refuses.
            RemoteUnavailable: The remote does not answer.
        """

    @abstractmethod
    def get(self, key: KVKey) -> StoredStates:
        """Return states in their storage format. They outlive later changes of the key.

        States from outside of memory are verified.

        Raises:
            StateMissing: The tier does not have the key.
            StateCorrupt: The states fail their checksum.
            StoreUnreadable: The medium refuses.
            RemoteUnavailable: The remote does not answer.
        """

    @abstractmethod
    def delete(self, key: KVKey) -> None:
        """Delete a key if the tier has it. Raises `StoreUnwritable` or `RemoteUnavailable`."""

    @abstractmethod
    def __contains__(self, key: KVKey) -> bool:
        """Return whether the tier has a key, without verifying it. Raises `RemoteUnavailable`."""

    @abstractmethod
    def keys(self) -> Iterator[KVKey]:
        """Return keys that were present during the call. Raises `RemoteUnavailable`."""

    # Optional behavior.

    @classmethod
    def from_options(
        cls,
        options: TierOptions,  # noqa: ARG003
        device: torch.device,  # noqa: ARG003
        ranks: RankCopies | None = None,  # noqa: ARG003
    ) -> Tier | None:
        """Open the tier that the options ask for, if any. Every store has host and disk anyway.

        Args:
            options: Options of all tiers.
            device: Device of the model.
        """
        return None

    def load(self, key: KVKey, allocate: Allocate) -> StoredStates:  # noqa: ARG002
        """Read states into memory from `allocate`. Tiers that are not `mapped` ignore it."""
        return self.get(key)

    def put_all(self, entries: Sequence[tuple[KVKey, StoredStates]]) -> list[int]:
        """Store several states, all or none. For `grouped` tiers."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate uint8 [nbytes] to load states into, which `put` keeps. For `buffers`."""
        raise NotImplementedError

    def begin_copy(self, states: StoredStates) -> StoredStates:
        """Copy states into the tier's memory without adding an entry. For `buffers`."""
        raise NotImplementedError

    def owns(self, states: StoredStates) -> bool:  # noqa: ARG002
        """Return whether states are in this tier's memory, so that `put` copies nothing."""
        return False

    def is_computed(self, states: StoredStates) -> bool:  # noqa: ARG002
        """Return whether states were computed on this tier's device, not loaded for it."""
        return False

    def bind(self, stream: Any, keep_free: int) -> None:  # noqa: B027  # a default
        """Connect the tier with the engine that reads it. See `KVStore.bind_device`."""

    def settle(self) -> None:  # noqa: B027
        """Process released memory and finished copies."""

    def scan(self, known: Mapping[KVKey, int] | None = None) -> Collection[KVKey]:  # noqa: ARG002
        """Count all entries anew and return their keys. `known` sizes are not measured again."""
        return set(self.keys())

    def remove_parts(self, older_than: float) -> None:  # noqa: B027
        """Remove unfinished files of writers that died `older_than` seconds ago or more."""

    def check_identity(self, ledger: Ledger) -> None:  # noqa: B027
        """Compare a `shared` tier with the identity in the ledger, or assign one.

        Raises:
            RemoteMismatch: The ledger names another remote.
            StoreError: The remote or the ledger does not answer.
        """


class MemoryTier(Tier):
    """A tier whose entries are objects of this process."""

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
    """Raise `StoreBudgetExceeded` if `nbytes` more do not fit."""
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
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_sync_content = getattr(os, "fdatasync", os.fsync)  # macOS has none


def key_of(name: str) -> KVKey | None:
    """Return the key of a blob's file name. Other files have no key."""
    digest = name.removesuffix(SUFFIX)
    known = name.endswith(SUFFIX) and len(digest) == 64 and not set(digest) - _DIGITS
    return KVKey(digest) if known else None


def write_atomically(path: Path, parts: Sequence[memoryview]) -> int:
    """Write a file under a temporary name, sync it and rename it. Returns allocated bytes.

    Raises `OSError` and then leaves no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}{PART}")
    try:
        write_through(part, parts)
        nbytes = allocated(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)
    return nbytes


def write_through(path: Path, parts: Sequence[memoryview]) -> None:
    """Create a file and return when its content is on the disk.

    The blocks are allocated first, so that the file system has little to write but the content.
    """
    with path.open("xb", buffering=0) as file:
        _allocate(file.fileno(), sum(map(len, parts)))
        write_parts(file, parts)
        _sync_content(file.fileno())


def _allocate(file: int, nbytes: int) -> None:
    """Allocate the blocks of a file. Raises `OSError` if the disk is full."""
    if not hasattr(os, "posix_fallocate"):  # macOS and Windows
        return
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def named_os_error(error: Exception, where: object) -> StoreError:
    """Convert an operating-system error into a `StoreError` that says what to do."""
    if getattr(error, "errno", None) in _FULL:
        return StoreFull(
            f"no space left at {where}; free some space or use another disk. "
            "What was stored before stays usable"
        )
    reason = getattr(error, "strerror", None) or error
    return StoreUnwritable(f"cannot write under {where}: {reason}")
