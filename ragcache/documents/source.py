"""Documents before they are split, and the limits of their metadata."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from ragcache.errors import DocumentError, UnreadableDocument, UnstorableMetadata
from ragcache_schemas import sanitize_text


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a document, such as a page. It becomes one module, or several if it is too long."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values of this part, for filters and citations. `page` is cited."""
    continues: bool = False
    """Whether headings of earlier parts apply to it, as on pages."""
    language: str = ""
    """Language of source code: one of LangChain's splitters, or `code`. Empty for prose."""


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document before it is split."""

    id: str
    """Name of the document within its collection."""
    text: str
    """Whole text."""
    uri: str = ""
    """Address, for citations."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values for filters, as JSON can hold them."""
    parts: tuple[DocumentPart, ...] | tuple[str, ...] = ()
    """The text in parts, if it is divided already. Splits the whole text by default."""
    original: str = field(default="", compare=False)
    """Digest of the content of the file that was read, or "" if the document is no file.
    Documents are equal whichever file they were read from."""

    @property
    def sections(self) -> tuple[DocumentPart, ...]:
        """Parts of the document, or the whole text as one part."""
        parts = self.parts or (self.text,)
        return tuple(DocumentPart(each) if isinstance(each, str) else each for each in parts)

    @property
    def digest(self) -> str:
        """Digest of the text and of the lengths and metadata of its parts."""
        cuts = "".join(map(_cut, self.sections)) if self.parts else ""
        return hashlib.sha256(f"{self.text}{cuts}".encode()).hexdigest()

    def to_json(self) -> str:
        """Return the document as JSON, for the ledger and for other processes.

        Metadata that JSON cannot hold, such as dates, becomes text.
        """
        parts = [asdict(part) for part in self.sections] if self.parts else []
        fields = (self.id, self.text, self.uri, dict(self.metadata), parts, self.original)
        return json.dumps(fields, default=str)

    @classmethod
    def from_json(cls, content: str | bytes) -> SourceDocument:
        """Return the document of `to_json`."""
        name, text, uri, metadata, parts, original = json.loads(content)
        divided = tuple(DocumentPart(**part) for part in parts)
        return cls(name, text, uri, metadata, divided, original)


def _cut(part: DocumentPart) -> str:
    bare = part == DocumentPart(part.text)
    told = [dict(part.metadata), part.continues, part.language]
    return f"|{len(part.text)}" + ("" if bare else json.dumps(told, sort_keys=True, default=str))


DocumentSource = str | Path | SourceDocument | Document


def sanitize_document(document: SourceDocument) -> SourceDocument:
    """Return the document without control characters, which PML cannot carry.

    The schema of a collection then holds exactly the text that its states were computed from.

    Raises:
        UnreadableDocument: No text remains.
    """
    text = sanitize_text(document.text)
    if not document.text.strip():
        raise UnreadableDocument(f"{document.id}: an empty document")
    if not text.strip():
        raise UnreadableDocument(f"{document.id}: control characters and nothing else")
    sections = document.sections if document.parts else ()
    clean = [replace(each, text=sanitize_text(each.text)) for each in sections]
    parts = tuple(each for each in clean if each.text.strip())
    if text == document.text and parts == sections:
        return document
    bare = tuple(each.text for each in parts)
    plain = all(isinstance(each, str) for each in document.parts)
    return replace(document, text=text, parts=bare if plain else parts)


def check_storable(documents: Iterable[SourceDocument]) -> None:
    """Check that the database can hold ids, addresses and metadata, and that ids are unique.

    Raises `DocumentError` or `UnstorableMetadata`.
    """
    seen: set[str] = set()
    for document in documents:
        if "\0" in document.id or not is_text(document.id):
            raise DocumentError(
                f"a document is called {document.id!r}, which is not UTF-8 text; rename it, or "
                "give it an id of its own"
            )
        if "\0" in document.uri or not is_text(document.uri):
            raise DocumentError(f"document {document.id!r}: its address is not UTF-8 text")
        check_metadata(document.metadata, document.id)
        for part in document.sections if document.parts else ():
            check_metadata(part.metadata, document.id)
        if document.id in seen:
            raise DocumentError(
                f"two documents are both called {document.id!r}; ingest the folder above them, or "
                "give SourceDocuments ids of their own"
            )
        seen.add(document.id)


DEPTH = 32  # maximum nesting; the serializers of responses have a limit
_BITS = 8192  # maximum size of an integer; Python refuses to print much longer ones


def check_metadata(metadata: Mapping[str, Any], name: str, *, exact: bool = False) -> None:
    """Check that JSON can hold the metadata of a document.

    Other values (dates, paths) are stored as text. `exact` refuses them, since they would not be
    returned unchanged.

    Raises:
        UnstorableMetadata: A number is not finite or too long, a text is not UTF-8, a key is
            neither text nor number, or values are nested too deep.
    """
    if problem := _problem(dict(metadata), "metadata", DEPTH, exact):
        message = f"document {name!r}: {problem}; write it otherwise, or leave it out"
        raise UnstorableMetadata(message)


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode the text, which excludes lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _problem(value: Any, where: str, depth: int, exact: bool) -> str | None:
    if value is None:
        return None
    if isinstance(value, int):
        return None if value.bit_length() <= _BITS else f"{where} is a number of too many digits"
    if isinstance(value, str):
        return None if is_text(value) else f"{where} is no text: {value!r:.80}"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value!r}, which JSON cannot hold"
    if isinstance(value, dict):
        for key in value:
            kinds = str if exact else str | int | float | None
            if not (isinstance(key, kinds) and is_text(str(key))):
                return f"the key {key!r:.80} of {where} is no text"
        items = ((each, f"{where}[{key!r:.80}]") for key, each in value.items())
        return _first(items, depth, exact)
    if isinstance(value, list if exact else list | tuple):
        items = ((each, f"{where}[{number}]") for number, each in enumerate(value))
        return _first(items, depth, exact)
    if exact:
        return f"{where} is a {type(value).__name__}, which JSON cannot hold"
    return _problem(str(value), where, depth, exact)


def _first(items: Iterable[tuple[Any, str]], depth: int, exact: bool) -> str | None:
    """Return the first problem among the items of a list or mapping."""
    if depth == 0:
        return f"metadata is nested more than {DEPTH} deep"
    problems = (_problem(each, where, depth - 1, exact) for each, where in items)
    return next((each for each in problems if each is not None), None)
