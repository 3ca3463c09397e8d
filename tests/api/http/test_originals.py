"""Originals of documents: the files that were ingested, as they were, and nothing else."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from ragcache import RagCache, SourceDocument
from ragcache.db import StoredObjects
from ragcache.db.tables import JobOriginalTable, OriginalTable
from ragcache.documents import originals
from ragcache.errors import OriginalMissing
from ragcache.models import LoadedModel
from ragcache.pipeline.ingestion_jobs import IngestionWorkers
from tests.api.http.conftest import client_of

HOSTILE = {
    "page.html": b"<html><body>The zeppelin is moored.<script>alert(1)</script></body></html>",
    "sub/a ä & b.md": "# Über\n\nThe quay is long.".encode(),
}
HOSTILE_UPLOADS = (
    ("page.html", HOSTILE["page.html"]),
    ("drawing.svg.md", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'>quay</svg>"),
    ("sub/a ä & b.md", HOSTILE["sub/a ä & b.md"]),
)
URL = "/v1/collections/files/originals/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in HOSTILE.items():
        file = tmp_path / "given" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (tmp_path / "secret.md").write_text("The secret of the quay.")
    return tmp_path / "given"


@pytest.fixture
def rag(quick_reader: LoadedModel, tmp_path: Path, folder: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", quick_reader) as opened:
        opened.ingest("files", folder)
        yield opened


@pytest.fixture
def client(rag: RagCache) -> Iterator[TestClient]:
    with client_of(rag) as made:
        yield made


def test_a_file_is_downloaded_as_it_was_and_never_shown(
    client: TestClient, rag: RagCache, folder: Path
) -> None:
    for name, content in HOSTILE.items():
        response = client.get(URL + name)
        assert (response.status_code, response.content) == (200, content)
        headers = response.headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-length"] == str(len(content))
        assert headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert headers["x-content-type-options"] == "nosniff"
        with rag.documents.original("files", name) as file:
            assert file.read() == content
    assert headers["content-disposition"].endswith("''a%20%C3%A4%20%26%20b.md"), "without folders"
    told = client.get("/v1/collections/files/documents/page.html").json()
    assert told["has_original"]
    assert str(folder) not in str(told), "and no path of the server"


def test_a_changed_file_is_no_original_until_it_is_ingested(
    client: TestClient, rag: RagCache, folder: Path
) -> None:
    file = folder / "page.html"
    file.write_bytes(HOSTILE["page.html"].replace(b"alert(1)", b"alert(2)"))
    response = client.get(f"{URL}page.html")
    assert response.status_code == 409
    assert response.json()["type"] == "urn:ragcache:problem:original-changed"
    assert b"alert" not in response.content
    again = rag.ingest("files", folder)
    assert (again.added, again.updated, again.unchanged, again.encoded) == (0, 0, 2, 0)
    assert again.renamed == {}
    assert client.get(f"{URL}page.html").content == file.read_bytes(), "of the same text"
    file.unlink()
    gone = client.get(f"{URL}page.html")
    assert (gone.status_code, gone.json()["type"]) == (404, "urn:ragcache:problem:original-missing")
    os.mkfifo(file)
    assert client.get(f"{URL}page.html").status_code == 404, "and no pipe is waited for"


def test_no_name_or_address_that_is_sent_leads_to_a_file(
    client: TestClient, rag: RagCache, folder: Path
) -> None:
    secret = folder.parent / "secret.md"
    for name in ("../secret.md", "%2e%2e/secret.md", str(secret), "sub/../../secret.md", "none"):
        assert client.get(URL + name).status_code == 404
    body = {"documents": [{"id": "s.md", "text": secret.read_text(), "uri": secret.as_uri()}]}
    job = client.post("/v1/collections/files/documents", json=body).json()["id"]
    client.get(f"/v1/jobs/{job}", headers={"Accept": "text/event-stream"})
    assert not client.get("/v1/collections/files/documents/s.md").json()["has_original"]
    assert client.get(f"{URL}s.md").status_code == 404
    rag.ingest("files", [SourceDocument("t.md", secret.read_text(), secret.as_uri())])
    assert client.get(f"{URL}t.md").status_code == 404
    link = folder / "page.html"
    link.unlink()
    link.symlink_to(secret)
    response = client.get(f"{URL}page.html")
    assert (response.status_code, b"secret of" in response.content) == (409, False)


@pytest.mark.parametrize("uri", ["https://example.com/a", "file://host/share/a", "", "a.md"])
def test_only_files_of_this_machine_are_opened(uri: str) -> None:
    with pytest.raises(OriginalMissing, match="its text is all that is kept"):
        originals.open_original(uri, "digest")


def test_a_large_file_is_copied_through_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "_IN_MEMORY", 10)
    monkeypatch.setattr(originals, "_BLOCK", 4)
    file = tmp_path / "a b.md"
    file.write_bytes(bytes(range(100)))
    digest = originals.digest_original(file.read_bytes())
    with originals.open_original(file.as_uri(), digest) as copy:
        file.write_bytes(b"changed meanwhile")
        assert copy.read() == bytes(range(100))


def test_originals_belong_to_a_namespace_and_follow_renames(rag: RagCache, folder: Path) -> None:
    rows = [rag.keys.create("operator", role="admin"), rag.keys.create("b", namespace="tenant")]
    first, second = ({"Authorization": f"Bearer {secret}"} for _, secret in rows)
    with client_of(rag) as client:
        assert client.get(f"{URL}page.html").status_code == 401
        assert client.get(f"{URL}page.html", headers=second).status_code == 404
        rag.documents.rename("files", "page.html", "renamed.html")
        moved = client.get(f"{URL}renamed.html", headers=first)
        assert moved.content == HOSTILE["page.html"]
        (folder / "page.html").rename(folder / "other.html")
        assert rag.sync("files", folder).renamed == {"renamed.html": "other.html"}
        assert client.get(f"{URL}other.html", headers=first).status_code == 200
        assert client.get(f"{URL}renamed.html", headers=first).status_code == 404


def test_files_of_their_own_route_have_originals(client: TestClient) -> None:
    form = {"files": {"file": ("boats.md", b"The boat is blue.")}, "data": {"purpose": "user_data"}}
    kept = client.post("/v1/files", **form).json()["id"]
    assert client.post("/v1/vector_stores/files/files", json={"file_id": kept}).status_code == 200
    while client.get(f"/v1/collections/files/documents/{kept}").status_code == 404:
        pass
    assert client.get(f"/v1/collections/files/documents/{kept}").json()["has_original"]
    response = client.get(URL + kept)
    assert response.content == b"The boat is blue."
    assert response.headers["content-disposition"].endswith("''boats.md")


def upload(
    client: TestClient, *files: tuple[str, bytes], collection: str = "files", **headers: str
) -> dict[str, Any]:
    """Upload files, wait until their job has ended, and return it."""
    path, sent = f"/v1/collections/{collection}/documents", [("files", file) for file in files]
    response = client.post(path, files=sent, headers=headers)
    assert response.status_code == 202, response.text
    job = f"/v1/jobs/{response.json()['id']}"
    client.get(job, headers={"Accept": "text/event-stream", **headers})
    return dict(client.get(job, headers=headers).json())


def kept(rag: RagCache) -> tuple[int, int]:
    """Return how many files the ledger keeps: of documents, and of jobs."""
    with rag._shared.database.reading() as session:
        numbers = (select(func.count()).select_from(t) for t in (OriginalTable, JobOriginalTable))
        documents, jobs = (session.scalar(each) or 0 for each in numbers)
    return documents, jobs


def test_uploads_are_downloaded_as_they_were_and_never_shown(
    client: TestClient, rag: RagCache
) -> None:
    assert upload(client, *HOSTILE_UPLOADS, ("bad.pdf", b"%PDF-1.4 cut"))["status"] == "done"
    for name, content in HOSTILE_UPLOADS:
        assert client.get(f"/v1/collections/files/documents/{name}").json()["has_original"]
        response = client.get(URL + name)
        assert (response.status_code, response.content) == (200, content)
        headers = response.headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert headers["x-content-type-options"] == "nosniff"
    assert kept(rag) == (len(HOSTILE_UPLOADS), 0), "none of a refused file or an ended job"


def test_an_upload_is_forgotten_with_its_document(client: TestClient, rag: RagCache) -> None:
    upload(client, ("a.md", b"The boat is blue."), ("b.md", b"The quay is long."))
    assert kept(rag) == (2, 0)
    rag.documents.rename("files", "a.md", "c.md")
    assert client.get(f"{URL}c.md").content == b"The boat is blue."
    client.delete("/v1/collections/files/documents/c.md")
    assert kept(rag) == (1, 0)
    body = {"documents": [{"id": "b.md", "text": "The quay is long."}]}
    job = client.post("/v1/collections/files/documents", json=body).json()["id"]
    client.get(f"/v1/jobs/{job}", headers={"Accept": "text/event-stream"})
    assert kept(rag) == (0, 0), "replaced by a text of the same words"
    assert not client.get("/v1/collections/files/documents/b.md").json()["has_original"]
    assert client.get(f"{URL}b.md").status_code == 404
    upload(client, ("b.md", b"The quay is long."))
    client.delete("/v1/collections/files")
    assert kept(rag) == (0, 0)


def test_an_upload_is_replaced_by_a_file_of_the_same_text(
    client: TestClient, rag: RagCache
) -> None:
    first, second = b"The boat is blue.", b"\xef\xbb\xbfThe boat is blue."
    upload(client, ("a.md", first))
    again = upload(client, ("a.md", second))
    assert (again["status"], again["done"]) == ("done", 0), "nothing was encoded"
    assert client.get(f"{URL}a.md").content == second
    upload(client, ("a.md", second), ("b.md", second))
    assert client.get(f"{URL}b.md").content == second
    assert kept(rag) == (2, 0)


def test_uploads_of_a_namespace_go_with_it(rag: RagCache) -> None:
    _, secret = rag.keys.create("operator", role="admin")
    _, theirs = rag.keys.create("b", namespace="tenant")
    with client_of(rag) as client:
        headers = {"Authorization": f"Bearer {theirs}"}
        upload(client, ("a.md", b"The boat is blue."), **headers)
        assert client.get(f"{URL}a.md", headers=headers).content == b"The boat is blue."
        own = client.get(f"{URL}a.md", headers={"Authorization": f"Bearer {secret}"})
        assert own.status_code == 404
        rag.namespaces.delete("tenant")
        assert kept(rag) == (0, 0)


def test_originals_have_a_budget(quick_reader: LoadedModel, tmp_path: Path) -> None:
    content = b"The boat is blue. " * 10
    with (
        RagCache.open(tmp_path, quick_reader, originals_bytes=300) as rag,
        client_of(rag) as client,
    ):
        upload(client, ("a.md", content), ("b.md", b"The quay is long. " * 10))
        assert kept(rag) == (1, 0), "the first one"
        assert client.get(f"{URL}a.md").content == content
        told = client.get("/v1/collections/files/documents/b.md").json()
        assert (told["modules"], told["has_original"]) == (1, False)
        missing = client.get(f"{URL}b.md")
        assert (missing.status_code, "originals_bytes" in missing.json()["detail"]) == (404, True)
        client.delete("/v1/collections/files/documents/a.md")
        upload(client, ("b.md", b"The quay is long. " * 10))
        assert client.get(f"{URL}b.md").status_code == 200, "of a document that is stored already"


def test_another_replica_has_the_original(quick_reader: LoadedModel, tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(RagCache.open(each, quick_reader, ledger=ledger))
            for each in folders
        )
        upload(stack.enter_context(client_of(one)), ("a.md", b"The boat is blue."))
        client = stack.enter_context(client_of(two))
        assert client.get("/v1/collections/files/documents/a.md").json()["has_original"]
        assert client.get(f"{URL}a.md").content == b"The boat is blue."


def test_a_canceled_upload_leaves_no_file(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IngestionWorkers, "wake", lambda _: None)
    sent = [("files", ("a.md", b"The boat is blue."))]
    job = client.post("/v1/collections/files/documents", files=sent).json()["id"]
    assert kept(rag) == (0, 1)
    client.delete(f"/v1/jobs/{job}")
    assert kept(rag) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS and Windows have names in Unicode only")
def test_a_file_has_an_original_whatever_its_name(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 100%;?#.md"))
    file.write_bytes(b"The quay is long.")
    digest = originals.digest_original(b"The quay is long.")
    with originals.open_original(file.as_uri(), digest) as copy:
        assert copy.read() == b"The quay is long."


def test_a_full_disk_of_copies_is_no_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, block: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(originals.tempfile, "SpooledTemporaryFile", lambda **_: Full())
    file = tmp_path / "a.md"
    file.write_bytes(b"The quay is long.")
    with pytest.raises(OSError, match="No space left"):
        originals.open_original(file.as_uri(), "digest")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_an_original_that_became_a_pipe_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OriginalMissing, match="no file, but a pipe"):
        originals.open_original((tmp_path / "pipe").as_uri(), "digest")


def test_a_file_that_is_deleted_meanwhile_is_not_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"files": {"file": ("boats.md", b"The boat is blue.")}, "data": {"purpose": "user_data"}}
    kept = client.post("/v1/files", **form).json()["id"]
    assert client.post("/v1/vector_stores/files/files", json={"file_id": kept}).status_code == 200
    while client.get(f"/v1/collections/files/documents/{kept}").status_code == 404:
        pass
    monkeypatch.setattr(StoredObjects, "content", lambda *_: None)  # after the row was read
    assert client.get(URL + kept).status_code == 404
    assert client.get(f"/v1/files/{kept}/content").status_code == 404
