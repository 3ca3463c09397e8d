"""Collections, documents and their jobs: created, uploaded, listed in pages, and deleted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from ragcache import GenerationParams, RagCache, SourceDocument
from ragcache.documents import ReadOptions
from ragcache.errors import LedgerUnavailable, UnknownJob
from ragcache.params import OpenConfig
from ragcache.pipeline.module_states import ModuleEncoder
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import JobResponse
from ragcache_api.http.routes import documents as routes
from tests.api.http.asgi import events, listed
from tests.api.http.conftest import LEAVE, client_of
from tests.ragcache.documents.sample_files import pdf


def test_a_collection_is_made_empty_and_deleted_with_its_row(client: TestClient) -> None:
    made = client.post("/v1/collections", json={"name": "bare"})
    assert (made.status_code, made.json()) == (201, {"name": "bare", "created": True})
    again = client.post("/v1/collections", json={"name": "bare"})
    assert (again.status_code, again.json()["created"]) == (200, False)
    listed = {each["name"]: each for each in client.get("/v1/collections").json()["items"]}
    bare = {"name": "bare", "description": "", "documents": 0, "modules": 0}
    assert listed["bare"] == bare | {"own_priming": False, "similar_priming": False}
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


@pytest.mark.slow
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


def test_lists_come_in_pages(client: TestClient) -> None:
    for name in "cab":
        client.post("/v1/collections", json={"name": f"page {name}"})
    names = [each["name"] for each in listed(client, "/v1/collections")]
    assert names == sorted(names)
    assert {"page a", "page b", "page c"} <= set(names)
    sent = {"documents": [{"id": f"p{n}", "text": f"Page {n}."} for n in range(5)]}
    made = [client.post("/v1/collections/pages/documents", json=sent) for _ in range(3)]
    for each in made:
        ended(client, each.headers["location"])
    pages = listed(client, "/v1/collections/pages/documents")
    assert [each["id"] for each in pages] == [f"p{n}" for n in range(5)]
    newest = [each.json()["id"] for each in reversed(made)]
    assert [each["id"] for each in listed(client, "/v1/jobs")][:3] == newest


def test_listings_tell_no_paths_of_the_server(client: TestClient, rag: RagCache) -> None:
    assert rag.documents.get("notes", ["leave.md"])[0].uri.startswith("file:///")
    rows = listed(client, "/v1/collections/notes/documents")
    assert all(each["uri"] == each["id"] for each in rows)
    assert client.get("/v1/collections/notes/documents/leave.md").json()["uri"] == "leave.md"
    [module] = listed(client, "/admin/modules", document="leave.md", collection="notes")
    assert client.get(f"/admin/modules/{module['id']}").json()["uri"] == "leave.md"


def test_spans_of_an_answer_point_into_the_text_of_a_document(
    client: TestClient, rag: RagCache
) -> None:
    shown = GenerationParams(min_confidence=0, max_tokens=4)
    answer = rag.ask(LEAVE, collection="notes", k=1, generation=shown)
    span = answer.spans[0]
    path = f"/v1/collections/notes/documents/{span.document}"
    assert client.get(path).json()["text"] is None
    text = client.get(path, params={"text": True}).json()["text"]
    assert "26 days" in text
    assert text[span.start : span.end] == answer.text
    assert client.get("/v1/collections/notes/documents/absent?text=true").status_code == 404


def test_a_document_tells_where_its_pages_begin(client: TestClient, rag: RagCache) -> None:
    read = client.post("/v1/collections/papers/documents", files={"files": ("a.pdf", pdf())})
    rag.jobs.wait(read.json()["id"])
    path = "/v1/collections/papers/documents/a.pdf"
    assert client.get(path).json()["pages"] is None
    document = client.get(path, params={"text": True}).json()
    [*numbers], [*starts] = zip(*((int(n), at) for n, at in document["pages"].items()), strict=True)
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 1
    assert starts == sorted(set(starts))
    plain = client.get("/v1/collections/notes/documents/leave.md", params={"text": True}).json()
    assert plain["pages"] == {}


HEADERS = {"Idempotency-Key": "herons"}
BODY = {"documents": [{"id": "q", "text": "An interrupted document about herons."}]}
PATH = "/v1/collections/birds/documents"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds encoding up until it is set."""
    opened, lease = threading.Event(), ModuleEncoder.lease

    def held(*arguments: Any, **named: Any) -> Any:
        assert opened.wait(20)
        return lease(*arguments, **named)

    monkeypatch.setattr(ModuleEncoder, "lease", held)
    yield opened
    opened.set()


def test_a_job_is_found_by_its_idempotency_key_and_canceled(
    client: TestClient, rag: RagCache, gate: threading.Event
) -> None:
    job = client.post(PATH, json=BODY, headers=HEADERS).json()["id"]
    assert client.post(PATH, json=BODY, headers=HEADERS).json()["id"] == job
    other = {"documents": [{"id": "b", "text": "x"}]}
    assert client.post(PATH, json=other, headers=HEADERS).status_code == 409
    assert client.delete(f"/v1/jobs/{job}").json()["status"] == "canceled"
    assert client.delete("/v1/jobs/nobody").status_code == 404
    gate.set()
    rag.jobs.workers.join()
    assert client.get(PATH).status_code == 404


def test_more_than_may_wait_gets_429(
    client: TestClient, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.db.jobs.MAX_JOBS", 1)
    other = {"documents": [{"id": "q", "text": "Another document about herons."}]}
    assert client.post(PATH, json=other).status_code == 202
    refused = client.post(PATH, json=BODY)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    gate.set()


def test_a_large_body_is_parsed_off_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noting(sent: type[Any]) -> Any:
        validate = sent.model_validate_json

        def noted(body: bytes) -> Any:
            seen.append(threading.current_thread().name)
            return validate(body)

        return noted

    monkeypatch.setattr(
        routes.DocumentsRequest,
        "model_validate_json",
        staticmethod(noting(routes.DocumentsRequest)),
    )
    client.post("/v1/collections/loop/documents", json=BODY)
    assert seen
    assert all("AnyIO worker" in name for name in seen), seen


UPLOADS = "/v1/collections/sent/documents"


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
    response = client.post(UPLOADS, files=files)
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    final = ended(client, response.headers["location"])
    assert final["status"] == "done"
    assert final["done"] == final["total"] == 2
    told = client.get(UPLOADS).json()
    assert [each["id"] for each in told["items"]] == ["quay.txt", "sub/boat.md"]
    assert told["total"] == 2
    one = client.get(f"{UPLOADS}/sub/boat.md").json()
    assert one["modules"] == 1
    dry = client.delete(f"{UPLOADS}/sub/boat.md", params={"dry_run": True}).json()
    assert (dry["deleted"], dry["modules"], dry["states"], dry["dry_run"]) == (1, 1, 1, True)
    assert dry["bytes"] == sum(dry["tiers"].values()) >= dry["tiers"]["disk"] > 0
    assert client.delete(f"{UPLOADS}/none.md?dry_run").status_code == 404
    whole = client.delete("/v1/collections/sent?dry_run").json()
    assert (whole["deleted"], whole["modules"], whole["states"]) == (2, 2, 2)
    some = {"id": ["sub/boat.md", "none"]}
    dry = client.delete(UPLOADS, params={**some, "dry_run": True}).json()
    assert (dry["deleted"], dry["modules"]) == (1, 1)
    assert client.delete(UPLOADS, params=some).json() == {"deleted": 1}
    assert client.delete(UPLOADS).status_code == 422
    assert client.delete(f"{UPLOADS}/sub/boat.md").status_code == 404
    assert client.delete(f"{UPLOADS}/quay.txt").json() == {"deleted": 1}
    names = {each["name"]: each for each in client.get("/v1/collections").json()["items"]}
    assert names["sent"]["documents"] == names["sent"]["modules"] == 0
    assert client.delete("/v1/collections/sent").json() == {"deleted": 0}


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({"a.pdf": b"%PDF-1.7", "b.bin": b"a\0b"}, 422), ({"a.txt": b"\xff\xfe\xfa"}, 422),
        ({"a.txt": b""}, 422), ({"a.txt": b"x", "./a.txt": b"y"}, 422), ({None: b"no file"}, 400),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused_with_reasons(
    client: TestClient, files: dict[str | None, bytes], status: int
) -> None:
    sent = [("files", (name and name.removeprefix("./"), data)) for name, data in files.items()]
    refused = client.post(UPLOADS, files=sent)
    assert refused.status_code == status
    told = {each["loc"][-1]: each["msg"] for each in refused.json().get("errors", ())}
    assert all(f"{name}: {reason}" in refused.json()["detail"] for name, reason in told.items())
    assert status == 400 or len(files) > 1 or told.keys() == files.keys()


@pytest.mark.slow
def test_a_file_over_a_limit_is_reported_in_its_job(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ReadOptions(seconds=60, memory=2**27, max_bytes=2**28)
    monkeypatch.setattr(ReadOptions, "of", lambda _: limits)
    files = [
        ("files", ("a.html", b"<p>The boat is blue.")),
        ("files", ("large.html", b"<html>" + b"<b><i>a</i></b>" * 200_000)),
    ]
    sent = client.post("/v1/collections/limited/documents", files=files)
    (skipped,) = ended(client, sent.headers["location"])["report"]["skipped"]
    assert (skipped["name"], skipped["failed"]) == ("large.html", True)
    assert "document_memory" in skipped["reason"]
    assert [each.source_id for each in rag.documents.get("limited")] == ["a.html"]


def test_files_after_an_uploads_deadline_are_not_read() -> None:
    limits = ReadOptions.of(OpenConfig())
    with pytest.raises(HTTPProblem, match="the time of the upload was over"):
        routes._parse_files([("a.html", b"<p>text")], limits, monotonic())


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


@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_gigabyte_is_refused_before_it_is_read(served: str, declared: bool) -> None:
    port = int(served.rpartition(":")[2])
    head = f"POST {UPLOADS} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    length = "Content-Length: 1073741824" if declared else "Transfer-Encoding: chunked"
    head += f"Content-Type: application/json\r\n{length}\r\n\r\n"
    block = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", port), 30) as link:
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


JSON = {"Content-Type": "application/json"}
TAGGED = "/v1/collections/tagged/documents"


@pytest.mark.parametrize(
    "document",
    [
        '{"id": "\\ud800", "text": "b"}', '{"id": "x", "text": "\\ud800"}',
        '{"id": "x", "text": "b", "uri": "\\u0000"}', '{"id": "\\u0000", "text": "b"}',
        '{"id": "x", "text": "b", "\\ud800": 1}',
        *(f'{{"id": "x", "text": "Words.", "metadata": {metadata}}}' for metadata in (
        '{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a": NaN}', '{"a": 1e999}', '{"a": [-Infinity]}',
        '{"a":' * 150 + "1" + "}" * 150, '{"a":' * 400 + "1" + "}" * 400,
        '{"a": ' + "9" * 5000 + "}",
        )),
    ],
)  # fmt: skip
def test_what_json_cannot_give_back_is_not_stored(client: TestClient, document: str) -> None:
    refused = client.post(TAGGED, content=f'{{"documents": [{document}]}}', headers=JSON)
    assert refused.status_code == 422, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["detail"]
    assert client.get(TAGGED).status_code == 404


EVENTS = {"Accept": "text/event-stream"}
JOB = JobResponse(
    public_id="a", target="notes", status="running", done=0, total=2, error="", started_at=1.0,
    finished_at=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code"),
    [(LedgerUnavailable("it does not answer"), "ledger-unavailable"),
     (UnknownJob("there is no job 1"), "unknown-job"), (ZeroDivisionError(), "internal-error"),
     (None, "stopping")],
)  # fmt: skip
def test_the_events_of_a_job_tell_why_they_end(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch, error: Exception | None, code: str
) -> None:
    """None: the service ends."""
    answers = iter([JOB, JOB.model_copy(update={"done": 1})])

    async def job(*_: object) -> JobResponse:
        try:
            return next(answers)
        except StopIteration:
            if error is not None:
                raise error from None
            client.app.state.service.requests.drain()  # type: ignore[attr-defined]
            return JOB

    monkeypatch.setattr(routes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(routes, "_job", job)
    with client_of(rag) as client:  # of its own, as it may be drained
        told = events(client.get("/v1/jobs/1", headers=EVENTS).text)
    assert [name for name, _ in told][:2] == ["progress", "progress"]
    assert told[1][1]["done"] == 1
    assert told[-1][0] == "error"
    assert told[-1][1]["type"] == f"urn:ragcache:problem:{code}"
    assert told[-1][1]["instance"] == "/v1/jobs/1"


def test_a_collection_has_a_description(client: TestClient) -> None:
    client.post("/v1/collections", json={"name": "maps", "description": "Charts of the bay."})
    place = "/v1/collections/maps/description"
    assert client.get(place).json() == {"description": "Charts of the bay."}
    told = client.put(place, json={"description": "Old charts."}).json()
    assert told == client.get(place).json() == {"description": "Old charts."}
    again = client.post("/v1/collections", json={"name": "maps", "description": "x"})
    assert again.json() == {"name": "maps", "created": False}
    [row] = [row for row in client.get("/v1/collections").json()["items"] if row["name"] == "maps"]
    assert row["description"] == "Old charts."
    assert client.put(place, json={"description": "x" * 2001}).status_code in (400, 422)
    assert client.put(place, json={"description": "\0"}).status_code == 400
    missing = place.replace("maps", "none")
    assert client.get(missing).status_code == 404
    assert client.put(missing, json={"description": "x"}).status_code == 404


def test_a_collection_has_an_instruction_of_its_own(client: TestClient) -> None:
    client.post("/v1/collections", json={"name": "guide"})
    place = "/v1/collections/guide/instruction"
    default = client.get(place).json()
    told = client.put(place, json={"instruction": "Answer in French."})
    assert told.json() == client.get(place).json() == {"instruction": "Answer in French."}
    assert client.put(place, json={"instruction": " "}).status_code == 400
    assert client.put(place, json={"instruction": None}).json() == default
    assert client.put(place.replace("guide", "none"), json={"instruction": "x"}).status_code == 404


def test_a_collection_has_a_priming_text_of_its_own(client: TestClient) -> None:
    client.post("/v1/collections", json={"name": "primed"})
    place = "/v1/collections/primed/priming"
    default = client.get(place).json()
    told = client.put(place, json={"priming": "# Minutes\n\nThe boats are painted in May."})
    assert told.json() == client.get(place).json()
    assert told.json() == {
        "priming": "# Minutes\n\nThe boats are painted in May.",
        "similar": False,
    }
    listed = client.get("/v1/collections").json()["items"]
    assert [row["own_priming"] for row in listed if row["name"] == "primed"] == [True]
    assert client.put(place, json={"priming": " "}).status_code == 400
    assert client.put(place, json={"priming": "x" * 20_001}).status_code in (400, 422)
    similar = client.put(place, json={"priming": None, "similar": True})
    assert similar.json() == default | {"similar": True}
    listed = client.get("/v1/collections").json()["items"]
    assert [row["similar_priming"] for row in listed if row["name"] == "primed"] == [True]
    assert client.put(place, json={"priming": "x", "similar": True}).status_code == 400
    assert client.put(place, json={"priming": None}).json() == default
    assert client.put(place.replace("primed", "none"), json={"priming": "x"}).status_code == 404
