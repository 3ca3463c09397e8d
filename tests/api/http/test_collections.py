"""Collections and pages of documents: made, listed along the index, and deleted."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument

LONG = "質" * 330  # as many bytes as an id of a thousand letters


def test_a_collection_is_made_empty_and_deleted_with_its_row(client: TestClient) -> None:
    made = client.post("/v1/collections", json={"name": "bare"})
    assert (made.status_code, made.json()) == (201, {"name": "bare", "created": True})
    again = client.post("/v1/collections", json={"name": "bare"})
    assert (again.status_code, again.json()["created"]) == (200, False)
    listed = {each["name"]: each for each in client.get("/v1/collections").json()["items"]}
    assert listed["bare"] == {"name": "bare", "documents": 0, "modules": 0}
    assert client.get("/v1/collections/bare/documents").json()["total"] == 0
    assert client.delete("/v1/collections/bare").json() == {"deleted": 0}
    names = [each["name"] for each in client.get("/v1/collections").json()["items"]]
    assert "bare" not in names
    assert client.delete("/v1/collections/bare").status_code == 404


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 201, "a\nb", "\x7f"])
def test_names_that_no_path_holds_name_nothing(client: TestClient, name: str) -> None:
    assert client.post("/v1/collections", json={"name": name}).status_code == 422


@pytest.mark.parametrize("name", ["a/b", ".", "..", "x" * 250])
def test_a_schema_that_could_not_be_reached_is_not_stored(client: TestClient, name: str) -> None:
    text = f"<schema name='{name}'><module name='a'>Some words.</module></schema>"
    refused = client.post("/v1/schemas", json={"text": text})
    assert refused.status_code == 422, refused.text
    assert refused.json()["type"] == "urn:ragcache:problem:unusable-name"
    assert name not in [each["name"] for each in client.get("/v1/schemas").json()["items"]]


@pytest.mark.parametrize("name", ["...", ".hidden", "..a", "x" * 200, "Bücher & mehr"])
def test_odd_names_that_a_path_holds_are_reached(client: TestClient, name: str) -> None:
    text = f"<schema name='{name.replace('&', '&amp;')}'><module name='a'>Words.</module></schema>"
    assert client.post("/v1/schemas", json={"text": text}).json()["name"] == name
    path = f"/v1/schemas/{name.replace('&', '%26')}"
    assert client.get(path).json()["text"] == text
    assert client.delete(path).status_code == 200


def test_cursors_of_long_names_lead_on(client: TestClient, rag: RagCache) -> None:
    ids = [f"{n}{LONG}" for n in range(3)]
    rag.ingest("long", [SourceDocument(name, f"Paper {name[0]}.") for name in ids])
    for path, name, query in (
        ("/v1/collections/long/documents", "id", {}),
        ("/admin/modules", "document", {"collection": "long", "sort": "name"}),
    ):
        seen: list[str] = []
        page: dict[str, Any] = {"next": None}
        while len(seen) < 9 and (not seen or page["next"]):
            cursor = {"cursor": page["next"]} if page["next"] else {}
            answer = client.get(path, params={**query, "limit": 1, **cursor})
            assert answer.status_code == 200, answer.text
            page = answer.json()
            seen += [each[name] for each in page["items"]]
        assert seen == ids, path


def test_no_page_and_no_document_reads_the_others(client: TestClient, rag: RagCache) -> None:
    rag.ingest("many", [SourceDocument(f"d{n:02}", f"Leaf {n}.") for n in range(30)])
    read: list[str] = []

    def note(target: Any, _: Any) -> None:
        read.append(target.source_id)

    from ragcache.db.tables import DocumentTable

    event.listen(DocumentTable, "load", note)
    try:
        one = client.get("/v1/collections/many/documents/d07").json()
        assert (one["id"], one["modules"], read) == ("d07", 1, ["d07"])
        read.clear()
        page = client.get("/v1/collections/many/documents", params={"limit": 3}).json()
        assert [each["id"] for each in page["items"]] == ["d00", "d01", "d02"]
        assert len(read) == 4, "those of the page, and one that tells whether more follow"
        assert page["total"] == 30
    finally:
        event.remove(DocumentTable, "load", note)


def test_collections_are_listed_in_pages(client: TestClient) -> None:
    names = [f"page {n}" for n in range(3)]
    for name in names:
        client.post("/v1/collections", json={"name": name})
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while query:
        page = client.get("/v1/collections", params=query).json()
        seen += [each["name"] for each in page["items"]]
        query = {"limit": 2, "cursor": page["next"]} if page["next"] else {}
    assert seen == sorted(seen)
    assert set(names) <= set(seen)
    assert client.get("/v1/collections?cursor=zz").status_code == 400
