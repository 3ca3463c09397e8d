"""Pages for browsers: the redirect of `/`, and the API's description."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache_api.http import browser
from tests.api.http.conftest import client_of


def test_the_root_leads_to_the_page(client: TestClient) -> None:
    assert client.get("/", follow_redirects=False).headers["location"] == "admin/"
    assert client.get("/").url.path == "/admin/"


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
    assert {"/", "/docs", "/admin/js/main.js", "/openapi.json"} <= browser.open_paths()
    assert not any("stats" in path for path in browser.open_paths())
