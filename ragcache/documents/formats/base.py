"""Declaration of a format of files, and the argument and result of its reader.

Each module of `ragcache.documents.formats` that has a tuple `FORMATS` adds its formats to those
that are read. A reader may raise any exception for a damaged file.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, Protocol

from ragcache.documents.source import DocumentPart, SourceDocument
from ragcache.errors import MissingExtra, UnreadableDocument

DEPTH = 4
"""Most levels of files within files, such as a Word document in a mail in a ZIP archive."""
OMITTED = "omitted"
"""Key of a document's metadata: sentences that name content that was left out."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content that a reader found in a file."""

    parts: list[DocumentPart]
    """Pages, slides, sheets, chapters, or the whole text as one part. Empty texts are left out."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values of the whole document."""
    omitted: tuple[str, ...] = ()
    """Descriptions of content that was left out. Each follows the name of the file and a colon."""


class Budget:
    """Bytes that a file may still unpack to, over all levels of files within it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._used = max_bytes, 0

    def check(self, size: int) -> None:
        """Check that a number of further bytes may be unpacked. Raises `UnreadableDocument`."""
        if self._used + size > self.max_bytes:
            raise UnreadableDocument(
                f"it unpacks to {self._used + size:,} bytes, more than the {self.max_bytes:,} that "
                "may be (option document_bytes)"
            )

    def spend(self, size: int) -> None:
        """Count bytes of a file within the file. Raises `UnreadableDocument` over the limit."""
        self.check(size)
        self._used += size


class ReadDocument(Protocol):
    """Reads a file of any format. `depth` is its level within other files."""

    def __call__(self, name: str, raw: bytes, *, budget: Budget, depth: int) -> SourceDocument: ...


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file to read."""

    name: str
    raw: bytes
    budget: Budget
    read_document: ReadDocument
    """Reads a file within this one."""
    depth: int = 0
    """Number of files that this one is in."""
    page_texts: Mapping[int, str] = field(default_factory=dict)
    """Recognized texts of pages without text, by the number of the page."""

    @property
    def suffix(self) -> str:
        """Suffix of the name in lower case, with its dot."""
        return PurePosixPath(self.name).suffix.lower()

    def read_inner(self, name: str, raw: bytes) -> tuple[list[DocumentPart], tuple[str, ...]]:
        """Read a file within this one, such as an attachment.

        Returns:
            Its parts, with its name as `attachment` in their metadata, and descriptions of omitted
            content. A file that cannot be read is omitted as a whole.
        """
        if self.depth >= DEPTH:
            return [], (f"{name}: more than {DEPTH} levels of files within files",)
        self.budget.spend(len(raw))
        try:
            document = self.read_document(name, raw, budget=self.budget, depth=self.depth + 1)
        except (UnreadableDocument, MissingExtra) as error:
            return [], (f"{name}: {error}",)
        own = {key: value for key, value in document.metadata.items() if key != OMITTED}
        parts = [_within(each, name, own) for each in document.sections]
        return parts, tuple(f"{name}: {each}" for each in document.metadata.get(OMITTED, ()))


def _within(part: DocumentPart, name: str, metadata: Mapping[str, Any]) -> DocumentPart:
    deeper = part.metadata.get("attachment")
    path = f"{name}/{deeper}" if deeper else name
    return replace(part, metadata={**metadata, **part.metadata, "attachment": path})


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files."""

    suffixes: frozenset[str]
    """Suffixes in lower case, with their dots."""
    read: Callable[[RawFile], Content]
    """The reader."""
    signatures: tuple[bytes, ...] = ()
    """First bytes of files that are of this format whatever their suffix is."""
    is_plain: bool = False
    """Whether content in UTF-8 is read in linear time and memory, so that it needs no worker."""

    @classmethod
    def of(cls, suffixes: Iterable[str] | str, read: Callable[[RawFile], Content]) -> Format:
        """Return a format without signatures. Suffixes may be one text, divided by spaces."""
        listed = suffixes.split() if isinstance(suffixes, str) else suffixes
        return cls(frozenset(listed), read)


def import_library(name: str) -> Any:
    """Import a library of the extra `documents`. Raises `MissingExtra`."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra("it needs the extra: pip install 'ragcache[documents]'") from error


def open_archive(file: RawFile) -> zipfile.ZipFile:
    """Open a file that is a ZIP archive, and check the bytes that it unpacks to.

    Raises:
        UnreadableDocument: The file is no ZIP archive, or unpacks to too much.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(file.raw))
    except zipfile.BadZipFile as error:
        raise UnreadableDocument("it is damaged, or of another type than its name says") from error
    file.budget.check(sum(each.file_size for each in archive.infolist()))
    return archive


OLE = b"\xd0\xcf\x11\xe0"  # signature of files of old Office programs, and of Outlook's messages


def parse_xml(raw: bytes) -> Any:
    """Parse XML without entities and without access to files or the network."""
    from lxml import etree

    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False, no_network=True))


def omitted_formulas(count: int) -> tuple[str, ...]:
    """Return the description of formulas that a reader left out, if there are any."""
    return (f"{count} formula{'s' if count > 1 else ''}",) if count else ()


def flat(text: str) -> str:
    """Return a text in one line."""
    return " ".join(text.split())
