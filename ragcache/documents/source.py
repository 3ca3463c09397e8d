"""Loading documents: files, folders, LangChain documents or ready-made ones.

Everything is read and checked before anything is stored: files are UTF-8 text, ids are unique, and
metadata is what JSON can hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from ragcache.errors import DocumentError, NoDocuments, UnreadableDocument, UnstorableMetadata
from ragcache_schemas import sanitize_text

TEXT_SUFFIXES = frozenset(".md .markdown .txt .text .rst .adoc .org .tex .html .htm".split())
"""Files of a folder that are loaded. A file given by its own path may have any suffix."""


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document before it is split.

    Attributes:
        id: Its name within its collection.
        text: The whole text.
        uri: Its address, for citations.
        metadata: Values for filters, as JSON can hold them.
        parts: The text in parts, if it is divided already; each becomes one module, or several if
            it is too long.
    """

    id: str
    text: str
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of the text and of the lengths of its parts."""
        cuts = "".join(f"|{len(part)}" for part in self.parts)
        return hashlib.sha256(f"{self.text}{cuts}".encode()).hexdigest()


DocumentSource = str | Path | SourceDocument | Document


@dataclass(frozen=True, slots=True)
class LoadedSources:
    """Documents, and the files of folders that were ignored because of their suffix."""

    documents: tuple[SourceDocument, ...]
    ignored: tuple[Path, ...]


def load_sources(sources: Iterable[DocumentSource] | DocumentSource) -> LoadedSources:
    """Reads all sources, or raises.

    Control characters that PML cannot carry are removed (`sanitize_text`), so that the schema of a
    collection holds exactly the text that its states were computed from.

    Raises:
        NoDocuments: There are no sources, or a folder contains no text files.
        UnreadableDocument: Files are missing or not UTF-8 text; the message lists all of them.
        DocumentError: Two documents have the same id, or an id or address is not UTF-8 text.
        UnstorableMetadata: JSON cannot hold the metadata of a document.
    """
    documents: list[SourceDocument] = []
    unreadable: list[str] = []
    ignored: list[Path] = []
    for source in [sources] if isinstance(sources, DocumentSource) else sources:
        for item in _expand(source, ignored):
            try:
                documents.append(_sanitized(_load(item)))
            except UnreadableDocument as error:
                unreadable.append(str(error))
    if unreadable:
        raise UnreadableDocument(
            "; ".join(unreadable) + ". Nothing was ingested: mend these documents (files must be "
            "UTF-8 text) or leave them out"
        )
    if not documents:
        raise NoDocuments("no documents were given")
    _check_storable(documents)
    return LoadedSources(tuple(documents), tuple(ignored))


def _expand(
    source: DocumentSource, ignored: list[Path]
) -> Iterator[SourceDocument | Document | tuple[Path, str]]:
    """The files of a folder as (path, id), any other source unchanged. Hidden files are skipped."""
    if isinstance(source, (SourceDocument, Document)):
        yield source
        return
    path = Path(source)
    if not path.is_dir():
        yield path, path.name
        return
    files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not texts:
        raise NoDocuments(
            f"the folder {path} holds no text files; looked for {' '.join(sorted(TEXT_SUFFIXES))}"
        )
    ignored += [file for file in files if file.suffix.lower() not in TEXT_SUFFIXES]
    yield from ((file, file.relative_to(path).as_posix()) for file in texts)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _load(item: SourceDocument | Document | tuple[Path, str]) -> SourceDocument:
    if isinstance(item, SourceDocument):
        return item
    if isinstance(item, Document):
        return _from_langchain(item)
    path, name = item
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UnreadableDocument(f"{path}: {error.strerror or error}") from error
    if b"\0" in raw:
        raise UnreadableDocument(f"{path}: a binary file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"{path}: not UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise UnreadableDocument(f"{path}: an empty file")
    return SourceDocument(name, text, path.absolute().as_uri())


def _sanitized(document: SourceDocument) -> SourceDocument:
    text = sanitize_text(document.text)
    if not document.text.strip():
        raise UnreadableDocument(f"{document.id}: an empty document")
    if not text.strip():
        raise UnreadableDocument(f"{document.id}: control characters and nothing else")
    parts = tuple(kept for part in document.parts if (kept := sanitize_text(part)).strip())
    if text == document.text and parts == document.parts:
        return document
    return replace(document, text=text, parts=parts)


def _from_langchain(document: Document) -> SourceDocument:
    source = document.metadata.get("source")
    name = document.id or source
    if not name:
        raise DocumentError(
            "a LangChain document has neither an id nor metadata['source'] to name it by; give it "
            f"one. It begins {document.page_content[:40]!r}"
        )
    return SourceDocument(
        str(name), document.page_content, str(source or ""), dict(document.metadata)
    )


def _check_storable(documents: list[SourceDocument]) -> None:
    """Checks ids and addresses, UTF-8 without NUL in the database, and metadata, JSON there."""
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
        if document.id in seen:
            raise DocumentError(
                f"two documents are both called {document.id!r}; ingest the folder above them, or "
                "give SourceDocuments ids of their own"
            )
        seen.add(document.id)


DEPTH = 32  # of nesting; the serializers of responses have a limit
_BITS = 8192  # of an integer; Python refuses to print much longer ones


def check_metadata(metadata: Mapping[str, Any], name: str, *, exact: bool = False) -> None:
    """Checks that JSON can hold the metadata of a document. Other values (dates, paths) are stored
    as text; `exact` refuses them, since they would not be returned as they were given.

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
    """The first problem among the items of a list or mapping."""
    if depth == 0:
        return f"metadata is nested more than {DEPTH} deep"
    problems = (_problem(each, where, depth - 1, exact) for each, where in items)
    return next((each for each in problems if each is not None), None)
