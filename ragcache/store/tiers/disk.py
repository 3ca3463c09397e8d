"""The disk tier: one safetensors blob per key, mapped into memory when it is read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ragcache.files import allocated
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates, quantize, quantized_nbytes
from ragcache.states.serialization import Allocate, blob_parts, load_blob, map_blob
from ragcache.store.tiers.base import (
    PART,
    SUFFIX,
    Tier,
    check_budget,
    key_of,
    named_os_error,
    write_atomically,
)
from ragcache.tiers import TIERS

_BLOCK = 4096  # bytes that file systems allocate at once
_HEADER = 4096  # maximum bytes that a blob adds to its tensors, including rounding


class DiskTier(Tier):
    """Blobs under `folder`, in 256 subfolders named by the first digits of the keys.

    Several processes may share the folder. A blob is always complete, and a deleted blob stays
    mapped for its readers. `used_bytes` is the result of the last `scan` plus the changes by this
    process.
    """

    name = "disk"
    traits = TIERS["disk"].traits

    def __init__(
        self, folder: Path, budget_bytes: int | None = None, *, kv_dtype: KVDtype = "model"
    ) -> None:
        self.folder, self.budget_bytes, self.kv_dtype = folder, budget_bytes, kv_dtype
        self._sizes: dict[KVKey, int] = {}
        self._used = 0
        self._writing = 0  # bytes reserved for blobs that are being written
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, budget_bytes: int | None = None, *, kv_dtype: KVDtype = "model"
    ) -> DiskTier:
        """Create a tier and scan its folder."""
        tier = cls(folder, budget_bytes, kv_dtype=kv_dtype)
        tier.scan()
        return tier

    @property
    def used_bytes(self) -> int:
        return self._used + self._writing

    def path(self, key: KVKey) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def scan(self, known: Mapping[KVKey, int] | None = None) -> dict[KVKey, int]:
        """Count all blobs anew. Returns allocated bytes by key; `known` sizes are not measured."""
        sizes, known = {}, known or {}
        for key in self.keys():
            if key in known:
                sizes[key] = known[key]
                continue
            with suppress(FileNotFoundError):  # another process has deleted it
                sizes[key] = allocated(self.path(key))
        with self._lock:
            self._sizes, self._used = dict(sizes), sum(sizes.values())
        return sizes

    def size_of(self, states: StoredStates) -> int:
        return -(-quantized_nbytes(states, self.kv_dtype) // _BLOCK) * _BLOCK + _HEADER

    def put(self, key: KVKey, states: StoredStates) -> int:
        states = quantize(states, self.kv_dtype)
        room = self.size_of(states)
        with self._lock:
            check_budget(self.name, self.budget_bytes, self.used_bytes, room)
            self._writing += room
        try:
            nbytes = write_atomically(self.path(key), blob_parts(key, states))
        except OSError as error:
            raise named_os_error(error, self.folder) from error
        finally:
            with self._lock:
                self._writing -= room
                self._count(key)
        return nbytes

    def _count(self, key: KVKey) -> None:
        """Update the size of a key from its file, which another thread may have deleted."""
        nbytes = 0
        with suppress(OSError):  # there is no file or no folder
            nbytes = allocated(self.path(key))
        self._used += nbytes - self._sizes.pop(key, 0)
        if nbytes:
            self._sizes[key] = nbytes

    def get(self, key: KVKey) -> StoredStates:
        """Return verified states, mapped from the file without a copy."""
        return map_blob(self.path(key), key)

    def load(self, key: KVKey, allocate: Allocate) -> StoredStates:
        return load_blob(self.path(key), key, allocate)

    def delete(self, key: KVKey) -> None:
        with self._lock:
            try:
                self.path(key).unlink(missing_ok=True)
            except OSError as error:
                raise named_os_error(error, self.folder) from error
            self._used -= self._sizes.pop(key, 0)

    def __contains__(self, key: KVKey) -> bool:
        return self.path(key).exists()

    def keys(self) -> Iterator[KVKey]:
        with suppress(FileNotFoundError):
            folders = [each for each in os.scandir(self.folder) if len(each.name) == 2]
            for folder in folders:
                for file in os.scandir(folder) if folder.is_dir() else ():
                    key = key_of(file.name)
                    if key is not None and key[:2] == folder.name:
                        yield key

    def remove_parts(self, older_than: float) -> None:
        for part in self.folder.glob(f"??/*{PART}"):
            with suppress(FileNotFoundError):  # another process was faster
                if time.time() - part.stat().st_mtime > older_than:
                    part.unlink()
