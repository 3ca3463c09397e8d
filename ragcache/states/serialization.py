"""States as bytes: one safetensors blob a key, with a checksum that is verified when it is read.

A blob is a safetensors file (8 bytes of length, a JSON header padded with spaces, the tensors).
Its header holds the format version, the key, the start, the dtype before quantization, and an xxh3
checksum over all of these, the shapes and the tensors. Tensors start at a multiple of 64 bytes.
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
from ragcache.openmp import keeps_no_workers
from ragcache.states.kv import FORMAT_VERSION, KVKey
from ragcache.states.quantization import StoredStates, model_dtype, rebuild, tensors_of

Allocate = Callable[[int], Tensor]
"""Makes room for so many bytes: uint8, [N], in main memory."""

_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 16
_CHUNK = 1 << 20  # bytes read and then summed while they are in the processor's cache
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int8: "I8",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@keeps_no_workers
def blob_parts(key: KVKey, states: StoredStates) -> list[memoryview]:
    """The header and the tensors of a blob, to be written one after another; only tensors that are
    on another device or not contiguous are copied. The key is part of the checksum: a blob cannot
    replace another."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors_of(states).items()}
    table, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    facts = {
        "format": str(FORMAT_VERSION), "key": key, "start": str(states.start),
        "dtype": _NAMES[model_dtype(states)],
    }  # fmt: skip
    contents = [_bytes(tensor) for tensor in tensors.values()]
    digest = _described(table, facts)
    for content in contents:
        digest.update(content)
    header = {"__metadata__": {**facts, "checksum": digest.hexdigest()}, **table}
    return [memoryview(_framed(header)), *contents]


def to_blob(key: KVKey, states: StoredStates) -> bytes:
    """A whole blob in one piece."""
    return b"".join(blob_parts(key, states))


def map_blob(path: Path, key: KVKey) -> StoredStates:
    """Maps a file and verifies it where it is: the states stay in the page cache, which all
    processes share, and outlive the file's name. Raises `StateCorrupt`, `StateMissing`, or
    `StoreUnreadable` where the system refuses."""
    with _open(path) as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:  # an empty file cannot be mapped
            raise StateCorrupt(f"{path} is not a readable blob of states ({error})") from error
        except OSError as error:
            raise StoreUnreadable(f"cannot map {path}: {error.strerror or error}") from error
    header = _read_header(io.BytesIO(content[:_LONGEST_HEADER]), len(content), key, str(path))
    payload = torch.empty(0, dtype=torch.uint8)
    if header.size:
        payload = torch.frombuffer(content, dtype=torch.uint8, offset=len(content) - header.size)
    digest = _described(header.table, header.facts)
    digest.update(_bytes(payload))
    return header.states(payload, digest)


def load_blob(path: Path, key: KVKey, allocate: Allocate) -> StoredStates:
    """Reads a file into memory of the caller's, which is what is verified: whatever happens to the
    file later does not reach it. Raises as `map_blob` does, and what `allocate` raises."""
    with _open(path) as file:
        try:
            return read_blob(file, key, str(path), allocate)
        except OSError as error:
            if isinstance(error, StoreUnreadable) or error.errno is None:
                raise
            raise StoreUnreadable(f"cannot read {path}: {error.strerror}") from error


def read_blob(stream: Stream, key: KVKey, where: str, allocate: Allocate) -> StoredStates:
    """Reads a stream into memory from `allocate` and verifies it there. where: a name, for errors.
    Raises `StateCorrupt`, and what the stream and `allocate` raise."""
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
    """A file that was opened for reading without a buffer, or bytes in memory."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def read(self, size: int = -1, /) -> bytes | None: ...
    def readinto(self, buffer: memoryview, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Header:
    """What a blob says of itself. size: bytes of all tensors."""

    table: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, str]
    checksum: str
    size: int
    where: str

    def states(self, payload: Tensor, digest: xxhash.xxh3_128) -> StoredStates:
        """Views of the payload, uint8 [size]. Raises `StateCorrupt`."""
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
    """Raises `StateCorrupt` unless all is as `blob_parts` writes it for this key, to the byte."""
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
    """Bytes of all tensors. Raises `ValueError` unless they are four axes long, as large as they
    say, and stand one after another."""
    scales = set(table) - {"keys", "values"}
    if len(table) != 2 + len(scales) or scales not in (set(), {"key_scales", "value_scales"}):
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
    """The header with its length before it and spaces after it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _described(table: Mapping[str, Any], facts: Mapping[str, str]) -> xxhash.xxh3_128:
    """The checksum so far, before the tensors."""
    return xxhash.xxh3_128(json.dumps([facts, table], sort_keys=True).encode())


def _bytes(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content
