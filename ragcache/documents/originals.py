"""Originals of documents that are files of this machine, as an ingestion read them.

The path comes from the ledger, where only an ingestion of files writes a digest next to it: nothing
that a caller sends names a file. The content is copied while its digest is computed, so that a file
that changes meanwhile is not given out in parts.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from ragcache.errors import OriginalChanged, OriginalMissing
from ragcache.files import open_regular

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
        OSError: The copy cannot be written.
    """
    path = _path_of(uri)
    if not digest or path is None:
        raise OriginalMissing(
            "no original of the document is kept: it came as text, or its file found no room "
            "(option originals_bytes); its text is all that is kept"
        )
    copy: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    try:
        if _copy(path, copy) != digest:
            raise OriginalChanged(
                "the file has changed since it was ingested; ingest its folder again to open it"
            )
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def _path_of(uri: str) -> Path | None:
    """Return the path of a `file:///…` address, as `Path.as_uri` writes it, or None."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc:
        return None
    if os.name == "nt":
        return Path(url2pathname(parts.path))
    return Path(os.fsdecode(unquote_to_bytes(parts.path)))  # a name need not be UTF-8


def _copy(path: Path, copy: IO[bytes]) -> str:
    """Copy a file and return the digest of its content."""
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
        copy.write(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file. Raises `OriginalMissing`."""
    try:
        with open_regular(path) as opened:
            while block := opened.read(_BLOCK):
                yield block
    except OSError as error:
        raise OriginalMissing(
            f"the file cannot be read any more ({error.strerror or error}); "
            "ingest its folder again if it has moved"
        ) from error
