"""The remote tier: shared, slow, broken or away, and never wrong nor endless."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ragcache.errors import (
    ConfigurationError,
    MissingExtra,
    RemoteUnavailable,
    StateCorrupt,
    StateMissing,
    StoreFull,
    StoreUnreadable,
    StoreUnwritable,
)
from ragcache.store.tiers import RemoteTier, RetryPolicy
from ragcache.store.tiers.remote import RemoteCalls
from tests.ragcache.conftest import make_key, make_states, same

PATIENT = RetryPolicy(seconds=5.0, attempts=3, pause=0.0, rest=0.0)


class Flaky:
    """A memory file system whose operations fail as often as they are told to."""

    protocol = "memory"

    def __init__(self, error: BaseException, failures: int) -> None:
        self._files = MemoryFileSystem()
        self.error, self.failures, self.calls = error, failures, 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._files, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.failures > 0:
                self.failures -= 1
                raise self.error
            return operation(*arguments, **options)

        return call


def flaky(error: BaseException, failures: int, root: str, **changes: Any) -> RemoteTier:
    return RemoteTier(Flaky(error, failures), root, retry=RetryPolicy(**{
        "seconds": 5.0, "attempts": 3, "pause": 0.0, "rest": 0.0, **changes,
    }))  # fmt: skip


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"/{request.node.name}"


def test_machines_see_what_others_write_and_delete(root: str) -> None:
    here, there = (RemoteTier.open(f"memory://{root}", retry=PATIENT) for _ in range(2))
    assert list(here.keys()) == []
    there.put(make_key(1), make_states(1, 9))
    assert make_key(1) in here
    assert same(here.get(make_key(1)), make_states(1, 9))  # type: ignore[arg-type]
    assert list(here.keys()) == list(here.scan()) == [make_key(1)]
    assert here.used_bytes == 0 < there.used_bytes, "the ledger counts what others write"
    here.delete(make_key(1))
    there.delete(make_key(1))
    assert make_key(1) not in there
    with pytest.raises(StateMissing, match=make_key(1)):
        there.get(make_key(1))


def test_on_a_file_system_no_partial_blob_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RemoteTier.open(f"file://{tmp_path}/remote", retry=PATIENT)
    seen = []
    write = tier.files.pipe_file

    def watched(path: str, blob: bytes) -> None:
        write(path, blob[: len(blob) // 2])
        seen.append(list(tier.keys()))
        write(path, blob)

    monkeypatch.setattr(tier.files, "pipe_file", watched)
    tier.put(make_key(1), make_states(1))
    assert seen == [[]]
    assert list(tier.keys()) == [make_key(1)]
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1


def test_a_damaged_object_is_never_served(root: str) -> None:
    tier = RemoteTier.open(f"memory://{root}", retry=PATIENT)
    tier.put(make_key(1), make_states(1))
    content = bytearray(tier.files.cat_file(tier.path(make_key(1))))
    content[-1] ^= 1
    tier.files.pipe_file(tier.path(make_key(1)), bytes(content))
    with pytest.raises(StateCorrupt, match=make_key(1)):
        tier.get(make_key(1))


def test_a_passing_failure_is_retried(root: str) -> None:
    tier = flaky(ConnectionResetError("reset"), 2, root)
    tier.put(make_key(1), make_states(1))
    assert same(tier.get(make_key(1)), make_states(1))  # type: ignore[arg-type]


def test_a_failure_that_stays_is_named_after_the_last_attempt(root: str) -> None:
    tier = flaky(ConnectionResetError("reset by peer"), 99, root)
    with pytest.raises(RemoteUnavailable, match=r"cannot write .* tried 3 times .reset by peer"):
        tier.put(make_key(1), make_states(1))
    assert tier.files.calls == 3
    assert tier.used_bytes == 0
    for operation in (lambda: tier.get(make_key(1)), lambda: make_key(1) in tier, tier.scan):
        with pytest.raises(RemoteUnavailable):
            operation()
    with pytest.raises(RemoteUnavailable):
        tier.delete(make_key(1))


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreUnwritable), (errno.EACCES, StoreUnwritable)],
)
def test_a_lasting_failure_is_not_tried_again(
    root: str, number: int, error: type[Exception]
) -> None:
    tier = flaky(OSError(number, os.strerror(number)), 99, root)
    with pytest.raises(error):
        tier.put(make_key(1), make_states(1))
    assert tier.files.calls == 1


def test_what_may_not_be_read_is_not_called_unwritable(root: str) -> None:
    tier = flaky(PermissionError("Forbidden"), 99, root)
    with pytest.raises(StoreUnreadable, match=r"cannot read .* Forbidden"):
        tier.get(make_key(1))
    assert tier.files.calls == 1


def test_a_remote_that_hangs_is_left_in_time_and_rests(root: str) -> None:
    stopped = threading.Event()

    class Hanging(MemoryFileSystem):
        asked = 0

        def cat_file(self, *arguments: Any, **options: Any) -> bytes:
            Hanging.asked += 1
            stopped.wait(30)
            return b""

    retry = RetryPolicy(seconds=0.05, attempts=2, pause=0.0, rest=60.0)
    tier = RemoteTier(Hanging(), root, retry=retry)
    try:
        with pytest.raises(RemoteUnavailable, match=r"tried 2 times .no answer within 0\.05 s"):
            tier.get(make_key(1))
        with pytest.raises(RemoteUnavailable, match="failed a moment ago"):
            tier.get(make_key(1))
        assert Hanging.asked == 2
    finally:
        stopped.set()


def test_after_its_rest_a_remote_is_called_again() -> None:
    now = 0.0
    calls = RemoteCalls("there", RetryPolicy(attempts=1, rest=5.0), clock=lambda: now)

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(RemoteUnavailable, match="ConnectionError"):
        calls.run("read", fail)
    now = 4.0
    with pytest.raises(RemoteUnavailable, match="tried again in 1 s"):
        calls.run("read", lambda: 1)
    now = 5.0
    assert calls.run("read", lambda: 1) == 1


def test_an_operation_may_return_nothing() -> None:
    assert RemoteCalls("there", PATIENT).run("delete", lambda: None) is None


def test_a_url_that_nothing_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="carrier-pigeon"):
        RemoteTier.open("carrier-pigeon://loft/states")


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtra, match="Install s3fs"):
        RemoteTier.open("s3://bucket/states")
