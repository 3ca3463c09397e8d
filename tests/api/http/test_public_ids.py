"""Tenants: ids, cursors and keys show one nothing of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from tests.api.http.asgi import events, listed
from tests.api.http.conftest import LEAVE, client_of
from tests.conftest import write_notes


@pytest.fixture(scope="module")
def two(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, RagCache, dict[str, str]]]:
    """A service in which `red` has three documents, each its own job, and headers of red."""
    with RagCache.open(tmp_path_factory.mktemp("numbers") / "state", quick_reader) as rag:
        for name in "abc":
            rag.within("red").ingest("notes", [SourceDocument(name, f"The leaf {name} is red.")])
        with client_of(rag) as client:
            secret = rag.keys.create("red", role="admin", namespace="red")[1]
            yield client, rag, {"Authorization": f"Bearer {secret}"}


def test_pages_and_things_are_reached_by_the_ids_that_are_told(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    tenant = rag.within("red")
    jobs = listed(client, "/v1/jobs", red)
    assert [each["id"] for each in jobs] == [r.public_id for r in tenant.jobs.list().items]
    assert client.get(f"/v1/jobs/{jobs[0]['id']}", headers=red).json() == jobs[0]
    stream = client.get(f"/v1/jobs/{jobs[0]['id']}", headers={**red, "Accept": "text/event-stream"})
    assert events(stream.text)[-1][1]["id"] == jobs[0]["id"]
    for sort in ("id", "name", "hits", "used_at"):
        modules = listed(client, "/admin/modules", red, sort=sort)
        assert {each["name"] for each in modules} == {"a#1", "b#1", "c#1"}
    [found] = [each["id"] for each in modules if each["name"] == "a#1"]
    one = client.get(f"/admin/modules/{found}", headers=red).json()
    assert (one["id"], one["name"]) == (found, "a#1")
    done = client.post(f"/admin/modules/{one['id']}/pin", headers=red)
    assert done.json()["changes"]
    client.delete(f"/admin/modules/{one['id']}", headers=red)
    left = listed(client, "/admin/evictions", red)
    assert [each["id"] for each in left] == [r.public_id for r in tenant.modules.evictions().items]


def test_neither_ids_nor_cursors_hold_what_the_ledger_counts(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    operator = {"Authorization": f"Bearer {rag.keys.create('operator', role='admin')[1]}"}
    rag.ingest("own", [SourceDocument(name, f"The leaf {name} is green.") for name in "xy"])
    rag.ingest("more", [SourceDocument("z", "The leaf z is green.")])
    for headers in (red, operator):
        jobs, modules = (
            client.get(path, params={"limit": 1}, headers=headers).json()
            for path in ("/v1/jobs", "/admin/modules")
        )
        assert len(jobs["items"][0]["id"]) == len(modules["items"][0]["id"]) == 16
        assert (jobs["next"], modules["next"]) == (jobs["items"][0]["id"], "1")
        theirs = {"cursor": jobs["next"]}
    refused = client.get("/v1/jobs", params=theirs, headers=red)
    assert refused.status_code == 400, "of another namespace"


def test_an_id_that_nothing_has_is_told_as_it_was_sent(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, _, red = two
    for path, said in (("/v1/jobs/1", "no job 1"), ("/admin/modules/1", "no module 1")):
        missing = client.get(path, headers=red)
        assert missing.status_code == 404
        assert missing.json()["detail"] == f"there is {said}"


def test_ids_of_the_ledger_are_no_public_ids(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    tenant = rag.within("red")
    job, module = tenant.jobs.list().items[0], tenant.modules.page().items[0]
    assert tenant.jobs.get(job.id) == tenant.jobs.get(job.public_id) == job
    assert tenant.modules.get(module.id) == tenant.modules.get(module.public_id)
    for path in (f"/v1/jobs/{job.id}", f"/admin/modules/{module.id}"):
        assert client.get(path, headers=red).status_code == 404


@pytest.fixture(scope="module")
def tenants(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, dict[str, str], dict[str, str]]]:
    """A service in which `red` has the notes, and the headers of administrators of red and blue."""
    folder = tmp_path_factory.mktemp("two")
    with RagCache.open(folder / "state", quick_reader) as rag, client_of(rag) as client:
        rag.within("red").ingest("notes", write_notes(folder / "notes"))
        headers = [
            {"Authorization": f"Bearer {rag.keys.create(name, role='admin', namespace=name)[1]}"}
            for name in ("red", "blue")
        ]
        yield client, headers[0], headers[1]


def test_lists_of_one_are_empty_for_the_other(
    tenants: tuple[TestClient, dict[str, str], dict[str, str]],
) -> None:
    client, red, blue = tenants
    text = "<schema name='s'><module name='a'>b</module></schema>"
    client.post("/v1/schemas", json={"text": text}, headers=red)
    client.post("/v1/answers", json={"question": LEAVE, "collection": "notes"}, headers=red)
    for path in ("/v1/collections", "/v1/schemas", "/admin/modules", "/admin/schemas", "/v1/jobs"):
        assert client.get(path, headers=red).json()["items"], path
        other = client.get(path, headers=blue).json()
        assert other["items"] == [], path
        assert not other["total"], path
    assert client.get("/admin/requests", headers=blue).json()["recent"] == []
    stats = client.get("/admin/stats", headers=blue).json()
    assert stats["collections"] == {}
    assert stats["requests"]["finished"] == 0
    assert stats["tokens"] == {}


def test_things_of_one_do_not_exist_for_the_other(
    tenants: tuple[TestClient, dict[str, str], dict[str, str]],
) -> None:
    client, red, blue = tenants
    number = client.get("/admin/modules", headers=red).json()["items"][0]["id"]
    job = client.get("/v1/jobs", headers=red).json()["items"][0]["id"]
    for method, path, body in (
        ("GET", f"/admin/modules/{number}", None), ("DELETE", f"/admin/modules/{number}", None),
        ("POST", f"/admin/modules/{number}/pin", None),
        ("POST", f"/admin/modules/{number}/expire", {"seconds": 1}),
        ("GET", f"/v1/jobs/{job}", None),
        ("GET", "/v1/collections/notes/documents", None),
        ("DELETE", "/v1/collections/notes/documents/keys.md", None),
        ("POST", "/v1/answers", {"question": LEAVE, "collection": "notes"}),
        ("POST", "/admin/evict", {"collection": "notes"}), ("DELETE", "/v1/schemas/s", None),
    ):  # fmt: skip
        refused = client.request(method, path, json=body, headers=blue)
        assert refused.status_code == 404, (path, refused.text)
        assert "leave.md" not in refused.text
