"""Users pin documents of their own; operators see and end the pins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of

BOATS = {"collection": "boats", "documents": ["pipit"]}


@pytest.fixture(scope="module")
def rag(tiny_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    folder = tmp_path_factory.mktemp("pins")
    with RagCache.open(folder, tiny_reader, embedding="none") as opened:
        documents = [SourceDocument(name, f"The boat {name} is red.") for name in ("pipit", "wren")]
        opened.ingest("boats", documents)
        yield opened


@pytest.fixture(scope="module")
def client(rag: RagCache) -> Iterator[TestClient]:
    with client_of(rag) as made:
        operator = made.post("/admin/keys", json={"name": "operator", "role": "admin"}).json()
        made.headers["Authorization"] = f"Bearer {operator['secret']}"
        yield made


def user(client: TestClient, name: str, pin_bytes: int) -> dict[str, str]:
    made = client.post("/admin/keys", json={"name": name, "pin_bytes": pin_bytes}).json()
    assert made["pin_bytes"] == pin_bytes
    return {"Authorization": f"Bearer {made['secret']}"}


def test_a_user_pins_within_the_budget_of_its_key(client: TestClient) -> None:
    ada, bob = user(client, "ada", 10**9), user(client, "bob", 0)
    made = client.post("/v1/pins", headers=ada, json=BOATS | {"seconds": 600})
    assert made.status_code == 201
    pin = made.json()
    assert pin["bytes"] > 0
    assert pin["expires_at"] > pin["created_at"]
    refused = client.post("/v1/pins", headers=bob, json=BOATS)
    assert refused.status_code == 409
    assert refused.json()["type"] == "urn:ragcache:problem:pin-budget-exceeded"
    assert client.get("/v1/pins", headers=ada).json()["items"] == [pin]
    assert client.get("/v1/pins", headers=bob).json()["items"] == []
    assert client.delete(f"/v1/pins/{pin['id']}", headers=bob).status_code == 404
    assert client.get("/admin/pins", headers=ada).status_code == 403
    assert client.delete(f"/v1/pins/{pin['id']}", headers=ada).json() == {"deleted": 1}


def test_an_operator_sees_and_ends_pins(client: TestClient, rag: RagCache) -> None:
    ada = user(client, "ada", 10**9)
    pin = client.post("/v1/pins", headers=ada, json=BOATS).json()
    assert client.get("/admin/pins").json()["items"] == [pin]
    assert client.delete(f"/admin/pins/{pin['id']}").json() == {"deleted": 1}
    assert client.get("/admin/pins").json()["items"] == []
    assert not any(each.pinned for each in rag.modules.all("boats"))
