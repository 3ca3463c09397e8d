"""The disk tier: all of a blob or nothing, bytes as allocated, and every fault by its name."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ragcache.errors import StateMissing, StoreFull, StoreUnwritable
from ragcache.store.tiers import DiskTier, base
from tests.ragcache.conftest import make_key, make_states, same


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "states")


def names(tier: DiskTier) -> list[str]:
    return sorted(path.name for path in tier.folder.rglob("*") if path.is_file())


def make_old(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_bytes_are_those_that_the_file_system_allocated(tier: DiskTier) -> None:
    nbytes = tier.put(make_key(1), make_states(1, 500))
    found = tier.path(make_key(1)).stat()
    assert nbytes == tier.used_bytes == 512 * found.st_blocks


def test_a_tier_that_is_opened_knows_what_lies_there(tier: DiskTier) -> None:
    sizes = {make_key(n): tier.put(make_key(n), make_states(n, 90)) for n in range(3)}
    (tier.folder / "00" / "notes.safetensors").write_text("not a blob")
    tier.path(make_key(0)).rename(tier.path(make_key(1)).with_name("0" * 64 + ".safetensors"))
    opened = DiskTier.open(tier.folder)
    del sizes[make_key(0)]  # it lies in a folder that is not its own
    assert opened.scan() == sizes
    assert opened.used_bytes == sum(sizes.values())


def test_another_process_writes_and_deletes_in_the_same_folder(tier: DiskTier) -> None:
    other = DiskTier(tier.folder)
    other.put(make_key(1), make_states(1))
    assert make_key(1) in tier
    assert same(tier.get(make_key(1)), make_states(1))  # type: ignore[arg-type]
    tier.scan()
    other.delete(make_key(1))
    assert make_key(1) not in tier
    with pytest.raises(StateMissing):
        tier.get(make_key(1))
    tier.delete(make_key(1))
    assert tier.used_bytes == 0


def test_nothing_partial_is_visible_while_a_blob_is_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[Any], bool]] = []
    write = base.write_through

    def watched(path: Path, parts: Sequence[memoryview]) -> None:
        write(path, parts)
        seen.append((list(tier.keys()), make_key(1) in tier))

    monkeypatch.setattr(base, "write_through", watched)
    tier.put(make_key(1), make_states(1))
    assert seen == [([], False)]
    assert names(tier) == [tier.path(make_key(1)).name]


FULL = (StoreFull, r"no space left .* stays usable")
UNWRITABLE = (StoreUnwritable, "cannot write under .*: [A-Z]")


@pytest.mark.parametrize(
    ("number", "named"),
    [
        *((number, FULL) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        *((number, UNWRITABLE) for number in (errno.EIO, errno.EROFS, errno.EACCES)),
    ],
)
def test_a_refusing_disk_is_named_and_what_was_stored_stays(
    number: int, named: tuple[type[Exception], str], tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tier.put(make_key(1), make_states(1))

    def write_half(path: Path, parts: Sequence[memoryview]) -> None:
        path.write_bytes(parts[0])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(base, "write_through", write_half)
    for key in (make_key(1), make_key(2)):
        with pytest.raises(named[0], match=named[1]):
            tier.put(key, make_states(2))
    assert names(tier) == [tier.path(make_key(1)).name], "the half that was written is gone"
    assert same(tier.get(make_key(1)), make_states(1))  # type: ignore[arg-type]
    assert tier.used_bytes == used


def test_a_file_cut_short_by_the_system_is_named(tier: DiskTier) -> None:
    """The real thing: the kernel refuses to write past a limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StoreFull):
            tier.put(make_key(1), make_states(1, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tier) == []
    assert tier.used_bytes == 0


def test_a_file_where_the_folder_should_be_is_unwritable(tier: DiskTier) -> None:
    tier.folder.write_text("not a folder")
    with pytest.raises(StoreUnwritable, match=r"cannot write under .*states"):
        tier.put(make_key(1), make_states(1))


def test_a_blob_that_cannot_be_deleted_is_still_counted(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tier.put(make_key(1), make_states(1))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreUnwritable, match="Read-only"):
        tier.delete(make_key(1))
    assert tier.used_bytes == used


def test_only_old_leftovers_of_writers_are_removed(tier: DiskTier) -> None:
    tier.put(make_key(1), make_states(1))
    folder = tier.path(make_key(1)).parent
    old, new = folder / "old.safetensors.1.part", folder / "new.safetensors.2.part"
    for part in (old, new):
        part.write_bytes(b"half")
    for path in (old, tier.path(make_key(1))):
        make_old(path, 1000)
    assert list(tier.keys()) == [make_key(1)], "a part is no blob"
    tier.remove_parts(900)
    assert (old.exists(), new.exists()) == (False, True)
    assert make_key(1) in tier, "a blob is no part, however old"
