"""Namespaces over HTTP: operators list and delete them, and their callers are cut off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import NamespaceDeleted
from ragcache.models import LoadedModel
from ragcache.params import KeyParams
from ragcache_api.http.auth import Caller
from ragcache_api.http.service import RequestContext
from tests.api.http.conftest import client_of
from tests.api.http.test_auth import bearer

LAB = "/admin/namespaces/lab"
DOCUMENT = {"id": "key", "text": "The spare key hangs in the red cupboard of the boathouse."}


@pytest.fixture
def client(tmp_path: Path, quick_reader: LoadedModel) -> Iterator[TestClient]:
    with RagCache.open(tmp_path / "state", quick_reader) as rag, client_of(rag) as made:
        yield made


@pytest.fixture
def operator(client: TestClient) -> dict[str, str]:
    made = client.post("/admin/keys", json={"name": "ada", "role": "admin"})
    return bearer(made.json()["secret"])


def key_of(client: TestClient, operator: dict[str, str], **options: Any) -> dict[str, str]:
    body = {"name": "lab", "namespace": "lab", **options}
    return bearer(client.post("/admin/keys", json=body, headers=operator).json()["secret"])


def ingest(client: TestClient, key: dict[str, str]) -> None:
    body = {"documents": [DOCUMENT]}
    job = client.post("/v1/collections/notes/documents", json=body, headers=key)
    path, deadline = f"/v1/jobs/{job.json()['id']}", time.monotonic() + 60
    while client.get(path, headers=key).json()["status"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_operator_deletes_a_namespace(client: TestClient, operator: dict[str, str]) -> None:
    key = key_of(client, operator)
    ingest(client, key)
    form: dict[str, Any] = {"files": {"file": b"text"}, "data": {"purpose": "user_data"}}
    assert client.post("/v1/files", headers=key, **form).status_code == 200
    assert client.get(LAB.rpartition("/")[0], headers=operator).json()["items"] == [
        {"name": "default"}, {"name": "lab"},
    ]  # fmt: skip
    foreseen = client.delete(LAB, params={"dry_run": True}, headers=operator).json()
    assert client.get("/v1/collections", headers=key).json()["total"] == 1
    deleted = client.delete(LAB, headers=operator)
    assert (deleted.status_code, deleted.json()) == (200, foreseen | {"dry_run": False})
    counts = ("name", "collections", "documents", "modules", "jobs", "api_keys", "objects")
    assert [foreseen[name] for name in counts] == ["lab", 1, 1, 1, 1, 1, {"file": 1}]
    assert foreseen["states"] >= 1
    assert foreseen["tiers"]["disk"] > 0
    assert client.get("/v1/collections", headers=key).status_code == 401
    again = client.delete(LAB, headers=operator)
    assert again.status_code == 404
    assert again.json()["type"] == "urn:ragcache:problem:unknown-namespace"
    new = key_of(client, operator)
    assert client.get("/v1/collections", headers=new).json()["items"] == []
    assert client.get("/v1/files", headers=new).json()["data"] == []


@pytest.mark.parametrize("role", ["admin", "user"])
def test_others_keys_see_and_delete_no_namespace(
    client: TestClient, operator: dict[str, str], role: str
) -> None:
    key = key_of(client, operator, role=role)
    for method, path in (("GET", "/admin/namespaces"), ("DELETE", LAB)):
        for query in ("", "?dry_run=true"):
            assert client.request(method, path + query, headers=key).status_code == 403
    assert client.get("/admin/namespaces", headers=operator).json()["total"] == 2


def test_the_only_keys_stay(client: TestClient, operator: dict[str, str]) -> None:
    assert client.delete("/admin/namespaces/default", headers=operator).json()["api_keys"] == 0
    assert client.get("/admin/namespaces", headers=operator).status_code == 200
    assert client.delete("/admin/namespaces/a b", headers=operator).status_code == 400


@pytest.mark.usefixtures("slow_steps")
def test_a_running_request_ends(client: TestClient, operator: dict[str, str]) -> None:
    key = key_of(client, operator)
    requests = client.app.state.service.requests  # type: ignore[attr-defined]
    messages = [{"role": "user", "content": "Count to a thousand, slowly. " * 40}]
    options = {"max_tokens": 400, "ignore_eos": True, "repetition_limit": 0}
    body = {"model": "ragcache-reader", "messages": messages, **options}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/chat/completions", json=body, headers=key)
        deadline = time.monotonic() + 60
        while not any(each.streams for each in list(requests.active.values())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.delete(LAB, headers=operator).status_code == 200
        ended = asked.result()
    assert (ended.status_code, ended.json()["error"]["code"]) == (409, "namespace_deleted")
    new = key_of(client, operator, role="admin")
    assert client.get("/admin/requests", headers=new).json() == {"running": [], "recent": []}
    assert client.get("/v1/conversations", headers=new).json() == {
        "bytes": {},
        "resumed_tokens": {},
    }
    assert client.get("/v1/responses/none", headers=new).status_code == 404


def test_a_request_that_came_before_stores_nothing(
    client: TestClient, operator: dict[str, str]
) -> None:
    key_of(client, operator)
    service = client.app.state.service  # type: ignore[attr-defined]
    caller = Caller(KeyParams(namespace="lab"), "key 2", 2)
    before = RequestContext.of(Request({"type": "http"}), service, caller)
    before.objects.add("file", {})
    assert client.delete(LAB, headers=operator).json()["objects"] == {"file": 1}
    for use in ("objects", "rag"):
        with pytest.raises(NamespaceDeleted):
            getattr(before, use)
    after = RequestContext.of(Request({"type": "http"}), service, caller)
    assert after.objects.list("file") == []
