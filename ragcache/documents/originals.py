"""Originals of documents: the files that an ingestion read, as they were then.

The path comes from the ledger, where only an ingestion of files writes a digest next to it: nothing
that a caller sends names a file. The content is copied while its digest is computed, so that a file
that changes meanwhile is not given out in parts.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from ragcache.errors import OriginalChanged, OriginalMissing

_BLOCK = 2**20  # bytes copied at once
_IN_MEMORY = 2**24  # bytes of a copy; a larger one is in a temporary file


def digest_original(content: bytes) -> str:
    """Return the digest of a file's content, under which its original can be opened."""
    return hashlib.sha256(content).hexdigest()


def open_original(uri: str, digest: str) -> IO[bytes]:
    """Return a copy of an ingested file.

    Args:
        uri: Address of the file, `file:///…`.
        digest: Digest of its content when it was ingested, or "" if the document was no file.

    Raises:
        OriginalMissing: The document was no file, or the file is gone or cannot be read.
        OriginalChanged: The file has another content.
    """
    path = _path_of(uri)
    if not digest or path is None:
        raise OriginalMissing(
            "the document was not read from a file of the server; its text is all that is kept"
        )
    copy: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    try:
        found = _copy(path, copy)
    except OSError as error:
        copy.close()
        raise OriginalMissing(
            f"the file cannot be read any more ({error.strerror or type(error).__name__}); "
            "ingest its folder again if it has moved"
        ) from error
    if found != digest:
        copy.close()
        raise OriginalChanged(
            "the file has changed since it was ingested; ingest its folder again to open it"
        )
    copy.seek(0)
    return copy


def _path_of(uri: str) -> Path | None:
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" and not parts.netloc else None


def _copy(path: Path, copy: IO[bytes]) -> str:
    """Copy a file and return the digest of its content. Raises `OSError`."""
    digest = hashlib.sha256()
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a file")
        while block := opened.read(_BLOCK):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()
