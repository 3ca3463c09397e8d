"""Collections that travel over HTTP: downloads, uploads, and who may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of

NOTES = "/admin/collections/notes/archive"


@pytest.fixture(scope="module")
def archive(client: TestClient) -> bytes:
    response = client.get(NOTES)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-tar"
    assert response.headers["content-disposition"].endswith("filename*=UTF-8''notes.tar")
    return response.content


@pytest.fixture
def other(tmp_path: Path, quick_reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "other", quick_reader) as opened:
        yield opened


def test_a_collection_travels_between_services(
    archive: bytes, other: RagCache, tmp_path: Path
) -> None:
    with client_of(other) as client:
        url = "/admin/collections/copy/archive"
        response = client.put(url, content=archive)
        assert response.status_code == 201
        assert response.json() == {
            "collection": "copy",
            "documents": 3,
            "modules": 3,
            "states": 3,
            "known": 0,
            "encoded": 0,
            "missing": 0,
        }
        again = client.put(url, content=archive)
        assert (again.status_code, again.json()["type"]) == (
            409,
            "urn:ragcache:problem:collection-exists",
        )
        replaced = client.put(f"{url}?replace", content=iter([archive[:1000], archive[1000:]]))
        assert (replaced.status_code, replaced.json()["known"]) == (201, 3)
        jobs = client.get("/v1/jobs").json()["items"]
        assert [job["status"] for job in jobs] == ["done", "done"]
    assert {each.name for each in (tmp_path / "other").iterdir()} == {
        "ledger.sqlite",
        "ledger.sqlite-shm",
        "ledger.sqlite-wal",
        "states",
    }


def test_refusals_have_their_statuses(archive: bytes, client: TestClient, other: RagCache) -> None:
    unknown = client.get("/admin/collections/absent/archive")
    assert (unknown.status_code, unknown.json()["type"]) == (
        404,
        "urn:ragcache:problem:unknown-collection",
    )
    with client_of(other, import_bytes=len(archive) - 1) as small:
        assert small.put(NOTES, content=archive).status_code == 413
        cut = small.put(NOTES, content=archive[:-1024])
        assert (cut.status_code, cut.json()["type"]) == (
            422,
            "urn:ragcache:problem:archive-damaged",
        )
    assert other.collections.page().items == ()


def test_archives_are_for_administrators(
    archive: bytes, tmp_path: Path, quick_reader: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "keyed", quick_reader) as rag, client_of(rag) as client:
        user, tenant = (
            {"Authorization": f"Bearer {rag.keys.create(name, role=role, namespace=namespace)[1]}"}
            for name, role, namespace in (("u", "user", "default"), ("t", "admin", "tenant"))
        )
        for method in ("GET", "PUT"):
            refused = client.request(method, NOTES, headers=user, content=b"")
            assert refused.status_code == 403
        assert client.put(NOTES, headers=tenant, content=archive).status_code == 201
        assert client.get(NOTES, headers=tenant).status_code == 200
        assert rag.collections.page().items == ()
        assert rag.within("tenant").collections.page().items[0].documents == 3
