"""The log that operators read: what goes wrong, in which request, and no secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import LedgerUnavailable
from ragcache_api.http.log import KEPT, EventLog
from tests.api.http.conftest import client_of

SECRET = "rc-0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"


@pytest.fixture
def log() -> Iterator[EventLog]:
    log = EventLog()
    with log.listening():
        yield log


@pytest.fixture
def fresh(rag: RagCache) -> Iterator[TestClient]:
    with client_of(rag) as client:
        yield client


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def collection_page(*_: object) -> None:
        raise error

    monkeypatch.setattr(RagCache, "collection_page", collection_page)


def test_errors_are_found_by_the_id_of_their_request(
    fresh: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, RuntimeError("the lamp is out"))
    failed = fresh.get("/v1/collections")
    fail(monkeypatch, LedgerUnavailable("the ledger is away"))
    away = fresh.get("/v1/collections", headers={"X-Request-ID": "mine-1"})
    assert (failed.status_code, away.status_code) == (500, 503)
    assert away.headers["x-request-id"] == "mine-1"
    newest, oldest = fresh.get("/admin/log").json()["items"]
    assert (newest["request"], newest["traceback"]) == ("mine-1", "")
    assert newest["message"] == "GET /v1/collections: the ledger is away"
    assert oldest["request"] == failed.headers["x-request-id"]
    assert "RuntimeError: the lamp is out" in oldest["traceback"]
    assert newest["level"] == oldest["level"] == "error"
    assert newest["at"] >= oldest["at"] > 1e9


def test_the_log_comes_in_pages_and_by_level(fresh: TestClient) -> None:
    for number in range(5):
        logging.getLogger("ragcache.store").log(30 + 10 * (number % 2), "event %s", number)
    first = fresh.get("/admin/log", params={"limit": 3}).json()
    rest = fresh.get("/admin/log", params={"limit": 3, "cursor": first["next"]}).json()
    told = [each["message"] for each in (*first["items"], *rest["items"])]
    assert told == [f"event {number}" for number in (4, 3, 2, 1, 0)]
    assert (first["total"], rest["next"]) == (5, None)
    errors = fresh.get("/admin/log", params={"level": "error"}).json()["items"]
    assert [each["message"] for each in errors] == ["event 3", "event 1"]


def test_a_client_names_its_request_only_in_plain_letters(client: TestClient) -> None:
    names = [client.get("/health/live").headers["x-request-id"] for _ in range(2)]
    assert names[0] != names[1]
    for odd in ("x" * 65, "a b", "\u00fc"):
        told = client.get("/health/live", headers={"X-Request-ID": odd.encode()})
        assert told.headers["x-request-id"] != odd


def test_secrets_are_masked_and_room_is_bounded(log: EventLog) -> None:
    logger = logging.getLogger("ragcache.db")
    for number in range(KEPT + 1):
        logger.warning("%s of postgresql://ragcache:pass@db/x, number %s", SECRET, number)
    logger.info("nothing to read")
    try:
        raise ValueError(SECRET)
    except ValueError:
        logger.exception("x" * 9_999)
    entries = log.entries()
    assert len(entries) == KEPT
    assert entries[0].traceback.endswith("ValueError: ***\n")
    assert len(entries[0].message) == 2_000
    assert entries[1].message == f"*** of postgresql://***@db/x, number {KEPT}"
    assert [entries[0].number, entries[-1].number] == [KEPT + 2, 3]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("redis://:secret@host:6379/0", "redis://***@host:6379/0"),
        ("s3://key:a/b+c=@bucket/x is away", "s3://***@bucket/x is away"),
        ("postgresql://u:p@ss/w@rd@db/x", "postgresql://***@db/x"),
        ("redis://:a@h,postgresql://u:b@i", "redis://***@h,postgresql://***@i"),
        ("https://ghp_token@host/x is away", "https://***@host/x is away"),
        ("http://host:8000/v1 of a@b", "http://host:8000/v1 of a@b"),
        ("http://host/a@b", "http://host/a@b"),
    ],
)
def test_passwords_in_addresses_are_masked_to_the_last_character(
    log: EventLog, told: str, kept: str
) -> None:
    logging.getLogger("ragcache.db").warning("%s", told)
    assert log.entries()[0].message == kept


def test_errors_of_the_server_outside_of_requests_are_all_kept(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", False)  # as the server sets it
    for name in ("ragcache.store", "uvicorn.error", "uvicorn.error"):
        try:
            raise RuntimeError(name)
        except RuntimeError:
            logging.getLogger(name).exception("it failed")
    assert [entry.logger for entry in log.entries()] == [
        "uvicorn.error", "uvicorn.error", "ragcache.store"
    ]  # fmt: skip


def test_what_nothing_else_takes_is_written_to_standard_error_as_before(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with EventLog().listening():
        logging.getLogger("ragcache").warning("the disk is full")
    assert root.handlers == []
    assert "the disk is full" in capfd.readouterr().err
