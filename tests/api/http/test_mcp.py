"""The Model Context Protocol: the SDK's own client, over HTTP and over stdio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import LEAVE, client_of, serving

pytest.importorskip("mcp", reason="the extra `mcp` is not installed: pip install 'ragcache[mcp]'")

if TYPE_CHECKING:
    from mcp import Client

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]
READ = ["list_collections", "search", "ask", "get_document"]


@pytest.fixture
def keyed(tmp_path: Path, quick_reader: LoadedModel) -> Iterator[tuple[RagCache, dict[str, str]]]:
    """A folder of two namespaces, each with a collection of its own, and a user's key of each."""
    with RagCache.open(tmp_path / "keyed", quick_reader, max_tokens=4) as rag:
        rag.ingest("tides", [_note("tide", "The tide is out at six.")])
        rag.within("tenant").ingest("boats", [_note("boat", "The boat is blue.")])
        keys = {name: rag.keys.create(name, namespace=name)[1] for name in ("default", "tenant")}
        yield rag, keys


def _note(name: str, text: str) -> Any:
    from ragcache import SourceDocument

    return SourceDocument(name, text)


@asynccontextmanager
async def connected(url: str, key: str = "", mode: Any = "auto") -> AsyncIterator[Client]:
    """The SDK's client of a service. mode: the era of the protocol; see `mcp.Client`."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def exercise(client: Client, collection: str = "notes") -> None:
    """Uses every tool and resource of a server over the notes."""
    tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == READ
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools)
    listed = await client.call_tool("list_collections", {})
    assert listed.structured_content == {
        "collections": [
            {"name": "notes", "description": "boats.md, keys.md, leave.md", "documents": 3}
        ]
    }
    assert json.loads(listed.content[0].text) == listed.structured_content
    wanted = {"query": "days of leave", "collection": collection, "k": 1}
    [passage] = (await client.call_tool("search", wanted)).structured_content["passages"]
    assert (passage["document"], passage["headings"]) == ("leave.md", ["Leave"])
    assert "26 days" in passage["text"]
    asked = {"question": LEAVE, "collection": collection, "k": 2}
    answer = (await client.call_tool("ask", asked)).structured_content
    assert answer["answered"] == bool(answer["citations"])
    if answer["answered"]:
        assert answer["citations"][0]["resource"] == "ragcache://notes/leave.md"
    wanted = {"collection": collection, "document": "keys.md"}
    document = (await client.call_tool("get_document", wanted)).structured_content
    assert document["text"].startswith("# Keys")
    resources = (await client.list_resources()).resources
    assert [str(each.uri) for each in resources] == [
        f"ragcache://notes/{name}.md" for name in ("boats", "keys", "leave")
    ]
    [content] = (await client.read_resource(document["resource"])).contents
    assert content.text == document["text"]
    [template] = (await client.list_resource_templates()).resource_templates
    assert template.uri_template == "ragcache://{collection}/{document}"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_client_of_the_sdk_uses_everything(served: str, mode: str) -> None:
    async with connected(served, mode=mode) as client:
        await exercise(client)


async def test_errors_of_tools_are_results(served: str) -> None:
    async with connected(served) as client:
        unknown = await client.call_tool("ask", {"question": "Why?", "collection": "absent"})
        assert unknown.is_error
        assert unknown.content[0].text.startswith("UnknownCollection: there is no collection")
        wrong = await client.call_tool("search", {"query": "x", "collection": "notes", "k": 0})
        assert wrong.is_error
        assert wrong.content[0].text.startswith("InvalidArguments: k: ")
        more = await client.call_tool("list_collections", {"all": True})
        assert more.content[0].text == "InvalidArguments: all: Extra inputs are not permitted"
        gone = await client.call_tool("get_document", {"collection": "notes", "document": "x"})
        assert "DocumentError: the collection 'notes' holds no document 'x'" in gone.content[0].text


async def test_errors_of_the_protocol_are_errors(served: str) -> None:
    from mcp import MCPError

    async with connected(served) as client:
        for name, told in (("ingest", "is not offered by this server"), ("x", "is unknown")):
            with pytest.raises(MCPError, match=told):
                await client.call_tool(name, {})
        for uri in ("ragcache://notes/absent.md", "ragcache://absent/x", "file:///etc/passwd"):
            with pytest.raises(MCPError) as error:
                await client.read_resource(uri)
            assert error.value.code == -32002
            assert error.value.data == {"uri": uri}
        with pytest.raises(MCPError, match="cursor cannot be used"):
            await client.list_resources(cursor="nonsense")


async def test_a_key_sees_its_own_namespace(keyed: tuple[RagCache, dict[str, str]]) -> None:
    rag, keys = keyed
    with serving(rag) as (_, url):
        for name, collection, document in (
            ("default", "tides", "tide"),
            ("tenant", "boats", "boat"),
        ):
            async with connected(url, keys[name]) as client:
                found = (await client.call_tool("list_collections", {})).structured_content
                assert [each["name"] for each in found["collections"]] == [collection]
                resources = (await client.list_resources()).resources
                assert [each.uri for each in resources] == [f"ragcache://{collection}/{document}"]
                other = {"tides": "boats", "boats": "tides"}[collection]
                hidden = await client.call_tool("search", {"query": "x", "collection": other})
                assert "UnknownCollection" in hidden.content[0].text
        refused = httpx.post(f"{url}/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == 'Bearer realm="ragcache"'


@pytest.mark.slow
async def test_documents_are_stored_where_the_service_allows(
    keyed: tuple[RagCache, dict[str, str]],
) -> None:
    rag, keys = keyed
    with serving(rag, mcp_ingest=True) as (_, url):
        async with connected(url, keys["tenant"]) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == [*READ, "ingest"]
            assert not tools[-1].annotations.read_only_hint
            note = {"id": "crew", "text": "The crew is four.", "metadata": {"year": 2024}}
            wanted = {"collection": "crews", "documents": [note]}
            stored = await client.call_tool("ingest", wanted)
            assert stored.structured_content == {"added": 1, "updated": 0, "unchanged": 0}
            wanted = {"collection": "crews", "document": "crew"}
            read = (await client.call_tool("get_document", wanted)).structured_content
            assert read["metadata"] == {"year": 2024}
    assert [row.name for row in rag.collections.page().items] == ["tides"]


@pytest.mark.slow
async def test_resources_are_listed_in_pages(tmp_path: Path, quick_reader: LoadedModel) -> None:
    from mcp import Client

    from ragcache_api.mcp.server import create_mcp_server
    from ragcache_api.mcp.tools import McpSession

    with RagCache.open(tmp_path / "many", quick_reader) as rag:
        for name, number in (("a", 100), ("b", 0), ("c", 30), ("d é", 1)):
            rag.collections.create(name)
            texts = [_note(f"{n:03} ?/", f"Note {n}.") for n in range(number)]
            if texts:
                rag.ingest(name, texts)
        rag.collections.set_description("a", "Notes by number.")
        session = McpSession(rag, ask=lambda _: None)  # type: ignore[arg-type,return-value]
        async with Client(create_mcp_server(lambda _: session)) as client:
            found = (await client.call_tool("list_collections", {})).structured_content
            described = {each["name"]: each["description"] for each in found["collections"]}
            assert described["a"] == "Notes by number."
            assert described["b"] == "no documents yet"
            uris, cursor, pages = [], None, 0
            while pages == 0 or cursor is not None:
                page = await client.list_resources(cursor=cursor)
                uris += [each.uri for each in page.resources]
                cursor, pages = page.next_cursor, pages + 1
            assert pages == 2
            assert len(uris) == len(set(uris)) == 131
            [content] = (await client.read_resource("ragcache://d%20%C3%A9/000%20%3F%2F")).contents
            assert content.text == "Note 0."


def test_only_posts_are_taken(client: TestClient) -> None:
    for method in ("GET", "DELETE"):
        refused = client.request(method, "/mcp")
        assert refused.status_code == 405
    assert client.post("/mcp", content=b"{", headers={"Content-Type": "application/json"}).json()[
        "error"
    ]["code"] in (-32700, -32600)


def test_other_sites_are_refused(rag: RagCache) -> None:
    with client_of(rag) as client:
        refused = client.post("/mcp", json={}, headers={"Origin": "https://evil.example"})
        assert refused.json()["type"] == "urn:ragcache:problem:cross-site"


def test_without_the_sdk_the_path_says_what_to_install(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache_api.http.routes import mcp as routes

    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "ragcache_api.mcp.server", raising=False)
    routes._server.cache_clear()
    missing = client.post("/mcp", json={})
    assert missing.status_code == 501
    assert "pip install 'ragcache[mcp]'" in missing.json()["detail"]


@pytest.mark.slow
async def test_a_desktop_starts_the_command(state: Path) -> None:
    from mcp import Client, StdioServerParameters

    command = ["-m", "ragcache_api.cli.main", "mcp", "--state", str(state)]
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with Client(server) as client:
        await exercise(client)


@pytest.mark.slow
def test_the_command_ends_with_its_input(state: Path) -> None:
    command = [sys.executable, "-m", "ragcache_api.cli.main", "mcp", "--state", str(state)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"")
