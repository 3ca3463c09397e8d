"""The archive of a collection: an uncompressed tar file, which is written and read as a stream.

    manifest.json              fingerprints of model and tokenizer, texts, schema
    documents/00000000.json    a document with the texts of its modules, one file each
    originals/SHA256           an uploaded file that documents were read from
    states/KEY.safetensors     states, byte for byte as the disk tier has them
    index.json                 names, sizes and checksums of all files before it

An archive is read only if every byte is as an export writes it: headers are compared with the
header that the name and the size give, padding with zeros, the index with the files. Blobs carry
checksums of their own (`ragcache.states.serialization`).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragcache.documents.originals import digest_original
from ragcache.errors import ArchiveDamaged, ArchiveMismatch, StateCorrupt
from ragcache.files import BINARY, map_file, read_at, read_into, write_parts
from ragcache.modes import Encoding
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.states.serialization import mapped_states, read_blob

VERSION = 4
"""Version of the archive's own layout."""
MANIFEST, INDEX = "manifest.json", "index.json"
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_NAMES = re.compile(
    r"manifest\.json|documents/\d{8}\.json|originals/[0-9a-f]{64}"
    r"|states/[0-9a-f]{64}\.safetensors|index\.json"
)
_LONGEST_TEXT = 1 << 28  # bytes of a manifest, a document or an original
_MOST_MEMBERS = 1 << 22
_LISTED = 160  # most bytes of a member in the index

Parts = Sequence[memoryview]
"""Content of a member, in pieces."""
Model = TypeVar("Model", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ArchivedModule(_Record):
    """A module of an archived document. Its name is the document's id, `#` and its number."""

    text: str = Field(min_length=1)
    details: dict[str, Any]
    """Metadata of the module itself."""
    places: list[list[int]]
    """Positions of runs of its text, as pairs of characters: in the module, in the document."""
    states: list[Encoding]
    """Encodings of the module whose states the archive holds."""
    vector: str | None = None
    """Embedding by the manifest's `embedder`: float32, little-endian, in base64."""


class ArchivedDocument(_Record):
    """A document with its modules."""

    id: str = Field(min_length=1)
    uri: str
    digest: str
    attributes: dict[str, Any]
    """Metadata of the document."""
    text: str
    original: str
    """SHA-256 of the uploaded file that it was read from, if the archive holds that, or empty."""
    modules: list[ArchivedModule] = Field(min_length=1)


class ArchiveFingerprints(_Record):
    """Everything outside of a collection that its states depend on."""

    states_format: int
    """Version of the encoding and of the blobs (`ragcache.states.FORMAT_VERSION`)."""
    model: str
    """Fingerprint of weights, configuration and dtype."""
    tokenizer: str
    scheme: str
    """Position scheme."""
    preamble: str
    """Text of prompts before the documents: chat template, then instruction."""


class Manifest(_Record):
    """Contents of an archive, and the versions and models that made it."""

    format: Literal["ragcache-collection"] = "ragcache-collection"
    version: int = VERSION
    collection: str
    namespace: str
    """Namespace of the collection, which salts the keys of its states."""
    revision: int
    """Revision of the collection that was exported."""
    model: str
    """Name of the model."""
    fingerprints: ArchiveFingerprints
    module_schema: str
    """PML schema whose prompt a question to the collection is."""
    instruction: str
    priming: str
    """Text that modules in later places were encoded behind."""
    similar: bool
    """Whether they were encoded behind similar modules. The archive then lacks these states: each
    folder chooses for itself."""
    embedder: str | None
    """Name of the embedder of the modules' vectors."""
    calibrations: str | None
    """Calibrations of answers by model, as JSON."""
    description: str
    """Description of the collection."""
    scaffolds: list[list[str]]
    """Names of modules that were encoded together."""
    documents: int
    """Number of documents."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file of an archive."""

    name: str
    offset: int
    """Position of its content."""
    size: int

    @property
    def end(self) -> int:
        """Position after its padding."""
        return self.offset + self.size + -self.size % _BLOCK


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A file to write."""

    name: str
    load: Callable[[], Parts | None]
    """Returns the content, or None if it is no longer there."""
    key: KVKey | None = None
    """Key of the states, unless it is JSON."""


def text_entry(name: str, content: BaseModel) -> ArchiveEntry:
    """Return the entry of a manifest or a document. Raises `ArchiveMismatch` if it is too large."""
    text = content.model_dump_json().encode()
    if len(text) > _LONGEST_TEXT:
        raise ArchiveMismatch(
            f"{name} would take {len(text):,} bytes, and an archive takes documents of "
            f"{_LONGEST_TEXT:,}; divide the document before you export it"
        )
    return ArchiveEntry(name, lambda: [memoryview(text)])


def document_name(number: int) -> str:
    """Return the name of the file of a document, counted from 0."""
    return f"documents/{number:08}.json"


def original_name(digest: str) -> str:
    """Return the name of the file of an original."""
    return f"originals/{digest}"


def states_name(key: KVKey) -> str:
    """Return the name of the file of a key's states."""
    return f"states/{key}.safetensors"


class ArchiveIndex:
    """The names, sizes and checksums of the files before the index."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, int, str]] = []
        self.nbytes = len(_END)
        """Size of the archive so far, without its index."""

    def add(self, name: str, size: int, checksum: str) -> None:
        """Add a file. A blob has its checksum in its header, and none here."""
        self._rows.append((name, size, checksum))
        self.nbytes += _BLOCK + size + -size % _BLOCK

    def add_entry(self, entry: ArchiveEntry, parts: Parts) -> None:
        """Add a file that is written."""
        self.add(entry.name, sum(map(len, parts)), "" if entry.key else checksum_of(parts))

    def to_bytes(self) -> bytes:
        """Return the content of the index."""
        return json.dumps(self._rows, separators=(",", ":")).encode()


def checksum_of(parts: Parts) -> str:
    """Return the xxh3 checksum of a file."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def stream_entries(entries: Iterable[ArchiveEntry]) -> Iterator[memoryview]:
    """Yield an archive in pieces, to be written or sent in order."""
    index = ArchiveIndex()
    for entry, parts in _load_ahead(entries):
        index.add_entry(entry, parts)
        yield from _framed(entry.name, parts)
    yield from _framed(INDEX, [memoryview(index.to_bytes())])
    yield memoryview(_END)


def write_entries(path: Path, entries: Iterable[ArchiveEntry]) -> int:
    """Write an archive to a file, which appears when it is complete, and return its size.

    Goes on with the file `NAME.part` of an earlier call that was interrupted: members that are as
    they would be written now stay.

    Args:
        path: The file, which is replaced if it exists.
        entries: Files of the archive, without its index.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    index, left = ArchiveIndex(), iter(entries)
    first = next(left)  # an unknown collection makes no file
    with os.fdopen(
        os.open(part, os.O_RDWR | os.O_CREAT | BINARY, 0o600), "r+b", buffering=0
    ) as file:
        end, written = file.seek(0, io.SEEK_END), 0
        rest = chain([first], left)
        for entry in rest:
            member = _find_kept(file.fileno(), written, end, entry, index)
            if member is None:
                rest = chain([entry], rest)
                break
            written = member.end
        file.truncate(written)
        file.seek(written)
        for entry, parts in _load_ahead(rest):
            index.add_entry(entry, parts)
            written += write_parts(file, _framed(entry.name, parts))
        file.truncate(written)
        file.seek(written)
        listed = _framed(INDEX, [memoryview(index.to_bytes())])
        written += write_parts(file, [*listed, memoryview(_END)])
        os.fsync(file.fileno())
    part.replace(path)
    return written


def _load_ahead(entries: Iterable[ArchiveEntry]) -> Iterator[tuple[ArchiveEntry, Parts]]:
    """Yield the files that are there with their contents, each read while the last is written."""
    with ThreadPoolExecutor(1, "ragcache-export") as reader:
        begun = ((entry, reader.submit(entry.load)) for entry in entries)
        for current, _ in pairwise(chain(begun, [None])):  # which begins the next one
            assert current is not None
            entry, reading = current
            if (parts := reading.result()) is not None:
                yield entry, parts


def _find_kept(
    file: int, offset: int, end: int, entry: ArchiveEntry, index: ArchiveIndex
) -> ArchiveMember | None:
    """Return the member at a position if it is the entry's, complete and undamaged."""
    try:
        member = _member_at(file, offset, end, "the file")
        if member is None or member.name != entry.name:
            return None
        if entry.key is not None:
            stream = MemberStream(file, member)
            read_blob(stream, entry.key, member.name, _new_memory)
            index.add(entry.name, member.size, "")
            return member
    except (ArchiveDamaged, StateCorrupt):
        return None
    parts = entry.load() or []
    if b"".join(parts) != read_at(file, member.size, member.offset):
        return None
    index.add_entry(entry, parts)
    return member


def _framed(name: str, parts: Parts) -> Iterator[memoryview]:
    """Yield a member: its header, its content, its padding."""
    size = sum(map(len, parts))
    yield memoryview(_header(name, size))
    yield from parts
    if size % _BLOCK:
        yield memoryview(bytes(-size % _BLOCK))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


class MemberStream:
    """The content of a member as a stream, for `read_blob`. Thread-safe if each thread has one."""

    def __init__(self, file: int, member: ArchiveMember) -> None:
        """Read from an open file."""
        self._file, self._member, self._at = file, member, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a position from the beginning (0) or the end (2)."""
        self._at = offset + (self._member.size if whence == io.SEEK_END else 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read bytes, by default all that are left."""
        left = self._member.size - self._at
        found = read_at(
            self._file, left if size < 0 else min(size, left), self._member.offset + self._at
        )
        self._at += len(found)
        return found

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into a buffer, and return the number of bytes."""
        room = buffer[: self._member.size - self._at]
        count = read_into(self._file, room, self._member.offset + self._at)
        self._at += count
        return count


class ArchiveReader:
    """An open archive whose structure has been checked.

    Example:
        >>> with open("handbook.tar", "rb") as file:      # doctest: +SKIP
        ...     ArchiveReader(file, file.name).manifest.collection
        'handbook'
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Check the members of an archive against its index, and read its manifest.

        Contents of documents and states are checked when they are read.

        Args:
            file: The open file, which stays the caller's.
            name: Its name in errors.

        Raises:
            ArchiveDamaged: The file is no archive, is incomplete or was changed.
            ArchiveMismatch: Another version of the format made it.
            OSError: The file cannot be read.
        """
        self.name, self._file = name, file.fileno()
        self._members = self._scan()
        self._content = map_file(file)
        self.manifest = self._read_manifest()
        self._checksums = self._check_index()

    @property
    def state_keys(self) -> list[KVKey]:
        """Keys of the states, in their order."""
        names = (name for name in self._members if name.startswith("states/"))
        return [KVKey(name.removeprefix("states/").removesuffix(".safetensors")) for name in names]

    def states_nbytes(self, key: KVKey) -> int:
        """Return the size of the file of a key's states. Raises `KeyError`."""
        return self._members[states_name(key)].size

    def documents(self) -> Iterator[ArchivedDocument]:
        """Read the documents, in order. Raises `ArchiveDamaged`."""
        for number in range(self.manifest.documents):
            name = document_name(number)
            if name not in self._members:
                raise self._damaged(f"it holds {number:,} of {self.manifest.documents:,} documents")
            yield self._parse(ArchivedDocument, name, self._read_text(name))

    @property
    def originals(self) -> set[str]:
        """Digests of the originals."""
        names = (name for name in self._members if name.startswith("originals/"))
        return {name.removeprefix("originals/") for name in names}

    def read_original(self, digest: str) -> bytes:
        """Read an original that the archive holds. Raises `ArchiveDamaged`."""
        name = original_name(digest)
        content = self._read_text(name)
        if digest_original(content) != digest:
            raise self._damaged(f"{name} has other content than its name says")
        return content

    def read_states(self, key: KVKey) -> StoredStates:
        """Verify the states of a key, and return them as they are mapped from the file.

        Raises:
            ArchiveDamaged: The states fail their checksum.
        """
        name = states_name(key)
        member = self._members[name]
        try:
            return mapped_states(self._content, member.offset, member.size, key, name)
        except StateCorrupt as error:
            raise self._damaged(str(error)) from error

    def _scan(self) -> dict[str, ArchiveMember]:
        """Read all headers. Raises `ArchiveDamaged`."""
        size, offset = os.fstat(self._file).st_size, 0
        members: dict[str, ArchiveMember] = {}
        while (member := _member_at(self._file, offset, size, self.name)) is not None:
            if member.name in members:
                raise self._damaged(f"it holds {member.name} twice")
            if len(members) == _MOST_MEMBERS:
                raise self._damaged(f"it holds more than {_MOST_MEMBERS:,} files")
            members[member.name] = member
            offset = member.end
        if read_at(self._file, len(_END) + 1, offset) != _END:
            raise self._damaged("it does not end where an archive ends")
        if list(members)[:1] != [MANIFEST] or list(members)[-1:] != [INDEX]:
            raise self._damaged("it does not begin with a manifest and end with an index")
        return members

    def _read_manifest(self) -> Manifest:
        raw = self._raw(MANIFEST)
        try:
            version = json.loads(raw)["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(f"its manifest is not readable ({error})") from error
        if version != VERSION:
            raise ArchiveMismatch(
                f"{self.name} has version {version!r:.20} of the archive's format, and this "
                f"ragcache reads version {VERSION}; export the collection with this version"
            )
        return self._parse(Manifest, MANIFEST, raw)

    def _check_index(self) -> dict[str, str]:
        """Compare the index with the members, and return the checksums by name."""
        rows = self._members[INDEX]
        if rows.size > _LISTED * len(self._members):
            raise self._damaged("its index is longer than its list of files")
        index = ArchiveIndex()
        raw = read_at(self._file, rows.size, rows.offset)
        try:
            checksums = {name: checksum for name, _, checksum in json.loads(raw)}
            for name, member in self._members.items():
                if name != INDEX:
                    index.add(name, member.size, checksums[name])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(f"its index is not readable ({error})") from error
        if raw != index.to_bytes():
            raise self._damaged("its index lists other files than it holds")
        if checksums[MANIFEST] != checksum_of([memoryview(self._raw(MANIFEST))]):
            raise self._damaged("its manifest fails its checksum")
        return checksums

    def _read_text(self, name: str) -> bytes:
        """Return the content of a file. Raises `ArchiveDamaged` if it fails its checksum."""
        raw = self._raw(name)
        if checksum_of([memoryview(raw)]) != self._checksums[name]:
            raise self._damaged(f"{name} fails its checksum")
        return raw

    def _raw(self, name: str) -> bytes:
        member = self._members[name]
        if member.size > _LONGEST_TEXT:
            raise self._damaged(f"{name} takes {member.size:,} bytes, more than any document")
        return read_at(self._file, member.size, member.offset)

    def _parse(self, model: type[Model], name: str, raw: bytes) -> Model:
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            first: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise self._damaged(
                f"{name} is not as an export writes it: {where} {first['msg']}"
            ) from None

    def _damaged(self, reason: str) -> ArchiveDamaged:
        return damaged(self.name, reason)


def damaged(name: str, reason: str) -> ArchiveDamaged:
    """Return the error of an archive that cannot be used, whatever reads it."""
    return ArchiveDamaged(
        f"{name} is no complete archive of a collection: {reason}. Nothing was stored; copy it "
        "again, or export the collection again"
    )


def _new_memory(nbytes: int) -> Any:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


def _member_at(file: int, offset: int, end: int, where: str) -> ArchiveMember | None:
    """Read the header at a position, or return None at the end mark.

    Raises:
        ArchiveDamaged: The header is not exactly as `_header` writes it, its name is unknown, or
            the file ends within the member.
    """
    raw = read_at(file, _BLOCK, offset)
    try:
        info = tarfile.TarInfo.frombuf(raw, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if raw == bytes(_BLOCK):
            return None
        problem = "it is cut off" if len(raw) < _BLOCK else f"a header is damaged ({error})"
        raise damaged(where, problem) from None
    if _NAMES.fullmatch(info.name) is None:
        raise damaged(where, f"it holds {info.name!r:.80}, which is no file of a collection")
    if _header(info.name, info.size) != raw:
        raise damaged(where, f"{info.name} is a link, a sparse file or otherwise no plain file")
    member = ArchiveMember(info.name, offset + _BLOCK, info.size)
    if member.end > end:
        raise damaged(where, f"it is cut off within {info.name}")
    padding = member.end - member.offset - member.size
    if read_at(file, padding, member.end - padding) != bytes(padding):
        raise damaged(where, f"there are other bytes than zeros after {info.name}")
    return member
