"""Blobs: what is read is bit for bit what was written, or `StateCorrupt`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import StateCorrupt
from ragcache.states import KVKey, KVStates
from ragcache.states import blob as blob_module
from ragcache.states.blob import read_blob, to_blob

KEY = KVKey("ab" * 32)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(dtype: torch.dtype = torch.float32, tokens: int = 3, start: int = 40) -> KVStates:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)
    return KVStates(keys, values, start)


def read_bytes(content: bytes, folder: Path, key: KVKey = KEY) -> KVStates:
    path = folder / "blob.safetensors"
    path.write_bytes(content)
    return read_blob(path, key)


def assert_same(read: KVStates, written: KVStates) -> None:
    for ours, theirs in ((read.keys, written.keys), (read.values, written.values)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*bits)
    assert read.start == written.start


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_is_exact_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    states = draw(dtype)
    special = torch.tensor([float("nan"), -float("inf"), -0.0, 1e-7], dtype=dtype)
    states.keys[0, 0, 0] = special
    assert_same(read_bytes(to_blob(KEY, states), tmp_path), states)


def test_a_view_of_part_of_a_run_is_written_as_that_part(tmp_path: Path) -> None:
    part = draw(tokens=9).part(2, 5, 42)
    assert not part.keys.is_contiguous()
    assert_same(read_bytes(to_blob(KEY, part), tmp_path), part)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    states = draw()
    content = to_blob(KEY, states)
    read = read_bytes(content, tmp_path)
    with (tmp_path / "blob.safetensors").open("r+b") as file:
        file.write(b"\xff" * len(content))
    assert_same(read, states)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blobs")


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=300)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_anywhere_is_noticed(
    dtype: torch.dtype, where: float, bit: int, folder: Path
) -> None:
    content = bytearray(to_blob(KEY, draw(dtype)))
    content[int(where * len(content))] ^= 1 << bit
    with pytest.raises(StateCorrupt):
        read_bytes(bytes(content), folder)


def test_a_flipped_bit_in_any_byte_of_the_header_is_noticed(folder: Path) -> None:
    content = to_blob(KEY, draw())
    header = 8 + int.from_bytes(content[:8], "little")
    for byte in range(header):
        changed = bytearray(content)
        changed[byte] ^= 1 << byte % 8
        with pytest.raises(StateCorrupt):
            read_bytes(bytes(changed), folder)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, 300, -200, -8, -1])
def test_a_truncated_file_is_noticed(kept: int, tmp_path: Path) -> None:
    content = to_blob(KEY, draw())
    with pytest.raises(StateCorrupt, match=r"blob\.safetensors is not a readable blob"):
        read_bytes(content[:kept], tmp_path)


def test_bytes_after_the_end_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(StateCorrupt):
        read_bytes(to_blob(KEY, draw()) + b"\0", tmp_path)


def test_a_blob_of_another_key_does_not_stand_in(tmp_path: Path) -> None:
    with pytest.raises(StateCorrupt, match="fails its checksum"):
        read_bytes(to_blob(KVKey("cd" * 32), draw()), tmp_path)


def test_keys_and_values_that_changed_places_are_noticed(tmp_path: Path) -> None:
    states = draw()
    content = to_blob(KEY, states)
    half = states.keys.nbytes
    swapped = content[: -2 * half] + content[-half:] + content[-2 * half : -half]
    with pytest.raises(StateCorrupt, match="fails its checksum"):
        read_bytes(swapped, tmp_path)


def test_a_blob_of_another_format_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = to_blob(KEY, draw())
    monkeypatch.setattr(blob_module, "FORMAT_VERSION", 999)
    with pytest.raises(StateCorrupt, match="fails its checksum"):
        read_bytes(content, tmp_path)


def test_safetensors_of_something_else_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import save

    with pytest.raises(StateCorrupt, match="not a readable blob"):
        read_bytes(save({"weight": torch.zeros(2)}), tmp_path)


def test_a_missing_file_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_blob(tmp_path / "none.safetensors", KEY)
