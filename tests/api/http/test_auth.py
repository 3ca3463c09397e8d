"""Who gets in: keys, roles, limits, and calls that a browser makes for other sites."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.to_thread import current_default_thread_limiter
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings, create_app
from tests.api.http.asgi import App, Caller
from tests.api.http.conftest import LEAVE, client_of

PATHS = [
    ("GET", "/v1/models"), ("POST", "/v1/answers"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"), ("GET", "/v1/collections"), ("GET", "/v1/jobs"),
    ("GET", "/v1/schemas"), ("POST", "/v1/prompts"), ("GET", "/admin/stats"), ("GET", "/metrics"),
    ("GET", "/docs/favicon.png"), ("GET", "/nothing/here"),
]  # fmt: skip


@pytest.fixture
def locked(quick_reader: LoadedModel, tmp_path: Path) -> Iterator[tuple[TestClient, RagCache]]:
    """A service of a folder with a key for everything and one for questions."""
    with RagCache.open(tmp_path / "state", quick_reader) as rag, client_of(rag) as client:
        yield client, rag


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_everything_but_health_is_closed_once_a_key_exists(
    locked: tuple[TestClient, RagCache],
) -> None:
    client, rag = locked
    assert client.get("/v1/models").status_code == 200
    row, secret = rag.keys.create("me", role="admin")
    for method, path in PATHS:
        for headers in ({}, bearer("rc-wrong"), {"Authorization": secret}):
            refused = client.request(method, path, headers=headers)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"].startswith("Bearer")
    assert client.get("/v1/models", headers=bearer(secret)).status_code == 200
    assert client.get("/admin/stats", headers=bearer(secret)).status_code == 200
    for path in ("/health", "/health/live", "/health/ready", "/health/"):
        assert client.get(path).status_code == client.head(path).status_code == 200
    rag.keys.revoke(row.id)
    assert client.get("/v1/models", headers=bearer(secret)).status_code == 401


def test_errors_of_the_gate_have_the_shape_of_their_path(
    locked: tuple[TestClient, RagCache],
) -> None:
    client, rag = locked
    rag.keys.create("me")
    assert client.get("/v1/models").json()["error"]["type"] == "authentication_error"
    assert client.get("/v1/jobs").json()["type"] == "urn:ragcache:problem:unauthorized"


def test_a_users_key_opens_nothing_of_the_operators(locked: tuple[TestClient, RagCache]) -> None:
    client, rag = locked
    _, secret = rag.keys.create("me")
    for path in ("/admin/stats", "/admin/modules", "/metrics", "/admin/other"):
        assert client.get(path, headers=bearer(secret)).status_code == 403, path
    assert client.get("/v1/collections", headers=bearer(secret)).status_code == 200


POLICY = "content-security-policy"


def test_the_files_of_the_page_are_open_and_nothing_beside_them(
    locked: tuple[TestClient, RagCache],
) -> None:
    client, rag = locked
    rag.keys.create("me", role="admin")
    files = {"/", "/admin/"}
    for address in sorted(files):
        page = client.get(address)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        linked_files = re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css|svg))"', page.text)
        files |= {f"/page/{linked.rpartition('page/')[2]}" for linked in linked_files}
    assert len(files) > 10
    for linked in sorted(files):
        file = client.get(linked)
        assert file.status_code == 200, linked
        policy = dict(each.split(" ", 1) for each in file.headers[POLICY].split("; "))
        assert (policy["default-src"], policy["frame-ancestors"]) == ("'self'", "'none'"), linked
        assert file.headers["x-content-type-options"] == "nosniff"
        assert file.headers["referrer-policy"] == "no-referrer"
    for path in ("/page/../admin/stats", "/page/%2e%2e/app.py", "/admin/stats", "/page/absent.js"):
        assert client.get(path).status_code == 401, path


def test_an_administrator_of_a_namespace_sees_nothing_shared(
    locked: tuple[TestClient, RagCache],
) -> None:
    client, rag = locked
    _, secret = rag.keys.create("them", role="admin", namespace="them")
    for path in ("/admin/tiers", "/admin/memory", "/metrics"):
        assert client.get(path, headers=bearer(secret)).status_code == 403, path
    for path in ("/admin/flush", "/admin/verify"):
        assert client.post(path, headers=bearer(secret)).status_code == 403, path
    stats = client.get("/admin/stats", headers=bearer(secret)).json()
    assert stats["engine"] == {}


def test_without_keys_only_this_machines_names_are_answered(rag: RagCache) -> None:
    with client_of(rag, allowed_hosts=["localhost", "reader.local"]) as client:
        for host, status in (
            ("localhost:8000", 200), ("reader.local", 200), ("evil.example", 403), ("", 403),
        ):  # fmt: skip
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host


OTHERS = [
    {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://localhost:3000"}, {"Origin": "http://localhost"},
    {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": ""},
    {"Origin": "http://localhost:8000.evil.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "http://evil.example/?http://localhost:8000"},
]  # fmt: skip
OWN = [
    {}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
    {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://LOCALHOST:8000"},
]  # fmt: skip
EVICT = {"dry_run": "true"}


def test_without_keys_no_page_of_another_origin_is_answered(rag: RagCache) -> None:
    with client_of(rag) as client:
        for allowed, tried in ((True, OWN), (False, OTHERS)):
            for headers in tried:
                sent = {**headers, "Host": "localhost:8000"}
                got = client.get("/v1/models", headers=sent)
                done = client.post("/admin/evict", params=EVICT, json={}, headers=sent)
                assert (got.status_code == 200, done.status_code == 200) == (allowed,) * 2, headers


def test_with_a_key_a_page_of_any_origin_is_answered(locked: tuple[TestClient, RagCache]) -> None:
    client, rag = locked
    _, secret = rag.keys.create("me", role="admin")
    for headers in OTHERS:
        sent = {**headers, **bearer(secret), "Host": "localhost:8000"}
        assert client.post("/admin/flush", headers=sent).status_code == 200, headers


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_keys_come_in_the_headers_of_other_clients(
    locked: tuple[TestClient, RagCache], header: str
) -> None:
    client, rag = locked
    _, secret = rag.keys.create("me")
    tried = [
        ({header: secret}, 200),
        ({header: "rc-wrong"}, 401),
        ({header: secret, "Authorization": "Bearer rc-wrong"}, 401),
        ({header: secret, "Authorization": "Basic cHJveHk="}, 200),
    ]
    for headers, status in tried:
        assert client.get("/v1/models", headers=headers).status_code == status, headers


def test_a_preflight_needs_no_key_but_the_call_does(locked: tuple[TestClient, RagCache]) -> None:
    _, rag = locked
    rag.keys.create("me")
    page = {"Origin": "https://app.example", "Access-Control-Request-Method": "GET"}
    with client_of(rag, cors_origins="*") as client:
        assert client.options("/v1/models", headers=page).status_code == 200
        refused = client.get("/v1/models", headers=page)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"


def test_a_rate_is_kept_and_says_when_to_come_again(rag: RagCache) -> None:
    with client_of(rag, rate="2/minute") as client:
        statuses = [client.get("/v1/jobs").status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = client.get("/v1/models")
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert client.get("/health/live").status_code == 200


def test_rates_are_kept_while_their_shared_storage_is_away(
    rag: RagCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = f"redis+unix://{tmp_path}/nobody"
    with client_of(rag, rate="2/minute", rate_storage=away) as client:
        assert [client.get("/v1/jobs").status_code for _ in range(3)] == [200, 200, 429]
    assert caplog.text.count("rates are counted by this process alone") == 1


def test_rates_are_shared_by_a_redis_alone() -> None:
    with pytest.raises(ConfigurationError, match=r"rate_storage.*redis\+unix"):
        ServiceSettings.read(rate_storage="memcached://localhost")


def test_a_body_is_refused_by_its_declared_length(rag: RagCache) -> None:
    with client_of(rag, body_bytes=1000) as client:
        body = {"question": LEAVE + "?" * 2000, "collection": "notes"}
        refused = client.post("/v1/answers", json=body)
        assert refused.status_code == 413
        assert refused.json()["type"].endswith("body-too-large")
        odd = client.post("/v1/answers", content=b"{}", headers={"Content-Length": "many"})
        assert odd.status_code == 400


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/collections/notes/documents"])
def test_a_body_without_a_length_is_counted_while_it_comes(rag: RagCache, path: str) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b" " * 100

    with client_of(rag, body_bytes=1000, upload_bytes=1000) as client:
        refused = client.post(path, content=parts(), headers={"Content-Type": "application/json"})
    assert refused.status_code == 413
    assert refused.headers["content-type"] == "application/problem+json"


def test_keys_are_checked_where_all_threads_are_taken(locked: tuple[TestClient, RagCache]) -> None:
    _, rag = locked
    _, secret = rag.keys.create("me")
    release = threading.Event()

    async def call(app: App) -> int:
        caller = Caller()
        async with anyio.create_task_group() as group:
            threads = current_default_thread_limiter()
            for _ in range(int(threads.total_tokens)):
                group.start_soon(to_thread.run_sync, release.wait)
            while threads.available_tokens:
                await anyio.sleep(0.01)
            try:
                with anyio.fail_after(10):
                    await caller.call(app, "GET", "/v1/none", authorization=f"Bearer {secret}")
            finally:
                release.set()
        return caller.status

    # The key was taken: a request without one gets 401. The routes themselves need threads.
    assert anyio.run(call, create_app(rag, ServiceSettings.read())) == 404


def test_routes_and_retrieval_have_as_many_threads(rag: RagCache) -> None:
    with client_of(rag) as client:
        assert client.portal is not None
        assert client.portal.call(lambda: current_default_thread_limiter().total_tokens) == 64
