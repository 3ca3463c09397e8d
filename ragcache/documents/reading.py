"""Reading of files in worker processes, with limits of time, memory and unpacked bytes.

Parsers of documents build trees and tables: a file of 255 kB may take gigabytes, or minutes. A
worker process (`ragcache.processes`) reads such a file, and ends at a limit. The error is the
file's own; other files of the same call are read by the next worker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from ragcache.config import parse_bytes
from ragcache.documents.formats import is_plain, read_document
from ragcache.documents.source import SourceDocument, sanitize_document
from ragcache.errors import MissingExtra, UnreadableDocument
from ragcache.params import OpenConfig
from ragcache.processes import (
    WorkerFailed,
    WorkerOutOfMemory,
    WorkerPool,
    WorkerTimeout,
    has_run_out_of_memory,
)

READERS = 2
"""Files that are read in workers at the same time."""

_WORKERS = WorkerPool(
    "from ragcache.documents.reading import read_in_worker\n"
    "from ragcache.processes import serve\n"
    "serve(read_in_worker)",
    READERS,
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of reading one file."""

    seconds: float
    """Most seconds."""
    memory: int
    """Most bytes of memory of the process that reads."""
    max_bytes: int
    """Most bytes that an archive may unpack to, and most characters of the text."""

    @classmethod
    def of(cls, config: OpenConfig) -> Self:
        """Return the limits of the options `document_seconds`, `_memory` and `_bytes`."""
        memory, max_bytes = parse_bytes(config.document_memory), parse_bytes(config.document_bytes)
        return cls(config.document_seconds, memory, max_bytes)


def read_file(name: str, raw: bytes, limits: ReadLimits, uri: str = "") -> SourceDocument:
    """Read the content of a file as a document without control characters.

    Text and code in UTF-8 is read in this process, every other file in a worker.

    Args:
        name: Id of the document. Its suffix decides the type.
        raw: The content.
        limits: Limits of the worker.
        uri: Address of the document.

    Raises:
        UnreadableDocument: The content is binary, damaged, empty or locked, or reading it exceeds a
            limit.
        MissingExtra: The type needs the extra `documents`.
    """
    if is_plain(name, raw):
        return sanitize_document(read_document(name, raw, uri, max_bytes=limits.max_bytes))
    head = json.dumps([name, uri, limits.max_bytes]).encode()
    try:
        reply = _WORKERS.call(head + b"\n" + raw, seconds=limits.seconds, memory=limits.memory)
    except WorkerFailed as error:
        raise UnreadableDocument(_explain(error)) from error
    kind, _, content = reply.partition(b"\n")
    if kind == b"document":
        return SourceDocument.from_json(content)
    refused = MissingExtra if kind == b"extra" else UnreadableDocument
    raise refused(content.decode(errors="replace"))


def _explain(error: WorkerFailed) -> str:
    if isinstance(error, WorkerTimeout):
        return f"{error} to read (option document_seconds); divide it, or save it as plain text"
    if isinstance(error, WorkerOutOfMemory):
        return f"{error} to read (option document_memory); divide it, or save it as plain text"
    return f"{error}: it is damaged, or takes too much memory (option document_memory)"


def read_in_worker(payload: bytes) -> bytes:
    """Read the file of a payload of `read_file`, and return the reply. Runs in a worker.

    Raises:
        MemoryError: The file takes more memory than the worker may have.
    """
    head, _, raw = payload.partition(b"\n")
    name, uri, max_bytes = json.loads(head)
    try:
        document = sanitize_document(read_document(name, raw, uri, max_bytes=max_bytes))
    except MissingExtra as error:
        return b"extra\n" + str(error).encode(errors="replace")
    except UnreadableDocument as error:
        if has_run_out_of_memory():
            raise MemoryError from error
        return b"unreadable\n" + str(error).encode(errors="replace")
    return b"document\n" + document.to_json().encode()
