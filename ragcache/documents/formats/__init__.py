"""Formats of files: the choice of a reader for a file.

The suffix of a file decides its format, but binary content is never read as text: signatures and
bytes that no encoding explains are refused. Each module of this package declares the formats that
it reads in a tuple `FORMATS`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import PurePosixPath
from pkgutil import iter_modules

from ragcache.documents.formats.base import OLE, OMITTED, Budget, Content, Format, RawFile
from ragcache.documents.formats.text import read_text
from ragcache.documents.formats.unread import explain_ole, ole_suffix
from ragcache.documents.source import DocumentPart, SourceDocument
from ragcache.errors import MissingExtra, UnreadableDocument


def _declared() -> tuple[Format, ...]:
    """Return the formats of all modules of this package."""
    modules = (import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__))
    return tuple(each for module in modules for each in getattr(module, "FORMATS", ()))


FORMATS = _declared()
_BY_SUFFIX = {suffix: each for each in FORMATS for suffix in each.suffixes}
_BY_SIGNATURE = {signature: each for each in FORMATS for signature in each.signatures}
_UNKNOWN = Format(frozenset(), read_text, is_plain=True)
SUFFIXES = frozenset(_BY_SUFFIX)
"""Files of a folder that are loaded. A file given by its own path may have any suffix."""


def format_of(name: str, raw: bytes) -> Format:
    """Return the format of a file, by its first bytes or else its suffix."""
    for signature, each in _BY_SIGNATURE.items():
        if raw.startswith(signature):
            return each
    if raw.startswith(OLE):
        suffix = ole_suffix(raw)
        return _BY_SUFFIX.get(suffix) or Format(frozenset(), _refuse_ole)
    return _BY_SUFFIX.get(PurePosixPath(name).suffix.lower(), _UNKNOWN)


def _refuse_ole(file: RawFile) -> Content:
    raise UnreadableDocument(explain_ole(file.raw))


def read_document(
    name: str,
    raw: bytes,
    uri: str = "",
    *,
    max_bytes: int = sys.maxsize,
    page_texts: Mapping[int, str] | None = None,
) -> SourceDocument:
    """Read the content of a file as a document, in this process.

    `ragcache.documents.reading.read_file` limits time and memory, too.

    Args:
        name: Id of the document. Its suffix decides the type.
        raw: The content.
        uri: Address of the document.
        max_bytes: Most bytes that an archive may unpack to, and most characters of the text.
            Unlimited by default.
        page_texts: Recognized texts of a PDF's pages without text, by the number of the page.

    Raises:
        UnreadableDocument: The content is binary, damaged, empty, locked or too large.
        MissingExtra: The type needs the extra `documents`.
    """
    return _read(name, raw, uri, budget=Budget(max_bytes), page_texts=page_texts)


def _read(
    name: str,
    raw: bytes,
    uri: str = "",
    *,
    budget: Budget,
    depth: int = 0,
    page_texts: Mapping[int, str] | None = None,
) -> SourceDocument:
    if not raw.strip():
        raise UnreadableDocument("an empty file")
    file = RawFile(name, raw, budget, _read, depth, page_texts or {})
    try:
        content = format_of(name, raw).read(file)
    except (UnreadableDocument, MissingExtra, MemoryError):
        raise
    except Exception as error:  # libraries raise any type for damaged files
        kind = type(error).__name__
        raise UnreadableDocument(f"it cannot be read as {file.suffix}: {kind}: {error}") from error
    return _document(name, uri, content, budget.max_bytes)


def _document(name: str, uri: str, content: Content, max_bytes: int) -> SourceDocument:
    parts = [part for part in content.parts if part.text.strip()]
    if not parts:
        lacks = "; ".join(content.omitted)
        raise UnreadableDocument("it holds no text" + (f": {lacks}" if lacks else ""))
    characters = sum(len(part.text) for part in parts)
    if characters > max_bytes:
        raise UnreadableDocument(
            f"it holds {characters:,} characters of text, more than the {max_bytes:,} that may be "
            "(option document_bytes); divide it"
        )
    text = "\n\n".join(part.text for part in parts)
    bare = len(parts) == 1 and parts[0] == DocumentPart(parts[0].text)
    omitted = {OMITTED: list(content.omitted)} if content.omitted else {}
    metadata = {**content.metadata, **omitted}
    return SourceDocument(name, text, uri, metadata, () if bare else tuple(parts))


def is_plain(name: str, raw: bytes) -> bool:
    """Whether a file is text or code in UTF-8, which is read in linear time and memory."""
    if not format_of(name, raw).is_plain:
        return False
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_supported(name: str) -> bool:
    """Whether a file of this name in a folder is loaded."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES
