"""Documents over the wire: forms, JSON, and what is too large to be read."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from tests.api.http.conftest import LEAVE
from tests.api.http.events import events
from tests.api.http.server_process import Started

PATH = "/v1/collections/sent/documents"


def ended(client: TestClient, location: str) -> dict[str, Any]:
    """A job's end, as its events tell it."""
    response = client.get(location, headers={"Accept": "text/event-stream"})
    told = events(response.text)
    assert {name for name, _ in told} == {"progress"}
    final: dict[str, Any] = told[-1][1]
    return final


def test_files_become_documents(client: TestClient, rag: RagCache) -> None:
    files = [
        ("files", ("sub/boat.md", b"# Boat\n\nThe boat is blue.", "text/markdown")),
        ("files", ("quay.txt", "\ufeffThe quay is long.".encode(), "text/plain")),
    ]
    response = client.post(PATH, files=files)
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    final = ended(client, response.headers["location"])
    assert final["status"] == "done"
    assert final["done"] == final["total"] == 2
    told = client.get(PATH).json()
    assert [each["id"] for each in told["items"]] == ["quay.txt", "sub/boat.md"]
    assert told["total"] == 2
    one = client.get(f"{PATH}/sub/boat.md").json()
    assert one["modules"] == 1
    assert client.delete(f"{PATH}/sub/boat.md").json() == {"deleted": 1}
    assert client.delete(f"{PATH}/sub/boat.md").status_code == 404
    names = {each["name"]: each for each in client.get("/v1/collections").json()["items"]}
    assert names["sent"]["documents"] == names["sent"]["modules"] == 1
    assert client.delete("/v1/collections/sent").json() == {"deleted": 1}


def test_json_documents_carry_metadata_that_filters_find(client: TestClient) -> None:
    sent = {"documents": [{"id": f"n{n}", "text": f"{LEAVE} {n}", "metadata": {"n": n}}
                          for n in range(3)]}  # fmt: skip
    made = client.post("/v1/collections/json/documents", json=sent)
    assert ended(client, made.headers["location"])["status"] == "done"
    body = {"question": LEAVE, "collection": "json", "filters": {"n": {"$gte": 2}}, "max_tokens": 1}
    told = client.post("/v1/answers", json=body).json()
    assert [source["document"] for source in told["sources"]] == ["n2"]
    odd = client.post("/v1/answers", json={**body, "filters": {"n": {"$odd": 2}}})
    assert odd.status_code == 400


def test_an_idempotency_key_makes_one_job_of_two_requests(client: TestClient) -> None:
    body = {"documents": [{"id": "a", "text": "The lamp is green."}]}
    headers = {"Idempotency-Key": "first"}
    path = "/v1/collections/again/documents"
    first, second = (client.post(path, json=body, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    ended(client, first.headers["location"])
    other = client.post(path, json={"documents": [{"id": "b", "text": "x"}]}, headers=headers)
    assert other.status_code == 409


def test_pages_of_documents_follow_each_other(client: TestClient) -> None:
    sent = {"documents": [{"id": f"p{n}", "text": f"Page {n}."} for n in range(5)]}
    made = client.post("/v1/collections/pages/documents", json=sent)
    ended(client, made.headers["location"])
    seen, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = client.get("/v1/collections/pages/documents", params=query).json()
        seen += [each["id"] for each in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [f"p{n}" for n in range(5)]


def test_jobs_are_listed_the_newest_first(client: TestClient) -> None:
    sent = {"documents": [{"id": "j", "text": "A job."}]}
    numbers = []
    for _ in range(2):
        made = client.post("/v1/collections/jobs/documents", json=sent)
        ended(client, made.headers["location"])
        numbers.append(made.json()["id"])
    page = client.get("/v1/jobs", params={"limit": 1}).json()
    assert [each["id"] for each in page["items"]] == numbers[1:]
    following = client.get("/v1/jobs", params={"limit": 1, "cursor": page["next"]}).json()
    assert [each["id"] for each in following["items"]] == numbers[:1]


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ([("files", ("a.bin", b"a\0b", "text/plain"))], 422),
        ([("files", ("a.txt", b"\xff\xfe\xfa", "text/plain"))], 422),
        ([("files", ("a.txt", b"", "text/plain"))], 422),
        ([("files", ("a.txt", b"x", "text/plain")), ("files", ("a.txt", b"y", "text/plain"))], 422),
        ([("files", (None, b"no file"))], 400),
    ],
)
def test_files_that_cannot_be_read_are_refused_at_once(
    client: TestClient, files: Any, status: int
) -> None:
    assert client.post(PATH, files=files).status_code == status


@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_gigabyte_is_refused_before_it_is_read(server: Started, declared: bool) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    length = "Content-Length: 1073741824" if declared else "Transfer-Encoding: chunked"
    head += f"Content-Type: application/json\r\n{length}\r\n\r\n"
    block = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", server.port), 30) as link:
        link.sendall(head.encode())
        if declared:
            answer = link.recv(4096)
        while not answer and sent < 2**30:
            link.settimeout(30)
            with suppress(ConnectionError):  # what was answered before can still be read
                link.sendall(block)
            sent += len(block)
            link.settimeout(0.001)
            with suppress(TimeoutError):
                answer = link.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413"), answer
    assert sent <= 2**27, "the limit, and what was under way"
