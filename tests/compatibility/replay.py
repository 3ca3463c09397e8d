"""Opens a frozen state folder and repeats the recorded requests. Prints what comes back, as JSON.

Runs in a process of its own, so that no fixture of the tests stands between folder and code:
`python -m tests.compatibility.replay FOLDER SECRET`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from ragcache import RagCache
from ragcache.store.verify import verify
from ragcache_api.http import ServiceSettings, create_app

QUESTION = "Where does the spare key of the boathouse hang?"
MESSAGES = [{"role": "user", "content": QUESTION}]
MODEL = "reader"

Request = tuple[str, str, dict[str, Any] | None]
REQUESTS: dict[str, Request] = {
    "models": ("GET", "/v1/models", None),
    "collections": ("GET", "/v1/collections", None),
    "documents": ("GET", "/v1/collections/notes/documents", None),
    "document": ("GET", "/v1/collections/notes/documents/keys.md?text=true", None),
    "description": ("GET", "/v1/collections/notes/description", None),
    "jobs": ("GET", "/v1/jobs", None),
    "schemas": ("GET", "/v1/schemas", None),
    "answer": (
        "POST",
        "/v1/answers",
        {"question": QUESTION, "collection": "notes", "k": 1, "mode": "rooted", "confidence": True},
    ),
    "computed answer": (
        "POST",
        "/v1/answers",
        {"question": QUESTION, "collection": "notes", "k": 1, "mode": "exact", "citations": True},
    ),
    "refusal": (
        "POST",
        "/v1/answers",
        {"question": "Who painted the ceiling?", "collection": "notes", "filters": {"kind": "key"}},
    ),
    "prompt": (
        "POST",
        "/v1/prompts",
        {"prompt": '<prompt schema="boats"><pipit/>Where is she moored?</prompt>', "max_tokens": 4},
    ),
    "chat": (
        "POST",
        "/v1/chat/completions",
        {"model": MODEL, "messages": MESSAGES, "collection": "notes", "max_tokens": 16},
    ),
    "streamed chat": (
        "POST",
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": MESSAGES,
            "collection": "notes",
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "completion": (
        "POST",
        "/v1/completions",
        {"model": MODEL, "prompt": "The spare key", "max_tokens": 2, "temperature": 0},
    ),
    "response": (
        "POST",
        "/v1/responses",
        {"model": MODEL, "input": QUESTION, "max_output_tokens": 16, "store": False},
    ),
    "message": ("POST", "/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}),
    "count": ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
    "tokens": ("POST", "/tokenize", {"model": MODEL, "prompt": "The spare key"}),
    "vector stores": ("GET", "/v1/vector_stores", None),
    "search": ("POST", "/v1/vector_stores/notes/search", {"query": QUESTION}),
    "keys": ("GET", "/admin/keys", None),
    "tiers": ("GET", "/admin/tiers", None),
    "modules": ("GET", "/admin/modules", None),
    "verification": ("POST", "/admin/verify", None),
    "unknown collection": ("POST", "/v1/answers", {"question": "?", "collection": "none"}),
    "wrong option": ("POST", "/v1/answers", {"question": "?", "collection": "notes", "k": 0}),
    "unknown model": ("POST", "/v1/chat/completions", {"model": "none", "messages": MESSAGES}),
}


def replay(folder: Path, secret: str) -> dict[str, Any]:
    """Return what a folder holds and answers, and the responses to `REQUESTS`.

    Args:
        folder: The state folder, which is changed.
        secret: Its API key.
    """
    with RagCache.open(folder, embedding="none", force_modes=True) as rag:
        report = verify(rag.internals.shared.store)
        answer = rag.ask(QUESTION, collection="notes", k=1)
        held = {
            "documents": [each.source_id for each in rag.documents.get("notes")],
            "texts": rag.documents.texts("notes", ["keys.md", "boats.md"]),
            "description": rag.collections.description("notes"),
            "schemas": rag.schemas.names(),
            "states": report.states,
            "problems": [f"{each.kind} {each.subject}" for each in report.found],
            "answer": answer.text,
            "places": [[each.document, each.start, each.end] for each in answer.spans],
            "cached": answer.reuse.cached_tokens,
        }
        settings = ServiceSettings.read(state=str(folder), served_name=MODEL)
        app = create_app(rag, settings)
        with TestClient(app, base_url="http://localhost") as client:
            client.headers["Authorization"] = f"Bearer {secret}"
            responses = {name: _send(client, *request) for name, request in REQUESTS.items()}
    return {"held": held, "responses": responses, "routes": _routes(app.openapi())}


def _routes(described: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return by method and path the names that a request may give, and those that it must."""
    found = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parameters = operation.get("parameters", [])
            takes = {each["name"] for each in parameters}
            needs = {each["name"] for each in parameters if each.get("required")}
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for schema in _objects(content["schema"], described):
                    takes |= schema.get("properties", {}).keys()
                    needs |= set(schema.get("required", ()))
            found[f"{method.upper()} {path}"] = {"takes": sorted(takes), "needs": sorted(needs)}
    return found


def _objects(schema: dict[str, Any], described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that a schema of a body allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _objects(described["components"]["schemas"][name], described)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _objects(part, described)
    if "properties" in schema:
        yield schema


def _send(client: TestClient, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Return a response's status and body. Events become a list of their data."""
    response = client.request(method, path, json=body)
    if response.headers["content-type"].startswith("text/event-stream"):
        data = (line[6:] for line in response.text.splitlines() if line.startswith("data: {"))
        return {"status": response.status_code, "events": [json.loads(each) for each in data]}
    return {"status": response.status_code, "body": response.json()}


if __name__ == "__main__":
    print(json.dumps(replay(Path(sys.argv[1]), sys.argv[2])))
