"""Reading of files in worker processes, with limits of time, memory and unpacked bytes.

Parsers of documents build trees and tables: a file of 255 kB may take gigabytes, or minutes. A
worker process (`ragcache.processes`) reads such a file, and ends at a limit. The error is the
file's own; other files of the same call are read by the next worker.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ragcache.config import parse_bytes
from ragcache.documents.formats import is_plain, read_document
from ragcache.documents.formats.pdf import draw_unread_pages
from ragcache.documents.ocr import PageOcr, resolve_ocr
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
class ReadOptions:
    """Limits of reading one file, and the recognition of its pages."""

    seconds: float
    """Most seconds of processor time of the process that reads."""
    memory: int
    """Most bytes of memory of the process that reads."""
    max_bytes: int
    """Most bytes that an archive may unpack to, and most characters of the text."""
    wall_seconds: float = math.inf
    """Most seconds, at most `WAITING` times `seconds`."""
    ocr: PageOcr | None = None
    """Recognizes the text of a PDF's pages that have none. Runs in the calling process."""

    @classmethod
    def of(cls, config: OpenConfig) -> Self:
        """Return the options `document_seconds`, `_memory` and `_bytes`, and `ocr`.

        Raises `ConfigurationError` without the program of `ocr`.
        """
        memory, max_bytes = parse_bytes(config.document_memory), parse_bytes(config.document_bytes)
        ocr = resolve_ocr(config.ocr, config.document_seconds)
        return cls(config.document_seconds, memory, max_bytes, ocr=ocr)


def read_file(name: str, raw: bytes, limits: ReadOptions, uri: str = "") -> SourceDocument:
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
    texts = _recognize(raw, limits) if limits.ocr and raw.startswith(b"%PDF-") else {}
    content = _call(["read", name, uri, limits.max_bytes, texts], raw, limits)
    return SourceDocument.from_json(content)


def _recognize(raw: bytes, limits: ReadOptions) -> dict[int, str]:
    """Return the recognized texts of a PDF's pages without text, by the number of the page."""
    texts: dict[int, str] = {}
    start, is_first = 0, True
    while is_first or start:
        pages, start = json.loads(_call(["draw", start], raw, limits))
        is_first = False
        for number, picture in pages:
            assert limits.ocr is not None
            texts[number] = limits.ocr(b64decode(picture))
    return texts


def _call(head: Sequence[Any], raw: bytes, limits: ReadOptions) -> bytes:
    """Return the reply of a worker to an operation on a file."""
    payload = json.dumps(head).encode() + b"\n" + raw
    try:
        reply = _WORKERS.call(
            payload,
            seconds=limits.seconds,
            memory=limits.memory,
            wall_seconds=limits.wall_seconds,
        )
    except WorkerFailed as error:
        raise UnreadableDocument(_explain(error, limits)) from error
    kind, _, content = reply.partition(b"\n")
    if kind == b"done":
        return content
    refused = MissingExtra if kind == b"extra" else UnreadableDocument
    raise refused(content.decode(errors="replace"))


def _explain(error: WorkerFailed, limits: ReadOptions) -> str:
    if isinstance(error, WorkerTimeout):
        return (
            f"it takes more than {limits.seconds:g} s to read (option document_seconds); divide "
            "it, or save it as plain text"
        )
    if isinstance(error, WorkerOutOfMemory):
        return f"{error} to read (option document_memory); divide it, or save it as plain text"
    return f"{error}: it is damaged, or takes too much memory (option document_memory)"


def read_in_worker(payload: bytes) -> bytes:
    """Read the file of a payload of `read_file`, and return the reply. Runs in a worker.

    Raises:
        MemoryError: The file takes more memory than the worker may have.
    """
    head, _, raw = payload.partition(b"\n")
    operation, *arguments = json.loads(head)
    try:
        content = _draw(raw, *arguments) if operation == "draw" else _read(raw, *arguments)
    except MissingExtra as error:
        return b"extra\n" + str(error).encode(errors="replace")
    except UnreadableDocument as error:
        if has_run_out_of_memory():
            raise MemoryError from error
        return b"unreadable\n" + str(error).encode(errors="replace")
    return b"done\n" + content.encode()


def _read(raw: bytes, name: str, uri: str, max_bytes: int, texts: Mapping[str, str]) -> str:
    page_texts = {int(number): text for number, text in texts.items()}
    document = read_document(name, raw, uri, max_bytes=max_bytes, page_texts=page_texts)
    return sanitize_document(document).to_json()


def _draw(raw: bytes, start: int) -> str:
    pages, following = draw_unread_pages(raw, start)
    return json.dumps(([(number, b64encode(each).decode()) for number, each in pages], following))
