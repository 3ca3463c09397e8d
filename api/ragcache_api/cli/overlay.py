"""A state folder on a full disk, copied so far as a question needs it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SPARE = 16 * 2**20  # bytes for what the session writes
_LEDGER_FILES = ("ledger.sqlite", "ledger.sqlite-wal")  # the index of the log is built anew


@contextmanager
def overlay_of(state: Path) -> Iterator[Path | None]:
    """A temporary folder with a copy of the ledger and links to the blobs: whatever is written or
    removed in it leaves the state folder as it is. None where no other disk has room."""
    files = [state / name for name in _LEDGER_FILES if (state / name).exists()]
    place = place_with_room(sum(file.stat().st_size for file in files) + _SPARE)
    if place is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ragcache-", dir=place) as name:
        folder = Path(name)
        for file in files:
            shutil.copyfile(file, folder / file.name)
        if (state / "states").is_dir():
            shutil.copytree(
                (state / "states").resolve(), folder / "states", copy_function=os.symlink
            )
        yield folder


def place_with_room(nbytes: int) -> Path | None:
    """Memory, or else the folder of temporary files, where it has this many bytes left."""
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free >= nbytes:
            return place
    return None
