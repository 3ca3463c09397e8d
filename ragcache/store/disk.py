"""The disk tier: one blob a key, written so that a reader sees all of it or nothing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from ragcache.errors import StoreError, StoreFull, StoreUnwritable
from ragcache.states import KVKey, KVStates
from ragcache.states.blob import read_blob, to_blob

_SUFFIX = ".safetensors"
_PART = ".part"


class DiskTier:
    """Blobs under `folder`, in 256 subfolders by the first digits of their keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: KVKey) -> Path:
        return self.folder / key.digest[:2] / f"{key.digest}{_SUFFIX}"

    def put(self, key: KVKey, states: KVStates) -> int:
        """Writes a blob: temporary name, fsync, rename. Returns its size in bytes."""
        blob = to_blob(key, states)
        path = self.path(key)
        part = path.with_name(f"{path.name}.{uuid4().hex}{_PART}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_through(part, blob)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as error:
            raise named_os_error(error, path.parent) from error
        return len(blob)

    def get(self, key: KVKey) -> KVStates:
        """Reads and verifies. Raises `StateCorrupt` or `FileNotFoundError`."""
        return read_blob(self.path(key), key)

    def delete(self, key: KVKey) -> None:
        self.path(key).unlink(missing_ok=True)

    def keys(self) -> Iterator[KVKey]:
        """The keys of all blobs."""
        for path in self.folder.glob(f"??/*{_SUFFIX}"):
            yield KVKey(path.name.removesuffix(_SUFFIX))

    def age(self, key: KVKey) -> float:
        """Seconds since the blob was written."""
        return _age(self.path(key))

    def remove_parts(self, older_than: float) -> None:
        """Removes what writers left behind that died `older_than` seconds ago or more."""
        for part in self.folder.glob(f"??/*{_PART}"):
            if _age(part) > older_than:
                part.unlink(missing_ok=True)


def _age(path: Path) -> float:
    """Seconds since a file was written; 0 where another process has just taken it away."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def named_os_error(error: OSError, where: Path) -> StoreError:
    """Turns an operating-system error into one that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space left for states under {where}; free some space or move the state folder. "
            "What was stored before stays usable"
        )
    return StoreUnwritable(f"cannot write under {where}: {error.strerror or error}")


def _write_through(path: Path, blob: bytes) -> None:
    with path.open("xb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
