"""`ragcache ask --server`: a running service answers, and no model is loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from ragcache.errors import ConfigurationError, ServiceFailed
from ragcache_api.cli.served import ServedAnswer
from tests.api.cli.conftest import Run, error_of, json_of

ANSWER = {
    "id": "a1", "question": "Where?", "text": "red cupboard", "finish_reason": "stop",
    "confidence": None,
    "mode": "rooted",
    "sources": [{"document": "keys.md", "module": "keys.md#1", "uri": "", "score": 0.1,
                 "tier": "host", "scaffold": "", "bm25": 1.5, "cosine": None,
                 "page": None, "headings": [], "rerank": None}],
    "reuse": {"prompt_tokens": 9, "cached_tokens": 6, "computed_tokens": 3, "shared_tokens": 0},
    "timings": {"first_token": 0.1, "total": 0.2},
    "spans": [{"document": "keys.md", "module": "keys.md#1", "start": 23, "end": 35, "page": 2,
               "headings": ["Keys"], "prefix": "It hangs in the ", "suffix": ".", "choice": 0}],
}  # fmt: skip


class Service(BaseHTTPRequestHandler):
    """Answers as `POST /v1/answers` with `stream` does."""

    asked: ClassVar[list[tuple[dict[str, Any], str | None]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Service.asked.append((body, self.headers["Authorization"]))
        if body["collection"] == "absent":
            problem = json.dumps({"title": "Not found", "detail": "there is no collection"})
            self._send(404, "application/problem+json", problem)
            return
        if body["collection"] == "moved":
            self.send_response(302)
            self.send_header("Location", "/v1/elsewhere")
            self.end_headers()
            return
        tokens = [("token", {"text": text}) for text in ("red", " cupboard")]
        events = [("sources", ANSWER["sources"]), *tokens, ("answer", ANSWER)]
        if body["collection"] == "failing":
            events[-1] = ("error", {"detail": "no room"})
        lines = "".join(f"event: {n}\ndata: {json.dumps(v)}\n\n: ping\n\n" for n, v in events)
        self._send(200, "text/event-stream", lines)

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server(socket_enabled: None) -> Iterator[str]:
    Service.asked.clear()
    http = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_service_answers(run: Run, server: str) -> None:
    asked = ("ask", "Where?", "-c", "notes", "--server", server, "--key", "rc-1")
    printed = json_of(run(*asked, "-k", 2, "--filter", '{"kind": "key"}', "--json"))
    assert printed == ANSWER
    [(body, key)] = Service.asked
    assert key == "Bearer rc-1"
    assert body == {
        "question": "Where?", "collection": "notes", "k": 2, "mode": "rooted", "stream": True,
        "filters": {"kind": "key"},
    }  # fmt: skip
    for way in ("--stream", "--no-stream"):
        status, out, _ = run(*asked, way)
        assert status == 0
        assert out.startswith("red cupboard\n")
        assert "keys.md#1  bm25 1.50  host" in out
        assert "It hangs in the »red cupboard«. (keys.md, page 2, characters 23 to 35)" in out


def test_errors_of_a_service_are_named(run: Run, server: str) -> None:
    asked = ("ask", "Where?", "--server", server, "-c")
    assert "there is no collection" in error_of(run(*asked, "absent"), "ServiceFailed")
    assert "302" in error_of(run(*asked, "moved", "--key", "rc-1"), "ServiceFailed")
    assert len(Service.asked) == 2, "the key goes nowhere else"
    with pytest.raises(ServiceFailed, match="no room"):
        list(ServedAnswer.ask(server, None, {"collection": "failing"}))


def test_a_service_that_is_not_there_is_named(socket_enabled: None) -> None:
    with pytest.raises(ServiceFailed, match="no service answers at http:"):
        ServedAnswer.ask("http://127.0.0.1:9", None, {})
    with pytest.raises(ConfigurationError, match="takes a URL"):
        ServedAnswer.ask("localhost", None, {})
