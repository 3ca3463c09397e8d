"""One real file of each type, ingested by command line and service, and questioned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.documents import reading
from ragcache.models import LoadedModel
from tests.api.cli import conftest as cli
from tests.api.cli.conftest import Run, error_of, json_of
from tests.api.http.asgi import events
from tests.api.http.conftest import client_of
from tests.ragcache.documents.more_files import archive
from tests.ragcache.documents.sample_files import FACTS, WRITERS

run = cli.run  # the fixture
PAGES = {"guide/handbook.pdf": 2, "slides.pptx": 2}
HEADINGS = {
    "guide/handbook.pdf": ["Lighthouse"], "report.docx": ["Ferries", "Pelican"],
    "book.epub": ["Maps"], "settings.json": ["winch"], "letter.eml": ["Regatta dinner"],
}  # fmt: skip


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    folder = tmp_path / "papers"
    for name, make in WRITERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make())
    return folder


@pytest.mark.slow
def test_the_command_line_stores_every_type_and_cites_pages(run: Run, papers: Path) -> None:
    (papers / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    stored = json_of(run("ingest", "papers", papers, "--json"))
    assert (stored["added"], stored["vanished"]) == (len(WRITERS), [])
    assert [file["reason"] for file in stored["skipped"]] == [".jpg is no type that is read"]
    asked = ("ask", FACTS["guide/handbook.pdf"][0], "-c", "papers", "-k", 1)
    assert "guide/handbook.pdf#2, page 2" in run(*asked)[1]


@pytest.mark.slow
def test_one_bad_file_is_named_and_the_status_says_so(run: Run, papers: Path) -> None:
    (papers / "broken.docx").write_bytes(b"PK\x03\x04 broken")
    status, out, _ = run("ingest", "papers", papers)
    assert status == 3
    assert f"{len(WRITERS)} documents added" in out
    assert "not read: " in out
    assert "broken.docx: it is damaged, or of another type than its name says" in out
    (papers / "broken.docx").unlink()
    (papers / "notes.md").unlink()
    status, out, _ = run("ingest", "papers", papers, "--exclude", "*.pdf")
    assert status == 0
    assert "vanished: notes.md" in out
    assert "`ragcache sync` removes what is gone" in out
    (papers / "page.html").rename(papers / "guide" / "page.html")
    status, out, _ = run("sync", "papers", papers)
    assert status == 0
    assert "1 renamed, 1 removed" in out
    assert "renamed: page.html to guide/page.html" in out
    assert "removed: notes.md" in out
    (papers / "empty.md").write_text(" ")
    error_of(run("sync", "papers", papers, "--strict"), "UnreadableDocument")
    error_of(run("sync", "papers", papers / "people.csv"), "UnreadableDocument")
    error_of(run("ingest", "papers", papers / "lost.md"), "UnreadableDocument")
    error_of(run("ingest", " ", papers), "ConfigurationError")


@pytest.mark.slow
def test_a_type_without_its_extra_is_unread_and_says_which(
    run: Run, papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for library in ("pypdfium2", "mammoth", "pptx", "python_calamine"):
        monkeypatch.setitem(sys.modules, library, None)
    here = SimpleNamespace(call=lambda payload, **_: reading.read_in_worker(payload))
    monkeypatch.setattr(reading, "_WORKERS", here)  # a worker would find the libraries
    status, out, _ = run("ingest", "papers", papers)
    assert status == 3
    assert f"{len(WRITERS) - 4} documents added" in out
    unread = next(line for line in out.splitlines() if line.startswith("not read: "))
    assert "handbook.pdf" in unread
    assert unread.endswith("it needs the extra: pip install 'ragcache[documents]'")
    only = ("--include", "*.pdf", "--include", "*.docx")
    status, out, err = run("ingest", "alone", papers, *only)
    assert (status, out) == (3, "")
    assert err.startswith("UnreadableDocument: ")
    assert err.count("it needs the extra: pip install 'ragcache[documents]'") == 1


@pytest.mark.slow
def test_what_a_document_lacks_is_named_in_the_summary(run: Run, tmp_path: Path) -> None:
    (tmp_path / "all.zip").write_bytes(archive())
    status, out, _ = run("ingest", "papers", tmp_path / "all.zip")
    assert status == 0
    assert "left out of " in out
    assert "all.zip: map.png: a binary file: a picture" in out


@pytest.fixture
def client(tmp_path: Path, reader: LoadedModel) -> Iterator[TestClient]:
    with RagCache.open(tmp_path / "served", reader) as rag, client_of(rag) as made:
        yield made


PATH = "/v1/collections/papers/documents"


@pytest.mark.slow
def test_the_service_cites_every_type(client: TestClient) -> None:
    files = [("files", (name, make())) for name, make in WRITERS.items()]
    broken = ("files", ("broken.pdf", b"%PDF-1.7"))
    job = _ended(client, client.post(PATH, files=[*files, broken]).headers["location"])
    assert job["status"] == "done", job
    [skipped] = job["report"]["skipped"]
    assert (skipped["name"], skipped["reason"]) == ("broken.pdf", "it is damaged, or no PDF")
    assert client.get(PATH).json()["total"] == len(WRITERS)
    for name, (question, _) in FACTS.items():
        body = {"question": question, "collection": "papers", "k": 1, "max_tokens": 4}
        [source] = client.post("/v1/answers", json=body).json()["sources"]
        assert (source["document"], source["page"]) == (name, PAGES.get(name))
        assert source["headings"] == HEADINGS.get(name, source["headings"])
    kept = [("files", ("moved.md", WRITERS["notes.md"]())), ("files", ("crane.py", b"\0"))]
    job = _ended(client, client.put(PATH, files=kept).headers["location"])
    assert job["report"]["renamed"] == {"notes.md": "moved.md"}
    assert len(job["report"]["removed"]) == len(WRITERS) - 2
    names = [each["id"] for each in client.get(PATH).json()["items"]]
    assert names == ["crane.py", "moved.md"], "what could not be read now stays"


def _ended(client: TestClient, location: str) -> dict[str, object]:
    response = client.get(location, headers={"Accept": "text/event-stream"})
    ended: dict[str, object] = events(response.text)[-1][1]
    return ended
