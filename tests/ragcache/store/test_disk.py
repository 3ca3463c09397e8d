"""The disk tier: all of a blob or nothing, and named errors."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ragcache.errors import StateCorrupt, StoreFull, StoreUnwritable
from ragcache.store import DiskTier
from ragcache.store import disk as disk_module
from ragcache.store.disk import named_os_error
from tests.ragcache.store.conftest import make_key, make_states, same


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "states")


def files(tier: DiskTier) -> list[str]:
    return sorted(path.name for path in tier.folder.rglob("*") if path.is_file())


def fail_with(number: int, monkeypatch: pytest.MonkeyPatch, half: bool = False) -> None:
    """Makes every write fail, `half` of the blob written."""

    def write(path: Path, blob: bytes) -> None:
        path.write_bytes(blob[: len(blob) // 2] if half else b"")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_module, "_write_through", write)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_was_put_is_what_is_read(tier: DiskTier) -> None:
    nbytes = tier.put(make_key(1), make_states(1, 5))
    assert same(tier.get(make_key(1)), make_states(1, 5))
    assert nbytes == tier.path(make_key(1)).stat().st_size
    assert list(tier.keys()) == [make_key(1)]


def test_an_empty_tier_has_no_keys_and_is_no_error(tier: DiskTier) -> None:
    assert list(tier.keys()) == []
    tier.delete(make_key(1))
    tier.remove_parts(0)
    with pytest.raises(FileNotFoundError):
        tier.get(make_key(1))


def test_a_second_put_replaces_the_first(tier: DiskTier) -> None:
    tier.put(make_key(1), make_states(1))
    tier.path(make_key(1)).write_bytes(b"damaged")
    tier.put(make_key(1), make_states(1, 2))
    assert same(tier.get(make_key(1)), make_states(1, 2))
    assert len(files(tier)) == 1


def test_a_deleted_blob_is_gone(tier: DiskTier) -> None:
    for number in (1, 2):
        tier.put(make_key(number), make_states(number))
    tier.delete(make_key(1))
    assert list(tier.keys()) == [make_key(2)]


def test_a_blob_under_a_wrong_name_is_corrupt(tier: DiskTier) -> None:
    tier.put(make_key(1), make_states(1))
    path = tier.path(make_key(2))
    path.parent.mkdir()
    tier.path(make_key(1)).rename(path)
    with pytest.raises(StateCorrupt, match=path.name):
        tier.get(make_key(2))


def test_nothing_partial_is_visible_while_a_blob_is_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[Any], bool]] = []
    write = disk_module._write_through

    def watched(path: Path, blob: bytes) -> None:
        write(path, blob)
        seen.append((list(tier.keys()), tier.path(make_key(1)).exists()))

    monkeypatch.setattr(disk_module, "_write_through", watched)
    tier.put(make_key(1), make_states(1))
    assert seen == [([], False)]
    assert files(tier) == [tier.path(make_key(1)).name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_what_was_stored_stays(
    number: int, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(make_key(1), make_states(1))
    fail_with(number, monkeypatch, half=True)
    for key in (make_key(1), make_key(2)):
        with pytest.raises(StoreFull, match=r"no space left .* stays usable"):
            tier.put(key, make_states(2))
    assert files(tier) == [tier.path(make_key(1)).name], "the half that was written is gone"
    assert same(tier.get(make_key(1)), make_states(1))


def test_a_failing_disk_is_called_unwritable(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(errno.EIO, monkeypatch)
    with pytest.raises(StoreUnwritable, match="Input/output error"):
        tier.put(make_key(1), make_states(1))
    assert files(tier) == []


def test_a_file_where_the_folder_should_be_is_unwritable(tier: DiskTier) -> None:
    tier.folder.write_text("not a folder")
    with pytest.raises(StoreUnwritable, match=r"cannot write under .*states"):
        tier.put(make_key(1), make_states(1))


def test_an_error_without_a_text_of_its_own_still_says_something(tmp_path: Path) -> None:
    assert str(named_os_error(OSError("odd"), tmp_path)).endswith(": odd")


def test_leftovers_of_dead_writers_go_only_when_they_are_old(tier: DiskTier) -> None:
    tier.put(make_key(1), make_states(1))
    folder = tier.path(make_key(1)).parent
    old, new = folder / "old.safetensors.1.part", folder / "new.safetensors.2.part"
    for part in (old, new):
        part.write_bytes(b"half")
    for path in (old, tier.path(make_key(1))):
        age(path, 1000)
    assert list(tier.keys()) == [make_key(1)], "a part is no blob"
    tier.remove_parts(900)
    assert (old.exists(), new.exists()) == (False, True)
    assert tier.path(make_key(1)).exists(), "a blob is no part, however old"


def test_the_age_of_a_blob_counts_from_its_writing(tier: DiskTier) -> None:
    tier.put(make_key(1), make_states(1))
    age(tier.path(make_key(1)), 5000)
    assert 5000 <= tier.age(make_key(1)) < 6000
    assert tier.age(make_key(2)) == 0, "another process may have taken it away"
