"""API keys over HTTP: who may make them, and that nobody is locked out by them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of
from tests.api.http.test_auth import bearer

ADA = {"name": "ada", "role": "admin"}


@pytest.fixture
def fresh(quick_reader: LoadedModel, tmp_path: Path) -> Iterator[TestClient]:
    """A service without keys."""
    with RagCache.open(tmp_path / "state", quick_reader) as rag, client_of(rag) as client:
        yield client


def test_a_key_shows_its_secret_once_and_is_revoked(fresh: TestClient) -> None:
    made = fresh.post("/admin/keys", json=ADA)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key = made.json()
    assert key["secret"].startswith(key["prefix"])
    assert fresh.get("/admin/keys").status_code == 401
    ada = bearer(key["secret"])
    bob = fresh.post("/admin/keys", json={"name": "bob", "namespace": "b"}, headers=ada).json()
    assert (bob["role"], bob["namespace"]) == ("user", "b")
    listed = fresh.get("/admin/keys", headers=ada).json()
    assert [(each["name"], each["current"]) for each in listed["items"]] == [
        ("ada", True), ("bob", False),
    ]  # fmt: skip
    assert bob["secret"] not in str(listed)
    assert fresh.get("/v1/collections", headers=bearer(bob["secret"])).status_code == 200
    revoked = fresh.delete(f"/admin/keys/{bob['id']}", headers=ada).json()
    assert revoked["revoked_at"] >= bob["created_at"]
    assert fresh.get("/v1/collections", headers=bearer(bob["secret"])).status_code == 401
    assert fresh.delete("/admin/keys/99", headers=ada).status_code == 404


def test_nobody_is_locked_out(fresh: TestClient) -> None:
    for first in ({"name": "ada"}, {**ADA, "namespace": "them"}):
        refused = fresh.post("/admin/keys", json=first)
        assert refused.status_code == 409
        assert refused.json()["type"] == "urn:ragcache:problem:first-key"
    assert fresh.get("/admin/keys").json()["items"] == []
    key = fresh.post("/admin/keys", json=ADA).json()
    own = fresh.delete(f"/admin/keys/{key['id']}", headers=bearer(key["secret"]))
    assert own.json()["type"] == "urn:ragcache:problem:own-key"
    assert fresh.get("/admin/keys", headers=bearer(key["secret"])).status_code == 200


def test_keys_are_the_operators(fresh: TestClient) -> None:
    ada = bearer(fresh.post("/admin/keys", json=ADA).json()["secret"])
    for role in ("admin", "user"):
        body = {"name": "them", "role": role, "namespace": "them"}
        them = bearer(fresh.post("/admin/keys", json=body, headers=ada).json()["secret"])
        assert fresh.get("/admin/keys", headers=them).status_code == 403
        assert fresh.post("/admin/keys", json=ADA, headers=them).status_code == 403
        assert fresh.delete("/admin/keys/1", headers=them).status_code == 403


@pytest.mark.parametrize("wrong", [{"name": ""}, {"role": "root"}, {"namespace": "a/b"}, {"x": 1}])
def test_what_no_key_can_be_is_refused(client: TestClient, wrong: dict[str, object]) -> None:
    assert client.post("/admin/keys", json={**ADA, **wrong}).status_code in (400, 422)
