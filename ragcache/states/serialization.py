"""States as safetensors blobs, one blob per key, with a checksum that every read verifies.

A blob is a safetensors file: 8 bytes of length, a JSON header padded with spaces, and the tensors.
The header contains the format version, the key, the start, the dtype before quantization, and an
xxh3 checksum over these facts, the shapes and the tensors. The data starts at a multiple of 64
bytes.
"""

from __future__ import annotations

import io
import json
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ragcache.errors import StateCorrupt, StateMissing, StoreUnreadable
from ragcache.files import map_file
from ragcache.openmp import keeps_no_workers
from ragcache.states.kv import FORMAT_VERSION, KVKey
from ragcache.states.quantization import StoredStates, model_dtype, rebuild, tensors_of
from ragcache.states.recurrent import RECURRENT_NAMES

Allocate = Callable[[int], Tensor]
"""Allocates main memory of a size in bytes: uint8 [N]."""

_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 16
_CHUNK = 1 << 20  # bytes that are read, then hashed while they are in the processor's cache
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SCALES, _RECURRENT = {"key_scales", "value_scales"}, set(RECURRENT_NAMES)


@keeps_no_workers
def blob_parts(key: KVKey, states: StoredStates) -> list[memoryview]:
    """Return the header and the tensors of a blob, to be written in order.

    Copies only tensors that are on another device or not contiguous. The checksum covers the key,
    so that no blob can replace the blob of another key.
    """
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors_of(states).items()}
    table, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    facts = {
        "format": str(FORMAT_VERSION),
        "key": key,
        "start": str(states.start),
        "dtype": _NAMES[model_dtype(states)],
    }
    contents = [_bytes(tensor) for tensor in tensors.values()]
    digest = _described(table, facts)
    for content in contents:
        digest.update(content)
    header = {"__metadata__": {**facts, "checksum": digest.hexdigest()}, **table}
    return [memoryview(_framed(header)), *contents]


def to_blob(key: KVKey, states: StoredStates) -> bytes:
    """Return a complete blob."""
    return b"".join(blob_parts(key, states))


def map_blob(path: Path, key: KVKey) -> StoredStates:
    """Map a file into memory and verify it there.

    The states stay in the page cache, which all processes share, and outlive the file's name.

    Raises:
        StateMissing: The file does not exist.
        StateCorrupt: The content fails its checksum or belongs to another key.
        StoreUnreadable: The operating system refuses.
    """
    with _open(path) as file:
        try:
            content = map_file(file)
        except ValueError as error:  # an empty file cannot be mapped
            raise StateCorrupt(f"{path} is not a readable blob of states ({error})") from error
        except OSError as error:
            raise StoreUnreadable(f"cannot map {path}: {error.strerror or error}") from error
    return mapped_states(content, 0, len(content), key, str(path))


def mapped_states(
    content: mmap.mmap, begin: int, size: int, key: KVKey, where: str
) -> StoredStates:
    """Verify a blob within mapped memory, and return states there.

    Args:
        content: The memory.
        begin: Position of the blob.
        size: Size of the blob.
        key: Expected key.
        where: Name of the blob in errors.

    Raises:
        StateCorrupt: The content fails its checksum or belongs to another key.
    """
    end = begin + size
    start = io.BytesIO(content[begin : min(end, begin + _LONGEST_HEADER)])
    header = _read_header(start, size, key, where)
    payload = torch.empty(0, dtype=torch.uint8)
    if header.size:
        first = end - header.size
        payload = torch.frombuffer(content, dtype=torch.uint8, count=header.size, offset=first)
    digest = _described(header.table, header.facts)
    digest.update(_bytes(payload))
    return header.states(payload, digest)


def load_blob(path: Path, key: KVKey, allocate: Allocate) -> StoredStates:
    """Read a file into memory from `allocate` and verify the copy.

    Later changes to the file do not affect the result. Raises as `map_blob` and `allocate` do.
    """
    with _open(path) as file:
        try:
            return read_blob(file, key, str(path), allocate)
        except OSError as error:
            if isinstance(error, StoreUnreadable) or error.errno is None:
                raise
            raise StoreUnreadable(f"cannot read {path}: {error.strerror}") from error


def read_blob(stream: Stream, key: KVKey, where: str, allocate: Allocate) -> StoredStates:
    """Read a stream into memory from `allocate` and verify the copy.

    Args:
        stream: Readable and seekable.
        key: Expected key.
        where: Name of the blob in errors.
        allocate: Provides the memory.

    Raises:
        StateCorrupt: The content fails its checksum or belongs to another key.
    """
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    header = _read_header(stream, length, key, where)
    payload = allocate(header.size)
    digest, content, done = _described(header.table, header.facts), _bytes(payload), 0
    while done < header.size:
        count = stream.readinto(content[done : done + _CHUNK])
        if not count:
            raise StateCorrupt(f"{where} became shorter while it was read")
        digest.update(content[done : done + count])
        done += count
    return header.states(payload, digest)


class Stream(Protocol):
    """An unbuffered file or bytes in memory."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def read(self, size: int = -1, /) -> bytes | None: ...
    def readinto(self, buffer: memoryview, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Header:
    """The parsed header of a blob."""

    table: Mapping[str, Mapping[str, Any]]
    """Dtype, shape and data offsets of each tensor."""
    facts: Mapping[str, str]
    """Format version, key, start and dtype."""
    checksum: str
    size: int
    """Size of all tensors in bytes."""
    where: str
    """Name of the blob in errors."""

    def states(self, payload: Tensor, digest: xxhash.xxh3_128) -> StoredStates:
        """Return views of the payload, uint8 [size]. Raises `StateCorrupt` on a wrong checksum."""
        if digest.hexdigest() != self.checksum:
            raise StateCorrupt(
                f"{self.where} fails its checksum: its content changed after it was written"
            )
        tensors = {}
        for name, row in self.table.items():
            begin, end = row["data_offsets"]
            tensors[name] = payload[begin:end].view(_DTYPES[row["dtype"]]).view(row["shape"])
        return rebuild(tensors, int(self.facts["start"]), _DTYPES[self.facts["dtype"]])


def _open(path: Path) -> io.FileIO:
    try:
        return io.FileIO(path)
    except FileNotFoundError:
        raise StateMissing(f"there is no blob {path}") from None
    except OSError as error:
        raise StoreUnreadable(f"cannot read {path}: {error.strerror or error}") from error


def _read_header(stream: Stream, length: int, key: KVKey, where: str) -> _Header:
    """Parse a header. Raises `StateCorrupt` unless it is exactly as `blob_parts` writes it."""
    try:
        frame = stream.read(8) or b""
        begin = 8 + int.from_bytes(frame, "little")
        if not 8 < begin <= _LONGEST_HEADER:
            raise ValueError("its header has no plausible length")
        text = stream.read(begin - 8) or b""
        table = json.loads(text)
        if _framed(table) != frame + text:
            raise ValueError("its header is not as it was written")
        facts = table.pop("__metadata__")
        header = _Header(table, facts, facts.pop("checksum"), _total(table), where)
        other = facts["format"] != str(FORMAT_VERSION) or facts["key"] != key
        int(facts["start"]), _DTYPES[facts["dtype"]]
        if header.size != length - begin:
            raise ValueError(
                f"its tensors need {header.size} bytes, and {length - begin} are there"
            )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateCorrupt(f"{where} is not a readable blob of states ({error})") from error
    if other:
        raise StateCorrupt(f"{where} is a blob of another key or format")
    return header


def _total(table: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of all tensors in bytes.

    Raises `ValueError` unless each tensor has four axes, the size of its shape, and starts where
    the tensor before it ends.
    """
    names = set(table)
    for together in (_SCALES, _RECURRENT):
        if names >= together:
            names -= together
    if names != {"keys", "values"}:
        raise ValueError("it holds other tensors than states do")
    end = 0
    for row in table.values():
        begin, place = row["data_offsets"]
        nbytes = math.prod(row["shape"]) * _DTYPES[row["dtype"]].itemsize
        if len(row["shape"]) != 4 or begin != end or place != begin + nbytes:
            raise ValueError("its tensors are not one after another")
        end = place
    return end


def _framed(header: Mapping[str, Any]) -> bytes:
    """Encode a header: its length, its JSON, and padding."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _described(table: Mapping[str, Any], facts: Mapping[str, str]) -> xxhash.xxh3_128:
    """Return the hash state before the tensors: facts and shapes."""
    return xxhash.xxh3_128(json.dumps([facts, table], sort_keys=True).encode())


def _bytes(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content
