"""Pages for browsers: the two pages' files, and the API's description."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache_api.http import browser
from tests.api.http.conftest import client_of


@pytest.mark.parametrize(("path", "script"), [("/", "ask.js"), ("/admin/", "admin/main.js")])
def test_both_pages_name_their_files_by_relative_paths(
    client: TestClient, path: str, script: str
) -> None:
    assert client.get("/admin", follow_redirects=False).headers["location"] == "admin/"
    page = client.get(path)
    assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert any(each.endswith(script) for each in linked)
    for each in linked:
        assert not each.startswith("/"), each
        assert client.get(urljoin(f"http://testserver{path}", each)).status_code == 200, each


def test_the_api_description_is_local_and_names_its_key(client: TestClient) -> None:
    shown = client.get("/docs")
    assert "SwaggerUIBundle" in shown.text
    assert "script-src 'self' 'sha256-" in shown.headers["content-security-policy"]
    for linked in re.findall(r'(?:src|href)="([^"]+)"', shown.text):
        assert "//" not in linked
        assert client.get(f"/{linked}").status_code == 200, linked
    described = client.get("/openapi.json").json()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.parametrize("path", ["/", "/admin/", "/docs"])
def test_a_service_without_pages_shows_none(rag: RagCache, path: str) -> None:
    with client_of(rag, page=False) as client:
        assert client.get(path).status_code == 404


def test_files_of_the_pages_need_no_key() -> None:
    assert {"/", "/docs", "/admin/", "/page/js/ask.js", "/openapi.json"} <= browser.open_paths()
    assert not any("stats" in path for path in browser.open_paths())
