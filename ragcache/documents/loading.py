"""Loading of sources: files, folders, LangChain documents or `SourceDocument`s.

A file that cannot be read is listed with its reason. The others are loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from pathspec import GitIgnoreSpec

from ragcache.config import LEDGER_FILE
from ragcache.documents.formats import SUFFIXES, is_supported
from ragcache.documents.formats.base import OMITTED
from ragcache.documents.formats.unread import explain_suffix
from ragcache.documents.originals import digest_original
from ragcache.documents.reading import ReadOptions, read_file
from ragcache.documents.source import (
    DocumentPart,
    DocumentSource,
    SourceDocument,
    check_storable,
    sanitize_document,
)
from ragcache.errors import (
    ConfigurationError,
    DocumentError,
    MissingExtra,
    NoDocuments,
    UnreadableDocument,
)
from ragcache.files import open_regular
from ragcache.params import OpenConfig

_INSTALLED = frozenset({"node_modules", "__pycache__", "site-packages"})  # not documents
_BLOCK = 2**24  # bytes read at once
_ABSENT = object()

ReadProgress = Callable[[int, int], None]
"""Called with the number of bytes read so far and of the bytes of all files."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that was not loaded."""

    name: str
    """Path of the file, or its name in an upload."""
    reason: str
    """Why it was not loaded."""
    failed: bool = False
    """Whether the file should have been loaded: it is damaged, binary, cannot be opened, or needs
    an extra. False for a type that is not supported."""


@dataclass(frozen=True, slots=True)
class LoadedSources:
    """Loaded documents, and the files that were skipped."""

    documents: tuple[SourceDocument, ...]
    skipped: tuple[SkippedFile, ...] = ()
    folders: tuple[str, ...] = ()
    """Addresses of the folders."""
    files: frozenset[str] = frozenset()
    """Ids of documents that are files."""
    present: frozenset[str] = frozenset()
    """Ids of files that exist but were not loaded."""
    originals: Mapping[str, bytes] = field(default_factory=dict, hash=False, repr=False)
    """Contents of uploaded files, by the digests that their documents have as `original`."""

    @property
    def omitted(self) -> dict[str, list[str]]:
        """Descriptions of content of the files that the documents omit, by id."""
        lacks = ((each.id, each.metadata.get(OMITTED)) for each in self.documents)
        return {name: list(map(str, each)) for name, each in lacks if isinstance(each, list)}


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Selection of the files in folders."""

    include: Sequence[str] = ()
    """Patterns as in a `.gitignore`. Loads only files that match one, of any suffix. By default,
    loads all files of known types."""
    exclude: Sequence[str] = ()
    """Patterns of files and folders to leave out."""
    strict: bool = False
    """Whether a file that cannot be read is an error."""

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name} is one text; give a list of patterns")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    id: str


def load_sources(
    sources: Iterable[DocumentSource] | DocumentSource,
    files: FileFilter | None = None,
    progress: ReadProgress = lambda *_: None,
    limits: ReadOptions | None = None,
) -> LoadedSources:
    """Read all sources.

    The id of a file is its path in the given folder. A file given by its own path has its path in
    the working directory, or else its absolute path. LangChain documents without ids that share a
    `source` become the parts of one document.

    Args:
        sources: Files, folders and documents.
        files: Selection of the files in folders, and whether an unreadable one is an error.
        progress: Called while files are read.
        limits: Limits of reading each file. Defaults to the defaults of `OpenConfig`.

    Raises:
        NoDocuments: There are no sources, or folders hold no document that can be read.
        UnreadableDocument: A path does not exist, no file can be read or, if `strict`, one cannot;
            the message lists all of them.
        DocumentError: Two documents have the same id, or an id or address is not UTF-8 text.
        UnstorableMetadata: JSON cannot hold the metadata of a document.
    """
    limits = limits or ReadOptions.of(OpenConfig())
    loader = _Loader(files or FileFilter(), progress, limits)
    given = [sources] if isinstance(sources, DocumentSource) else list(sources)
    paths = [Path(each) for each in given if isinstance(each, str | Path)]
    found = loader.find(dict.fromkeys(paths))
    documents: list[SourceDocument] = []
    for source in _grouped(given):
        if isinstance(source, SourceDocument):
            documents.append(sanitize_document(source))
        else:
            documents += loader.read(found[source])
    loader.check_read(documents)
    check_storable(documents)
    ids = frozenset(file.id for listed in found.values() for file in listed)
    folders = tuple(map(_address, loader.folders))
    return LoadedSources(
        tuple(documents), tuple(loader.skipped), folders, ids, frozenset(loader.present)
    )


class _Loader:
    """Finds and reads files, and records the skipped ones."""

    def __init__(self, files: FileFilter, progress: ReadProgress, limits: ReadOptions) -> None:
        self.skipped: list[SkippedFile] = []
        self.present: set[str] = set()
        self.total = 0
        self._files, self._progress, self._done = files, progress, 0
        self._limits = limits
        self.folders: list[Path] = []
        self._include = GitIgnoreSpec.from_lines(files.include)
        self._exclude = GitIgnoreSpec.from_lines(files.exclude)

    def find(self, paths: Iterable[Path]) -> dict[Path, list[_File]]:
        """Return the files to read for each path: the files in a folder, or the file itself.

        Raises `UnreadableDocument` for paths that do not exist, and for state folders.
        """
        missing, modes = [], {}
        for path in paths:
            try:
                modes[path] = path.stat().st_mode
            except OSError as error:
                missing.append(f"{path}: {error.strerror or error}")
        if missing:
            raise UnreadableDocument(
                "; ".join(missing) + ". Nothing was ingested: fix these paths or leave them out"
            )
        self.folders = [path for path, mode in modes.items() if stat.S_ISDIR(mode)]
        found = {
            path: self._walk(path)
            if path in self.folders
            else [_File(path, _own_id(path, self.folders))]
            for path in modes
        }
        self.total = sum(_size(file.path) for files in found.values() for file in files)
        return found

    def read(self, files: Iterable[_File]) -> Iterator[SourceDocument]:
        """Yield the documents of the readable files."""
        for file in files:
            end = self._done + _size(file.path)
            try:
                yield self._read_file(file)
            except (UnreadableDocument, MissingExtra) as error:
                self.skipped.append(SkippedFile(str(file.path), str(error), failed=True))
                self.present.add(file.id)
            self._report(end)

    def check_read(self, documents: Sequence[SourceDocument]) -> None:
        """Raise `UnreadableDocument` or `NoDocuments` if too little was read."""
        failed = [each for each in self.skipped if each.failed]
        if failed and (self._files.strict or not documents):
            raise UnreadableDocument(
                _by_reason(failed) + ". Nothing was ingested: fix these files or leave them out"
            )
        if documents:
            return
        if not self.folders:
            skipped = "; ".join(f"{each.name}: {each.reason}" for each in self.skipped)
            raise NoDocuments(skipped or "no documents were given")
        names = ", ".join(map(str, self.folders))
        reasons = sorted({each.reason for each in self.skipped})
        raise NoDocuments(
            f"the folder {names} holds no documents that can be read; "
            + (f"skipped: {'; '.join(reasons[:5])}; " if reasons else "")
            + f"looked for {' '.join(sorted(SUFFIXES))}"
        )

    def _walk(self, folder: Path) -> list[_File]:
        """Return the wanted files of a folder, sorted by path. Leaves out hidden ones."""
        found: list[Path] = []
        for root, names, files in os.walk(folder, onerror=self._note_folder):
            below = Path(root)
            if LEDGER_FILE in files:
                if below == folder:
                    raise UnreadableDocument(
                        f"{folder} is a state folder of ragcache (it holds {LEDGER_FILE}). Nothing "
                        "was ingested: keep documents and states in folders of their own"
                    )
                names.clear()
                self.skipped.append(SkippedFile(f"{below}{os.sep}", "a state folder of ragcache"))
                continue
            for name in sorted(_INSTALLED.intersection(names)):
                reason = "installed packages; give the folder itself to ingest it"
                self.skipped.append(SkippedFile(f"{below / name}{os.sep}", reason))
            names[:] = [n for n in names if not n.startswith(".") and n not in _INSTALLED]
            found += [below / name for name in files if not name.startswith(".")]
        listed = (_File(path, path.relative_to(folder).as_posix()) for path in sorted(found))
        return [file for file in listed if self._is_wanted(file)]

    def _note_folder(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self.skipped.append(SkippedFile(str(error.filename), reason, failed=True))

    def _is_wanted(self, file: _File) -> bool:
        if self._exclude.match_file(file.id):
            return False
        if self._files.include:
            return self._include.match_file(file.id)
        if is_supported(file.path.name):
            return True
        reason = explain_suffix(file.path.suffix.lower())
        self.skipped.append(SkippedFile(str(file.path), reason))
        return False

    def _read_file(self, file: _File) -> SourceDocument:
        try:
            raw = self._bytes(file.path)
        except OSError as error:
            raise UnreadableDocument(error.strerror or str(error)) from error
        document = read_file(file.id, raw, self._limits, _address(file.path))
        return replace(document, original=digest_original(raw))

    def _bytes(self, path: Path) -> bytes:
        """Return a file's content. Raises `OSError`."""
        with open_regular(path) as opened:
            begun, blocks = self._done, []
            while block := opened.read(_BLOCK):
                blocks.append(block)
                begun += len(block)
                self._report(begun)
        return b"".join(blocks)

    def _report(self, done: int) -> None:
        self._done = done
        self._progress(done, self.total)


def _by_reason(files: Iterable[SkippedFile]) -> str:
    """Return files in one line, those of the same reason together."""
    reasons: dict[str, list[str]] = {}
    for file in files:
        reasons.setdefault(file.reason, []).append(file.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a broken link; reading it reports the error
        return 0


def _whole(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _address(path: Path) -> str:
    return _whole(path).as_uri()


def _own_id(path: Path, folders: Iterable[Path]) -> str:
    """Return the id of a file that is given by its own path.

    It is the path in one of the folders, in the working directory, or in the root.
    """
    whole = _whole(path)
    bases = [*map(_whole, folders), Path.cwd(), Path(whole.anchor)]
    base = next(each for each in bases if whole.is_relative_to(each))
    return whole.relative_to(base).as_posix()


def _grouped(sources: Sequence[DocumentSource]) -> Iterator[SourceDocument | Path]:
    """Yield sources in order. LangChain documents of one source are joined at the first of them."""
    groups: dict[str, list[Document]] = {}
    order: list[SourceDocument | Path | list[Document]] = []
    for source in sources:
        if isinstance(source, SourceDocument):
            order.append(source)
        elif not isinstance(source, Document):
            order.append(Path(source))
        elif source.id is None and (name := source.metadata.get("source")):
            if str(name) not in groups:
                order.append(groups.setdefault(str(name), []))
            groups[str(name)].append(source)
        else:
            order.append([source])
    for each in order:
        yield each if isinstance(each, SourceDocument | Path) else join_documents(each)


def join_documents(documents: Sequence[Document], name: str = "") -> SourceDocument:
    """Join LangChain documents as the parts of one document.

    The document has the metadata on which all of them agree. Each part has its own.

    Args:
        documents: LangChain documents.
        name: Id of the document. Defaults to the id or else the source of the first one.

    Raises:
        DocumentError: There is no name.
    """
    first = documents[0]
    source = first.metadata.get("source")
    name = name or str(first.id or source or "")
    if not name:
        raise DocumentError(
            "a LangChain document has neither an id nor metadata['source'] to name it by; give it "
            f"one. It begins {first.page_content[:40]!r}"
        )
    common = _common([each.metadata for each in documents])
    parts = tuple(
        DocumentPart(each.page_content, {k: v for k, v in each.metadata.items() if k not in common})
        for each in documents
        if len(documents) == 1 or each.page_content.strip()  # loaders give empty pages
    )
    text = "\n\n".join(part.text for part in parts)
    return SourceDocument(name, text, str(source or ""), common, parts if len(parts) > 1 else ())


def _common(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = every
    agreed = (k for k, v in first.items() if all(each.get(k, _ABSENT) == v for each in others))
    return {key: first[key] for key in agreed}
