"""Operations on files that not every operating system offers.

Linux and macOS have all of them. Windows has no reads at a position, syncs no list of a folder's
files, hides how much of the disk a file occupies, and deletes no file that is mapped.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of `os.open`, without which Windows converts line ends."""
_MAPPED_FILES_CAN_GO = os.name != "nt"
_SYNCED_FOLDERS = os.name != "nt"
_WRITTEN = 1 << 17  # bytes that are written at once
_position = threading.Lock()


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. A pipe or a device is refused without waiting for it.

    Raises:
        OSError: The path cannot be opened, or leads to something else than a file.
    """
    handle = os.open(path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("no file, but a pipe, a socket or a device")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def write_parts(file: io.FileIO, parts: Iterable[memoryview]) -> int:
    """Write bytes to an unbuffered file, in small pieces.

    Linux looks for contiguous memory as large as one write, which takes several times as long as
    the copy where memory is fragmented.

    Returns:
        The number of bytes.

    Raises:
        OSError: The file cannot be written.
    """
    written = 0
    for part in parts:
        for begin in range(0, len(part), _WRITTEN):
            piece = part[begin : begin + _WRITTEN]
            while piece:
                piece = piece[file.write(piece) or 0 :]
        written += len(part)
    return written


def read_at(file: int, nbytes: int, offset: int) -> bytes:
    """Read bytes at a position of an open file. Thread-safe.

    Args:
        file: Descriptor of the file.
        nbytes: Most bytes to read. Fewer are returned at the end of the file.
        offset: Position of the first byte.
    """
    if hasattr(os, "pread"):
        return os.pread(file, nbytes, offset)
    with _position:
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, nbytes)


def read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Read bytes at a position into a buffer, and return their number. Thread-safe."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [buffer], offset)
    found = read_at(file, len(buffer), offset)
    buffer[: len(found)] = found
    return len(found)


def map_file(file: BinaryIO) -> mmap.mmap:
    """Map a file into memory that may be changed without changing the file.

    On Windows the memory holds a copy, so that the file can be deleted.

    Raises:
        ValueError: The file is empty.
        OSError: The operating system refuses.
    """
    if _MAPPED_FILES_CAN_GO:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size = file.seek(0, io.SEEK_END)
    if not size:
        raise ValueError("cannot map an empty file")
    file.seek(0)
    content = mmap.mmap(-1, size)
    file.readinto(content)  # type: ignore[attr-defined]
    return content


def sync(path: Path) -> None:
    """Return when a file, or the list of a folder's files, is on the disk."""
    is_folder = path.is_dir()
    if is_folder and not _SYNCED_FOLDERS:
        return
    opened = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # for Windows
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def allocated(path: Path) -> int:
    """Return the bytes that a file occupies on its disk, or its size where that is unknown."""
    status = path.stat()
    blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else 512 * blocks
