"""States as bytes: one safetensors blob, with a checksum that is verified when it is read."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ragcache.errors import StateCorrupt
from ragcache.states.key import FORMAT_VERSION, KVKey
from ragcache.states.kv import KVStates


def to_blob(key: KVKey, states: KVStates) -> bytes:
    """Serialises states. The key is part of the checksum: a blob cannot stand in for another."""
    keys, values = states.keys.contiguous().cpu(), states.values.contiguous().cpu()
    metadata = _metadata(key, states.start, keys, values)
    blob: bytes = save({"keys": keys, "values": values}, metadata=metadata)
    return blob


def read_blob(path: Path, key: KVKey) -> KVStates:
    """Reads and verifies a blob.

    Raises `StateCorrupt` where anything disagrees, `FileNotFoundError` where there is no file.
    """
    try:
        with safe_open(path, framework="pt") as blob:
            metadata = blob.metadata() or {}
            # Cloned before they are verified: what was checked is what is served, whatever
            # happens to the mapped file later.
            keys, values = blob.get_tensor("keys").clone(), blob.get_tensor("values").clone()
        start = int(metadata["start"])
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateCorrupt(f"{path} is not a readable blob of states ({error})") from error
    if metadata != _metadata(key, start, keys, values):
        raise StateCorrupt(f"{path} fails its checksum: its content changed after it was written")
    return KVStates(keys, values, start)


def _metadata(key: KVKey, start: int, keys: Tensor, values: Tensor) -> dict[str, str]:
    names = {"format": str(FORMAT_VERSION), "key": str(key), "start": str(start)}
    digest = xxhash.xxh3_128(str(names).encode())
    for tensor in (keys, values):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return {**names, "checksum": digest.hexdigest()}
