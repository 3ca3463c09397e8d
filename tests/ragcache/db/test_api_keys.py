"""API keys: secrets that are kept nowhere, checks that read no row."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event, select

from ragcache.db import ApiKeys, Database
from ragcache.db.tables import ApiKeyTable
from ragcache.errors import ConfigurationError, LedgerUnavailable, UnknownKey


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(database: Database, clock: Clock) -> ApiKeys:
    return ApiKeys(database, clock)


def test_a_secret_finds_its_key_and_is_kept_nowhere(keys: ApiKeys, database: Database) -> None:
    assert not keys.any()
    made, secret = keys.create("page", role="admin", namespace="tenant-2")
    assert keys.list()[0].last_used is None
    assert secret.startswith("rc-")
    assert len(secret) >= 3 + 43, "256 bits"
    found = keys.check(secret).key
    assert found is not None
    assert (found.id, found.role, found.namespace) == (made.id, "admin", "tenant-2")
    assert keys.any()
    assert keys.list()[0].last_used is not None
    for wrong in ("", "rc-", secret[:-1], secret + "x", secret.lower(), "\ud800", "rc-é"):
        assert keys.check(wrong).key is None
    with database.reading() as session:
        [row] = session.scalars(select(ApiKeyTable))
    assert secret not in [str(value) for value in vars(row).values()]
    assert secret.startswith(row.prefix)
    assert len(row.prefix) < 10


def test_a_secret_from_elsewhere_makes_one_key(keys: ApiKeys) -> None:
    secret = "rc-" + "Ab1-" * 10
    made = keys.register("operator", secret, role="admin")
    assert keys.check(secret).key is not None
    assert keys.register("again", secret).model_dump() == made.model_dump()
    assert [row.name for row in keys.list()] == ["operator"]
    keys.revoke(made.id)
    with pytest.raises(ConfigurationError, match="revoked"):
        keys.register("operator", secret, role="admin")
    for unusable in ("", "rc-" + "a" * 31, "rc-" + "a" * 201, "sk-" + "a" * 40, "rc-" + "é" * 40):
        with pytest.raises(ConfigurationError, match="32 to 200"):
            keys.register("operator", unusable)


def test_a_check_reads_no_row_for_ten_seconds(
    keys: ApiKeys, database: Database, clock: Clock
) -> None:
    _, secret = keys.create("page")
    assert keys.check_in_memory(secret) is None, "nothing was read yet"
    assert keys.check("rc-never made").key is None
    judged = keys.check(secret)
    assert judged.exist
    assert judged.key is not None
    seen: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    for number in range(100):
        assert keys.check(secret) == keys.check_in_memory(secret) == judged
        assert keys.check(f"rc-{number}").key is None
        assert keys.check_in_memory(f"rc-{number}") is not None
        assert keys.any()
    clock.now += 5
    assert keys.check_in_memory(secret) == judged
    assert keys.check_in_memory("rc-unknown") is None, "another process may have made it"
    assert keys.check_in_memory("no key at all") is not None
    assert not seen
    _, theirs = ApiKeys(database).create("page")
    seen.clear()
    assert keys.check(theirs).key is not None, "an unknown secret is looked up again"
    assert seen
    clock.now += 11
    assert keys.check_in_memory(secret) is None


def test_a_key_of_another_process_opens_at_once(
    keys: ApiKeys, database: Database, clock: Clock
) -> None:
    """Keys that were just read do not keep a new one out: a gateway and its replicas share keys."""
    _, first = keys.create("page")
    assert keys.check(first).key is not None
    clock.now += 0.1
    _, theirs = ApiKeys(database).create("page")
    assert keys.check_in_memory(theirs) is None
    assert keys.check(theirs).key is not None


@pytest.mark.parametrize("before", ["", "rc-unknown"])
def test_the_first_key_of_another_process_opens_at_once(
    keys: ApiKeys, database: Database, before: str
) -> None:
    """Its holder was served as an operator, because the service seemed to have no key."""
    assert not keys.check(before).exist
    _, theirs = ApiKeys(database).create("page")
    assert keys.check(theirs).key is not None


def test_what_may_be_the_first_key_is_not_served_unread(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the ledger is away its holder, a user, was served as an operator."""
    keys = ApiKeys(database, clock, stale_seconds=60)
    assert not keys.any()
    _, theirs = ApiKeys(database).create("page")

    def fail() -> None:
        raise LedgerUnavailable("away")

    with monkeypatch.context() as away:
        away.setattr(database, "reading", fail)
        for seconds in (0.5, 20):
            clock.now = seconds
            with pytest.raises(LedgerUnavailable, match="not read of any key"):
                keys.check(theirs)
            for secret in ("", "sk-of-another-service"):
                assert not keys.check(secret).exist, "this machine's own service goes on"
        clock.now = 61
        with pytest.raises(LedgerUnavailable, match="away"):
            keys.check("")
    judged = keys.check(theirs)
    assert judged.key is not None
    assert judged.key.role == "user"
    assert keys.check("").key is None
    assert keys.check("").exist, "and nobody gets in without a key now"


def test_requests_without_a_key_do_not_keep_a_new_one_out(
    keys: ApiKeys, database: Database
) -> None:
    keys.create("page")
    assert keys.check("").key is None
    _, theirs = ApiKeys(database).create("page")
    assert keys.check(theirs).key is not None


def test_a_revoked_key_is_refused_at_once_and_by_others_soon(
    keys: ApiKeys, database: Database, clock: Clock
) -> None:
    made, secret = keys.create("page")
    other = ApiKeys(database, clock)
    assert other.check(secret).key is not None
    keys.revoke(made.id)
    assert keys.check(secret).key is None
    assert other.check(secret).key is not None, "its keys are as they were read"
    clock.now = 10.1
    assert other.check(secret).key is None
    assert keys.any(), "nobody gets in without a key now"
    assert [row.revoked_at is None for row in keys.list()] == [False]
    with pytest.raises(UnknownKey, match="no key 99"):
        keys.revoke(99)


@pytest.mark.parametrize(
    ("name", "role", "namespace", "message"),
    [
        ("page", "root", "default", "role is .root.; it must be .user. or .admin."),
        (" ", "user", "default", "needs a name"),
        ("x" * 101, "user", "default", "needs a name"),
        ("page", "user", "a b", "cannot name a namespace"),
    ],
)
def test_invalid_arguments_are_refused(
    keys: ApiKeys, name: str, role: str, namespace: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        keys.create(name, role=role, namespace=namespace)
    assert keys.list() == []


def test_concurrent_checks_of_an_unknown_secret_share_a_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any key, a check needs a read that began after it, and not a read of its own."""
    entered: list[float] = []

    def clock() -> float:
        entered.append(time.monotonic())
        return entered[-1]

    keys = ApiKeys(database, clock)
    read, reads = keys._read, []

    def count() -> Any:
        reads.append(1)
        return read()

    monkeypatch.setattr(keys, "_read", count)
    with ThreadPoolExecutor(8) as threads:
        with keys._lock:  # all wait for it
            checks = [threads.submit(keys.check, "rc-unknown") for _ in range(8)]
            while len(entered) < 8:
                time.sleep(0.001)
        assert not any(each.result().exist for each in checks)
    assert len(reads) == 1
    keys.check("rc-unknown")
    assert len(reads) == 2, "it may belong to a key that was made since"
