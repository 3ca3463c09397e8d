"""Writing files so that a reader sees all of one or nothing, and what the system says when not."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from ragcache.errors import StoreError, StoreFull, StoreUnwritable
from ragcache.states import KVKey

SUFFIX = ".safetensors"
PART = ".part"
_DIGITS = frozenset("0123456789abcdef")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def key_of(name: str) -> KVKey | None:
    """The key of a blob by its file name; None for a file that is none."""
    digest = name.removesuffix(SUFFIX)
    known = name.endswith(SUFFIX) and len(digest) == 64 and not set(digest) - _DIGITS
    return KVKey(digest) if known else None


def write_atomically(path: Path, parts: Sequence[memoryview]) -> int:
    """Temporary name, fsync, rename, fsync of the folder; returns the bytes allocated.

    Raises `OSError`; nothing is left then.
    """
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
    """Bytes that a file takes on its disk, where the system tells; else its length."""
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
    return StoreUnwritable(
        f"cannot write under {where}: {getattr(error, 'strerror', None) or error}"
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
