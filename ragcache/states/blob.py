"""States as bytes: one safetensors blob a key, with a checksum that is verified when it is read.

A blob is a safetensors file (8 bytes of length, a JSON header padded with spaces, the tensors).
Its header tells the format version, the key, the start, the dtype before quantisation, and an xxh3
checksum over all of these, the shapes and the tensors. Tensors start at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ragcache.errors import StateCorrupt, StateMissing, StoreUnreadable
from ragcache.states.key import FORMAT_VERSION, KVKey
from ragcache.states.kv import KVStates
from ragcache.states.quantised import StoredStates, model_dtype, rebuild, restored, tensors_of

Allocate = Callable[[int], Tensor]
"""Makes room for so many bytes: uint8, [N], in main memory."""

_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 16
_CHUNK = 1 << 20  # bytes copied and then summed while they are in the processor's cache
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def blob_parts(key: KVKey, states: StoredStates) -> list[memoryview]:
    """The header and the tensors of a blob, to be written one after another; only tensors that are
    on another device or not contiguous are copied. The key is part of the checksum: a blob cannot
    stand in for another."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors_of(states).items()}
    table, end = {}, 0
    for name, tensor in tensors.items():
        place = [end, end + tensor.nbytes]
        table[name] = _row(tensor.dtype, tensor.shape, place)
        end = place[1]
    facts = {
        "format": str(FORMAT_VERSION),
        "key": str(key),
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
    """A whole blob in one piece."""
    return b"".join(blob_parts(key, states))


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A blob whose header was read and found to be that of its key; its tensors are not verified.

    payload: uint8 [N], the bytes of all tensors. where: its name, for errors.
    """

    payload: Tensor
    table: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, str]
    checksum: str
    where: str

    def verified(self) -> StoredStates:
        """The states where they are, without a copy, once their checksum was found to hold.

        Mapped states stay on disk and in the page cache, which all processes share. Raises
        `StateCorrupt`.
        """
        digest = _described(self.table, self.facts)
        digest.update(_bytes(self.payload))
        return self._checked(digest, self.payload)

    def loaded(self, allocate: Allocate) -> StoredStates:
        """A copy in memory of the caller's, which is what is verified: whatever happens to the
        file later does not reach it. Raises `StateCorrupt`."""
        copy = allocate(self.payload.numel())
        digest = _described(self.table, self.facts)
        for begin in range(0, copy.numel(), _CHUNK):
            part = copy[begin : begin + _CHUNK]
            digest.update(_bytes(part.copy_(self.payload[begin : begin + _CHUNK])))
        return self._checked(digest, copy)

    def _checked(self, digest: xxhash.xxh3_128, payload: Tensor) -> StoredStates:
        if digest.hexdigest() != self.checksum:
            raise StateCorrupt(
                f"{self.where} fails its checksum: its content changed after it was written"
            )
        tensors = {}
        for name, row in self.table.items():
            begin, end = row["data_offsets"]
            tensors[name] = payload[begin:end].view(_DTYPES[row["dtype"]]).view(row["shape"])
        return rebuild(tensors, int(self.facts["start"]), _DTYPES[self.facts["dtype"]])


def map_blob(path: Path, key: KVKey) -> Blob:
    """Maps a file. Nothing of its tensors is read before they are verified or loaded.

    Raises `StateCorrupt`, `StateMissing`, or `StoreUnreadable` where the system refuses.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            content.madvise(mmap.MADV_WILLNEED)  # read ahead of the first use
    except FileNotFoundError:
        raise StateMissing(f"there is no blob {path}") from None
    except ValueError as error:  # an empty file cannot be mapped
        raise StateCorrupt(f"{path} is not a readable blob of states (it is empty)") from error
    except OSError as error:
        raise StoreUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    return parse_blob(content, key, str(path))


def parse_blob(content: bytearray | mmap.mmap, key: KVKey, where: str) -> Blob:
    """Reads the header of a whole blob. Raises `StateCorrupt` unless it is one of this key."""
    try:
        table, facts, checksum, begin = _header(content)
        other = facts["format"] != str(FORMAT_VERSION) or facts["key"] != str(key)
        int(facts["start"]), _DTYPES[facts["dtype"]]
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateCorrupt(f"{where} is not a readable blob of states ({error})") from error
    if other:
        raise StateCorrupt(f"{where} is a blob of another key or format")
    payload = torch.empty(0, dtype=torch.uint8)
    if len(content) > begin:
        payload = torch.frombuffer(content, dtype=torch.uint8, offset=begin)
    return Blob(payload, table, facts, checksum, where)


def read_blob(path: Path, key: KVKey) -> KVStates:
    """A verified copy in memory, restored where it is quantised. Raises `StateCorrupt`,
    `FileNotFoundError` where there is no file."""
    try:
        return restored(map_blob(path, key).loaded(lambda n: torch.empty(n, dtype=torch.uint8)))
    except StateMissing as error:
        raise FileNotFoundError(str(error)) from error


def _header(
    content: bytearray | mmap.mmap,
) -> tuple[dict[str, Any], dict[str, str], str, int]:
    """Table of tensors, facts, checksum, and where the tensors begin. Raises `ValueError` unless
    all is as `blob_parts` writes it, to the byte."""
    begin = 8 + int.from_bytes(content[:8], "little")
    if not 8 < begin <= _LONGEST_HEADER:
        raise ValueError("its header has no plausible length")
    header = json.loads(content[8:begin])
    if _framed(header) != content[:begin]:
        raise ValueError("its header is not as it was written")
    facts = header.pop("__metadata__")
    size, found = _total(header), len(content) - begin
    if size != found:
        raise ValueError(f"its tensors need {size} bytes, and {found} are there")
    return header, facts, facts.pop("checksum"), begin


def _row(dtype: torch.dtype, shape: torch.Size, place: list[int]) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": place}


def _total(table: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes of all tensors. Raises `ValueError` unless they are four axes long, as large as they
    say, and stand one after another."""
    if set(table) - {"key_scales", "value_scales"} != {"keys", "values"} or len(table) not in (
        2,
        4,
    ):
        raise ValueError("it holds other tensors than states do")
    end = 0
    for row in table.values():
        begin, place = row["data_offsets"]
        numbers = 1
        for size in row["shape"]:
            numbers *= size
        nbytes = numbers * _DTYPES[row["dtype"]].itemsize
        if len(row["shape"]) != 4 or begin != end or place != begin + nbytes:
            raise ValueError("its tensors do not stand one after another")
        end = place
    return end


def _framed(header: Mapping[str, Any]) -> bytes:
    """The header with its length before it and spaces after it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _described(table: Mapping[str, Any], facts: Mapping[str, str]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(json.dumps([facts, table], sort_keys=True).encode())


def _bytes(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content
