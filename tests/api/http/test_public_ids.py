"""Ids over the wire: those of a tenant tell nothing of what others did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.db.sql import after, cursor_of
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache_api.http.cursors import CursorCipher
from tests.api.http.conftest import client_of
from tests.api.http.events import events

CIPHER = CursorCipher(b"k" * 32)


@given(st.lists(st.integers(0, 2**63 - 1) | st.text() | st.none(), min_size=1))
def test_an_encrypted_cursor_leads_back_in_its_namespace_alone(place: list[Any]) -> None:
    kept = cursor_of(*place)
    told = CIPHER.encrypt(kept, "red")
    assert CIPHER.decrypt(told, "red") == kept
    assert CIPHER.encrypt(kept, "red") != told, "equal places look unlike"
    for namespace, cursor in (("blue", told), ("red", kept), ("red", told[:-8]), ("red", "é")):
        with pytest.raises(InvalidRequest, match="begin without a cursor"):
            CIPHER.decrypt(cursor, namespace)


@pytest.fixture(scope="module")
def two(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, RagCache, dict[str, str]]]:
    """A service in which `red` has three documents, each its own job, and headers of red."""
    with RagCache.open(tmp_path_factory.mktemp("numbers") / "state", reader) as rag:
        for name in "abc":
            rag.within("red").ingest("notes", [SourceDocument(name, f"The leaf {name} is red.")])
        with client_of(rag) as client:
            secret = rag.keys.create("red", "admin", "red")[1]
            yield client, rag, {"Authorization": f"Bearer {secret}"}


def listed(client: TestClient, path: str, headers: dict[str, str], **query: Any) -> list[Any]:
    items: list[Any] = []
    query |= {"limit": 1}
    while True:
        page = client.get(path, params=query, headers=headers).json()
        items += page["items"]
        if page["next"] is None:
            return items
        query["cursor"] = page["next"]


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
    for sort in ("id", "name", "hits", "last_use"):
        modules = listed(client, "/admin/modules", red, sort=sort)
        assert {each["name"] for each in modules} == {"a#1", "b#1", "c#1"}
    one = client.get(f"/admin/modules/{modules[0]['id']}", headers=red).json()
    assert (one["id"], one["name"]) == (modules[0]["id"], modules[0]["name"])
    done = client.post(f"/admin/modules/{one['id']}/pin", headers=red)
    assert done.json()["changes"]
    client.delete(f"/admin/modules/{one['id']}", headers=red)
    left = listed(client, "/admin/evictions", red)
    assert [each["id"] for each in left] == [r.public_id for r in tenant.evictions().items]


def test_neither_ids_nor_cursors_hold_what_the_ledger_counts(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    operator = {"Authorization": f"Bearer {rag.keys.create('operator', 'admin')[1]}"}
    rag.ingest("own", [SourceDocument(name, f"The leaf {name} is green.") for name in "xy"])
    rag.ingest("more", [SourceDocument("z", "The leaf z is green.")])
    for headers in (red, operator):
        for path in ("/v1/jobs", "/admin/modules", "/admin/modules?sort=last_use"):
            page = client.get(path, params={"limit": 1}, headers=headers).json()
            assert all(len(each["id"]) == 16 for each in page["items"])
            with pytest.raises(InvalidRequest):
                after(page["next"], object)
    assert client.get("/v1/jobs", params={"cursor": cursor_of(3)}, headers=red).status_code == 400


def test_a_tenant_sorts_by_the_last_use_and_is_not_told_it(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    tenant = rag.within("red")
    for name in "cab":
        tenant.ask(f"What of leaf {name}?", collection="notes", k=1)
        rag.internals.shared.store.ledger.flush()
    wanted = [each.name for each in tenant.modules.page(sort="last_use", descending=True).items]
    modules = listed(client, "/admin/modules", red, sort="last_use", descending=True)
    assert [each["name"] for each in modules] == wanted
    assert {each["last_use"] for each in modules} == {None}
    one = client.get(f"/admin/modules/{modules[0]['id']}", headers=red).json()
    assert {state["last_use"] for state in (one, *one["states"])} == {None}
    assert len(one["states"]) > 0


def test_a_new_job_is_told_with_its_own_id(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    client, rag, red = two
    sent = {"documents": [{"id": "d", "text": "The leaf d is red."}]}
    made = client.post("/v1/collections/more/documents", json=sent, headers=red)
    assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
    assert rag.within("red").jobs.wait(made.json()["id"], 20).status == "done"


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


def test_the_key_of_cursors_is_the_ledgers(
    two: tuple[TestClient, RagCache, dict[str, str]],
) -> None:
    _, rag, _ = two
    told = CursorCipher.of(rag).encrypt(cursor_of(7), "red")
    assert CursorCipher.of(rag).decrypt(told, "red") == cursor_of(7)
