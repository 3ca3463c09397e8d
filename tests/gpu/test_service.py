"""The service over a model on a GPU: chats at once over HTTP, whose answers follow JSON schemas."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

for library in ("fastapi", "httpx", "llguidance", "sqlalchemy"):
    pytest.importorskip(library, reason="the service needs the whole package")

pytestmark = pytest.mark.gpu

DOCUMENTS = {
    "boats.md": "The survey boat Pipit is moored at the north quay. Marta Quill serviced it.",
    "leave.md": "Everybody has 26 days of leave a year. Requests go to Ines Marlow.",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "days"],
    "additionalProperties": False,
}


def test_chats_over_http_keep_their_schema(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from ragcache import RagCache, SourceDocument
    from ragcache_api.http import create_app

    documents = [SourceDocument(name, text) for name, text in DOCUMENTS.items()]
    sizes: dict[str, Any] = {"device_bytes": "256MiB", "private_bytes": "256MiB"}
    with RagCache.open(tmp_path, device="cuda", force_modes=True, **sizes) as rag:
        rag.ingest("notes", documents)
        client = TestClient(create_app(rag), base_url="http://localhost")
        with client, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(partial(ask, client), range(24)))
    for number, answer in enumerate(answers):
        [choice] = answer["choices"]
        if number % 3:
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert found.keys() == {"name", "days"}
            assert len(found["name"]) <= 12
            assert 0 <= found["days"] <= 99
        assert answer["usage"]["completion_tokens"] > 0


def ask(client: Any, number: int) -> Any:
    """A chat. Two of three have the schema, one of them sampled."""
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    body: dict[str, Any] = {
        "model": "ragcache-reader",
        "messages": [{"role": "user", "content": f"{DOCUMENTS['leave.md']} Who, and how many?"}],
        "max_tokens": 80,
        "temperature": 1.0 if number % 3 == 1 else 0.0,
        "seed": number,
    }
    if number % 3:
        body["response_format"] = form
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()
