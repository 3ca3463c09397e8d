"""What the keys of one namespace see of another: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import LEAVE, client_of
from tests.conftest import write_notes

TEXT = (
    "# Leave\n\nEverybody has 26 days of leave a year. Requests go to Ines Marlow two weeks ahead."
)


@pytest.fixture(scope="module")
def two(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, dict[str, str], dict[str, str]]]:
    """A service in which `red` has the notes, and the headers of administrators of red and blue."""
    folder = tmp_path_factory.mktemp("two")
    with RagCache.open(folder / "state", reader) as rag, client_of(rag) as client:
        rag.within("red").ingest("notes", write_notes(folder / "notes"))
        headers = [
            {"Authorization": f"Bearer {rag.keys.create(name, 'admin', name)[1]}"}
            for name in ("red", "blue")
        ]
        yield client, headers[0], headers[1]


def test_lists_of_one_are_empty_for_the_other(
    two: tuple[TestClient, dict[str, str], dict[str, str]],
) -> None:
    client, red, blue = two
    text = "<schema name='s'><module name='a'>b</module></schema>"
    client.post("/v1/schemas", json={"text": text}, headers=red)
    client.post("/v1/answers", json={"question": LEAVE, "collection": "notes"}, headers=red)
    for path in ("/v1/collections", "/v1/schemas", "/admin/modules", "/admin/schemas", "/v1/jobs"):
        assert client.get(path, headers=red).json()["items"], path
        other = client.get(path, headers=blue).json()
        assert other["items"] == [], path
        assert not other["total"], path
    assert client.get("/admin/requests", headers=blue).json()["recent"] == []
    assert client.get("/admin/heat", headers=blue).json()["modules"] == []
    stats = client.get("/admin/stats", headers=blue).json()
    assert stats["collections"] == {}
    assert stats["requests"]["finished"] == 0
    assert stats["tokens"] == {}


def test_things_of_one_do_not_exist_for_the_other(
    two: tuple[TestClient, dict[str, str], dict[str, str]],
) -> None:
    client, red, blue = two
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


def test_texts_of_one_are_not_recognized_for_the_other(
    two: tuple[TestClient, dict[str, str], dict[str, str]],
) -> None:
    client, red, blue = two
    body = {
        "model": "ragcache-reader", "max_tokens": 2,
        "messages": [{"role": "user", "content": f"{TEXT}\n\n{LEAVE}"}],
    }  # fmt: skip
    told = {
        name: client.post("/v1/chat/completions", json=body, headers=headers).json()
        for name, headers in (("red", red), ("blue", blue), ("again", blue))
    }
    cached = {n: t["usage"]["prompt_tokens_details"]["cached_tokens"] for n, t in told.items()}
    assert cached["red"] > 0
    assert cached["blue"] == 0
    assert told["red"]["ragcache"]["mode"].startswith("recognized")
    assert told["blue"]["ragcache"]["mode"] == "exact"


def test_an_equal_document_of_the_other_is_encoded_anew(
    two: tuple[TestClient, dict[str, str], dict[str, str]], tmp_path: Path
) -> None:
    client, red, blue = two
    rag: RagCache = client.app.state.service.rag  # type: ignore[attr-defined]
    done = rag.within("blue").ingest("mine", write_notes(tmp_path / "notes"))
    assert done.encoded >= done.modules, "no state of red is found"
    body = {"question": LEAVE, "collection": "mine", "max_tokens": 2}
    sources = client.post("/v1/answers", json=body, headers=blue).json()
    assert sources["reuse"]["cached_tokens"] > 0
    assert client.delete("/v1/collections/mine", headers=blue).status_code == 200
    again = client.post("/v1/answers", json={**body, "collection": "notes"}, headers=red).json()
    assert again["reuse"]["cached_tokens"] > 0, "what is left of red is whole"
