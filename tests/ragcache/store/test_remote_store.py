"""A store with a remote tier: the same one for all, hanging, away or refusing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ragcache.errors import (
    RemoteMismatch,
    RemoteUnavailable,
    StoreError,
    StoreFull,
    StoreUnreadable,
    StoreUnwritable,
)
from ragcache.store import RemoteTier
from ragcache.store.verify import verify
from tests.ragcache.conftest import full_lease, make_key, make_states
from tests.ragcache.store.conftest import AWAY, Open, failing, fill, keys, nothing, sources


@pytest.fixture
def remote(tmp_path: Path) -> RemoteTier:
    return RemoteTier.open(f"file://{tmp_path / 'bucket'}")


def test_ingested_states_are_there_for_another_machine(reopen: Open, remote: RemoteTier) -> None:
    store = reopen(10, tiers=[remote])
    fill(store, 1)
    assert set(remote.keys()) == set(keys(1))
    other = reopen(10, tiers=[remote])
    other.evict(keys(1), "disk")
    with full_lease(other, keys(1), nothing) as lease:
        assert lease.source == {make_key(1): "remote"}
        assert lease.moved == {"disk": 0, "remote": make_states(1).nbytes}


def test_what_is_used_again_comes_back_to_the_disk(reopen: Open, remote: RemoteTier) -> None:
    store = reopen(1, tiers=[remote])
    fill(store, 1, 2)
    store.evict(keys(1), "disk")
    assert (sources(store, 1), sources(store, 1)) == (["remote"], ["host"])
    store.sweep()
    assert make_key(1) in set(store.disk.keys())


@pytest.mark.parametrize("failing", ["read_place", "write_place"])
def test_a_remote_that_fails_at_opening_is_used_when_it_answers(
    reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(remote, failing, AWAY)
        store = reopen(10, tiers=[remote])
        store.check_remote_again()
    fill(store, 1)
    store.check_remote_again()
    assert remote.read_place() == remote.place == store.ledger.get_fact("remote")
    fill(store, 2)
    assert make_key(2) in set(remote.keys())
    assert reopen(10, tiers=[remote]).ledger.get_fact("remote") == remote.place


def test_a_remote_that_turns_out_to_be_wrong_takes_no_states(
    reopen: Open, remote: RemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopen(10, tiers=[remote])
    wrong = RemoteTier.open(f"file://{tmp_path / 'another'}")
    wrong.write_place("its own")

    with monkeypatch.context() as patched:
        patched.setattr(wrong, "read_place", AWAY)
        store = reopen(10, tiers=[wrong])
    store.check_remote_again()
    fill(store, 1)
    assert list(wrong.keys()) == []
    assert make_key(1) in set(store.disk.keys())


@pytest.mark.parametrize("refusal", [StoreUnreadable("permission denied"), StoreFull("full")])
def test_the_upkeep_goes_on_while_a_remote_cannot_be_compared(
    reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, refusal: StoreError,
) -> None:  # fmt: skip
    monkeypatch.setattr("ragcache.store.store.SWEEP_SECONDS", 600.0)
    said: list[StoreError] = [RemoteUnavailable("away")]
    failing = "read_place" if isinstance(refusal, StoreUnreadable) else "write_place"

    def refuse(*_: object) -> None:
        raise said[-1]

    with monkeypatch.context() as patched:
        patched.setattr(remote, failing, refuse)
        store = reopen(10, tiers=[remote])
        fill(store, 1)
        store.expire(keys(1), 1.0)
        said.append(refusal)
        store.check_remote_again()
        store.check_remote_again()
        assert not store.remote_checked
        store.sweep()
        assert make_key(1) not in set(store.disk.keys())
    assert caplog.text.count(str(refusal)) == 1
    store.check_remote_again()
    assert remote.read_place() == remote.place == store.ledger.get_fact("remote")


def test_the_upkeep_does_not_wait_for_a_remote_that_hangs(
    reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        answers.wait(20)
        raise RemoteUnavailable("away")

    swept = threading.Event()
    monkeypatch.setattr("ragcache.store.store.SWEEP_SECONDS", 0.001)
    monkeypatch.setattr(remote, "read_place", AWAY)
    store = reopen(10, tiers=[remote])
    monkeypatch.setattr(remote, "read_place", hang)
    try:
        assert asked.wait(10)
        monkeypatch.setattr(store.memory, "forget_expirations", lambda _: swept.set())
        assert swept.wait(10)
    finally:
        answers.set()


def test_another_remote_is_refused_and_nothing_is_changed(
    reopen: Open, remote: RemoteTier, tmp_path: Path
) -> None:
    store = reopen(10, tiers=[remote])
    fill(store, 1, 2, 3)
    for name, there in (("unmounted", "none"), ("another", "'its own'")):
        wrong = RemoteTier.open(f"file://{tmp_path / name}")
        if name == "another":
            wrong.write_place("its own")
        with pytest.raises(RemoteMismatch, match=f"has {there} in its file 'place'"):
            reopen(10, tiers=[wrong])
    assert store.ledger.keys("remote") == set(keys(1, 2, 3))
    assert reopen(10, tiers=[remote]).ledger.get_fact("remote") == remote.read_place()


def test_a_remote_that_cannot_be_written_is_read_as_it_is(
    reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = failing(StoreUnwritable("the remote is mounted for reading"))
    monkeypatch.setattr(remote, "write_place", refuse)
    store = reopen(10, tiers=[remote])
    fill(store, 1)
    assert sources(store, 1) == ["host"]
    assert remote.place == ""


def test_a_remote_whose_mount_goes_away_keeps_its_rows(
    reopen: Open, remote: RemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen(10, tiers=[remote])
    fill(store, 1)
    for tier in ("host", "disk"):
        store.evict(keys(1), tier)
    (tmp_path / "bucket").rename(tmp_path / "away")
    monkeypatch.setattr("ragcache.store.tiers.remote._CHECKED_SECONDS", -1.0)
    assert sources(store, 1) == ["encoded"]
    fill(store, 2)
    assert store.ledger.keys("remote") == set(keys(1))
    assert verify(store).found[0].kind == "unreadable"
    (tmp_path / "away").rename(tmp_path / "bucket")
    assert set(remote.keys()) == set(keys(1))


def test_an_unreachable_remote_costs_an_encoding(
    reopen: Open, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen(10, tiers=[remote])
    fill(store, 1)
    store.evict(keys(1), "host")
    store.evict(keys(1), "disk")
    with monkeypatch.context() as patched:
        patched.setattr(remote, "get", AWAY)
        patched.setattr(remote, "put", AWAY)
        assert sources(store, 1) == ["encoded"]
        fill(store, 2)
    assert store.counters.unreadable == 2
    assert make_key(2) in set(store.disk.keys())
