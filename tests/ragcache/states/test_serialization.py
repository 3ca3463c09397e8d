"""Blobs: what is read is bit for bit what was written, or `StateCorrupt`."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ragcache.errors import StateCorrupt, StateMissing, StoreUnreadable
from ragcache.states import KVKey, KVStates, serialization
from ragcache.states.quantization import (
    StoredStates,
    quantize,
    quantized_nbytes,
    tensors_of,
)
from ragcache.states.recurrent import RecurrentStates
from ragcache.states.serialization import load_blob, map_blob, read_blob, to_blob
from tests.conftest import scaled
from tests.ragcache.conftest import make_maps

KEY = KVKey("ab" * 32)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(dtype: torch.dtype = torch.float32, tokens: int = 3, start: int = 40) -> KVStates:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)
    return KVStates(keys, values, start)


def draw_hybrid(dtype: torch.dtype = torch.bfloat16, *, convolution: bool = False) -> KVStates:
    """States with maps of three recurrent layers, or of three convolutions."""
    return replace(draw(dtype), recurrent=make_maps(dtype, heads=0 if convolution else 2))


def plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def written(content: bytes, folder: Path) -> Path:
    path = folder / "blob.safetensors"
    path.write_bytes(content)
    return path


def read_bytes(content: bytes, folder: Path, key: KVKey = KEY) -> StoredStates:
    """Reads in both ways, which agree."""
    path = written(content, folder)
    try:
        loaded = load_blob(path, key, plain)
    except StateCorrupt:
        with pytest.raises(StateCorrupt):
            map_blob(path, key)
        raise
    assert_same(map_blob(path, key), loaded)
    return loaded


def assert_same(read: StoredStates, expected: StoredStates) -> None:
    assert type(read) is type(expected)
    ours, theirs = tensors_of(read), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (tensor, theirs[name])]
        assert torch.equal(*bits)
    assert read.start == expected.start
    assert isinstance(read, KVStates) or read.dtype == expected.dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_is_exact_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    states = draw(dtype)
    special = torch.tensor([float("nan"), -float("inf"), -0.0, 1e-7], dtype=dtype)
    states.keys[0, 0, 0] = special
    part = draw(dtype, tokens=9).part(2, 5, 42)
    assert not part.keys.is_contiguous()
    for kept in (states, part, quantize(draw(dtype), "int8"), draw(dtype, tokens=0)):
        assert_same(read_bytes(to_blob(KEY, kept), tmp_path), kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maps_of_recurrent_layers_are_kept_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    for states in (draw_hybrid(dtype), draw_hybrid(dtype, convolution=True)):
        eight = quantize(states, "int8")
        for kept in (states, eight):
            read = read_bytes(to_blob(KEY, kept), tmp_path)
            assert_same(read, kept)
            assert read.nbytes == kept.nbytes
        assert eight.recurrent is states.recurrent
        assert quantized_nbytes(states, "int8") == eight.nbytes
        assert quantized_nbytes(eight, "model") == states.nbytes


def test_maps_of_other_shapes_do_not_fit() -> None:
    shapes = {
        "transition": (2, 3, 4, 4), "increment": (2, 3, 4, 5), "decays": (2, 3, 3, 1),
        "steps": (2, 3, 3, 1), "first": (2, 1, 7, 3), "last": (2, 1, 7, 4),
    }  # fmt: skip
    long = RecurrentStates(**{name: torch.empty(shape) for name, shape in shapes.items()})
    short = {"decays": (2, 3, 1, 1), "steps": (2, 3, 1, 1), "first": (2, 1, 7, 1)}
    assert long.fits(long)
    assert replace(long, **{name: torch.empty(shape) for name, shape in short.items()}).fits(long)
    convolutions = make_maps(heads=0)
    assert convolutions.fits(convolutions)
    assert not convolutions.fits(long)
    assert not replace(long, first=torch.empty(2, 1, 7, 1)).fits(long), "its decays are of three"
    for name, shape in shapes.items():
        for axis in range(4):
            other = [*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]]
            assert not replace(long, **{name: torch.empty(other)}).fits(long), (name, axis)


def test_a_blob_with_some_maps_is_corrupt() -> None:
    states = draw_hybrid()
    assert states.recurrent is not None
    tensors = {f"{name}": each for name, each in tensors_of(states).items() if name != "steps"}
    blob = to_blob(KEY, states)
    facts = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
    with pytest.raises(StateCorrupt):
        read_blob(io.BytesIO(save(tensors, facts)), KEY, "blob", plain)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    states = quantize(draw(torch.bfloat16), "int8")
    read = load(to_blob(KEY, states))
    for name, tensor in tensors_of(states).items():
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))


def test_what_was_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    content = to_blob(KEY, draw())
    read = load_blob(written(content, tmp_path), KEY, plain)
    with (tmp_path / "blob.safetensors").open("r+b") as file:
        file.write(b"\xff" * len(content))
    assert_same(read, draw())


def test_mapped_states_outlive_the_name_of_their_file(tmp_path: Path) -> None:
    path = written(to_blob(KEY, draw()), tmp_path)
    states = map_blob(path, KEY)
    path.unlink()
    assert_same(states, draw())


def test_mapped_states_are_views_of_one_mapping(tmp_path: Path) -> None:
    states = map_blob(written(to_blob(KEY, draw()), tmp_path), KEY)
    assert states.keys.data_ptr() % 64 == 0
    assert states.values.data_ptr() == states.keys.data_ptr() + states.keys.nbytes
    mappings = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "blob.safetensors") in mappings


def test_writing_to_mapped_states_does_not_reach_the_file(tmp_path: Path) -> None:
    path = written(to_blob(KEY, draw()), tmp_path)
    map_blob(path, KEY).keys.zero_()
    assert_same(map_blob(path, KEY), draw())


def test_loading_asks_for_exactly_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    asked: list[int] = []
    states = quantize(draw(), "int8")

    def room(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return plain(nbytes)

    loaded = load_blob(written(to_blob(KEY, states), tmp_path), KEY, room)
    assert asked == [states.nbytes]
    assert loaded.keys.untyped_storage().nbytes() == states.nbytes


def test_blobs_longer_than_a_part_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "_CHUNK", 7)
    assert_same(read_bytes(to_blob(KEY, draw()), tmp_path), draw())


def test_a_file_that_shrinks_during_reading_raises() -> None:
    class Shrinking(io.BytesIO):
        def seek(self, offset: int, whence: int = 0, /) -> int:
            end = super().seek(offset, whence)
            return end + 16 if whence else end

    content = Shrinking(to_blob(KEY, draw())[:-16])
    with pytest.raises(StateCorrupt, match="became shorter"):
        read_blob(content, KEY, "blob", plain)


def test_a_failed_read_is_not_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = written(to_blob(KEY, draw()), tmp_path)
    monkeypatch.setattr(serialization, "read_blob", fail)
    with pytest.raises(StoreUnreadable, match=r"cannot read .*: Input/output error"):
        load_blob(path, KEY, plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blobs")


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=scaled(300))
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


BLOB, HALF = to_blob(KEY, draw()), draw().keys.nbytes
UNREADABLE = r"blob\.safetensors is not a readable blob"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((BLOB[:kept], UNREADABLE) for kept in (0, 1, 7, 8, 9, 100, 300, -200, -8, -1)),
        (BLOB + b"\0", UNREADABLE),
        (save({"weight": torch.zeros(2)}), UNREADABLE),
        (to_blob(KVKey("cd" * 32), draw()), "another key or format"),
        (BLOB[: -2 * HALF] + BLOB[-HALF:] + BLOB[-2 * HALF : -HALF], "fails its checksum"),
    ],
    ids=lambda value: str(len(value)),
)
def test_what_is_not_the_blob_is_noticed(content: bytes, said: str, tmp_path: Path) -> None:
    """Truncated, too long, of something else, of another key, keys in place of values."""
    with pytest.raises(StateCorrupt, match=said):
        read_bytes(content, tmp_path)


def test_a_blob_of_another_format_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = to_blob(KEY, draw())
    monkeypatch.setattr(serialization, "FORMAT_VERSION", 999)
    with pytest.raises(StateCorrupt, match="another key or format"):
        read_bytes(content, tmp_path)


@pytest.mark.parametrize(
    "read", [map_blob, lambda path, key: load_blob(path, key, plain)], ids=["mapped", "loaded"]
)
def test_missing_and_unreadable_files_are_not_corruption(
    read: Callable[[Path, KVKey], StoredStates], tmp_path: Path
) -> None:
    with pytest.raises(StateMissing, match=r"none\.safetensors"):
        read(tmp_path / "none.safetensors", KEY)
    with pytest.raises(StoreUnreadable, match="Is a directory"):
        read(tmp_path, KEY)


def test_bytes_from_elsewhere_are_read_alike() -> None:
    content = bytearray(to_blob(KEY, draw()))
    assert_same(read_blob(io.BytesIO(content), KEY, "s3://bucket/blob", plain), draw())
    content[-1] ^= 1
    with pytest.raises(StateCorrupt, match="s3://bucket/blob fails its checksum"):
        read_blob(io.BytesIO(content), KEY, "s3://bucket/blob", plain)
