"""The page cache of the system: files are read from it where they lie in it."""

from __future__ import annotations

import os
from pathlib import Path


def drop_pages(path: Path) -> None:
    """Asks the system to forget a file that is on the disk already. Some file systems do not, and
    some systems cannot be asked."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_pages(path: Path) -> None:
    """Brings a file into the page cache."""
    with path.open("rb") as file:
        file.read()
