"""`ragcache ask` and `chat --server`: a running service answers, and no model is loaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError, ServiceFailed
from ragcache.models import LoadedModel
from ragcache_api.cli.chat import ServedTalk
from ragcache_api.cli.served import ServedAnswer
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of
from tests.api.cli.test_chat import type_lines
from tests.api.http.conftest import serving

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
               "headings": ["Keys"], "prefix": "It hangs in the ", "suffix": ".", "choice": 0,
               "mark": None}],
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
        "question": "Where?", "collection": "notes", "k": 2, "stream": True,
        "filters": {"kind": "key"},
    }  # fmt: skip
    run(*asked, "--mode", "primed:4")
    assert Service.asked[-1][0]["mode"] == "primed:4", "without it, the service has its own"
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


@pytest.fixture
def service(ingested: Path, quick_reader: LoadedModel, socket_enabled: None) -> Iterator[str]:
    """The URL of a real service over the notes."""
    with RagCache.open(ingested, quick_reader) as rag, serving(rag) as (_, url):
        yield url


def test_a_service_talks(run: Run, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--server", service, "--max-tokens", 4, "--min-confidence", 0, "-k", 1)
    type_lines(monkeypatch, QUESTION, "How many days of leave are there?", "", "never read")
    status, out, err = run("chat", "-c", "notes", *asked)
    assert (status, err) == (0, "")
    assert [f"{name}.md#1" in out for name in ("keys", "leave", "boats")] == [True, True, False]
    assert out.count("mode recognized:rooted · prompt") == 2
    type_lines(monkeypatch, "Say something.")
    status, out, err = run("chat", "--server", service, "--max-tokens", 2)
    assert (status, err) == (0, "")
    assert " · prompt " in out


def test_a_chat_ends_where_its_first_message_fails(
    run: Run, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, QUESTION, QUESTION)
    error = error_of(run("chat", "-c", "absent", "--server", service), "ServiceFailed")
    assert "absent" in error
    type_lines(monkeypatch, QUESTION)
    error_of(run("chat", "--server", "http://127.0.0.1:9"), "ServiceFailed")


def test_later_failures_leave_the_conversation(
    service: str, capsys: pytest.CaptureFixture[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "Hello", "word " * 9000, QUESTION)
    status, out, err = run("chat", "-c", "notes", "--server", service, "--max-tokens", 2)
    assert status == 0
    assert "the oldest question is forgotten" in err
    assert "PromptTooLong: " in err
    assert "keys.md#1" in out
    talk = ServedTalk(service, None, {"max_tokens": 2})
    talk.said = [
        {"role": "user", "content": "word " * 9000},
        {"role": "assistant", "content": "a"},
    ]
    talk.say("Hello")
    assert talk.said[0] == {"role": "user", "content": "Hello"}


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_and_its_request(socket_enabled: None) -> None:
    command = (sys.executable, "-m", "ragcache_api.cli.main", "chat", "--server")
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(60)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind `&`
        chat = subprocess.Popen(
            (*command, url), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=os.environ,
        )  # fmt: skip
        signal.signal(signal.SIGINT, inherited)
        assert chat.stdin is not None
        chat.stdin.write("Where?\n")
        chat.stdin.flush()
        with closing(listening.accept()[0]) as request:
            request.settimeout(60)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
            delta = {"choices": [{"index": 0, "delta": {"content": "It hangs"}}]}
            assert b"POST /v1/chat/completions" in request.recv(65536)
            request.sendall(head + b"data: " + json.dumps(delta).encode() + b"\n\n")
            assert chat.stdout is not None
            assert chat.stdout.read(8) == "It hangs"
            chat.send_signal(signal.SIGINT)
            while request.recv(65536):  # the body; then the end of the connection
                pass
        _, err = chat.communicate(timeout=60)
    assert chat.returncode == 130
    assert err == "\ninterrupted: the conversation is not kept, the collection is as it was\n"
