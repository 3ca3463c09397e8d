"""The load of `ragcache bench cluster`: clients of a service on this machine, and what they get."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

_COLLECTION = "bench"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client got. seconds: until its end; cut: a stream that ended before its answer."""

    status: int
    seconds: float
    body: bytes = b""
    cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def failed(self) -> bool:
        return self.status != 200 or self.cut


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Calls a service on this machine, over a new connection each time."""

    port: int

    def call(self, method: str, path: str, body: Any = None) -> Reply:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        begun, status, content = time.perf_counter(), 0, b""
        with suppress(OSError, http.client.HTTPException):
            sent = None if body is None else json.dumps(body)
            link.request(method, path, sent, {"Content-Type": "application/json"})
            response = link.getresponse()
            content = response.read()
            status = response.status
        link.close()
        stream = isinstance(body, dict) and body.get("stream", False)
        cut = stream and status == 200 and not content.endswith((b"[DONE]\n\n", b"}\n\n"))
        cut = cut or (stream and b"event: error" in content)
        return Reply(status, time.perf_counter() - begun, content, cut)

    def get(self, path: str) -> Any:
        reply = self.call("GET", path)
        if reply.status != 200:
            raise RuntimeError(f"GET {path}: {reply.status} {reply.body[:500]!r}")
        return reply.json

    def ask(self, question: str, **more: Any) -> Reply:
        asked = {"question": question, "collection": _COLLECTION, "k": 4, "max_tokens": 1}
        return self.call("POST", "/v1/answers", asked | more)

    def chat(self, question: str, tokens: int, **more: Any) -> Reply:
        """An answer that has so many tokens, whatever the model says."""
        messages = [{"role": "user", "content": question}]
        asked = {"model": _model(self), "messages": messages, "collection": _COLLECTION, "k": 4}
        asked |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return self.call("POST", "/v1/chat/completions", asked | {"extractive": False} | more)

    def ingest(self, texts: Sequence[str]) -> float:
        """Seconds until documents are stored."""
        documents = [{"id": f"{n}", "text": text} for n, text in enumerate(texts)]
        begun = time.perf_counter()
        path = f"/v1/collections/{_COLLECTION}/documents"
        number = self.call("POST", path, {"documents": documents}).json["id"]
        while (job := self.get(f"/v1/jobs/{number}"))["status"] in ("queued", "running"):
            time.sleep(0.2)
        if job["status"] != "done":
            raise RuntimeError(f"the documents were not stored: {job}")
        return time.perf_counter() - begun

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The replicas that have said their session, by name."""
        listed = self.get("/admin/replicas")["items"]
        return {each["name"]: each for each in listed if each["session"] != each["name"]}

    def wait_for(self, replicas: int, seconds: float = 240.0, without: Sequence[str] = ()) -> float:
        """Seconds until there are so many replicas, beside those named."""
        begun = time.perf_counter()
        while len(self.replicas().keys() - set(without)) != replicas:
            if time.perf_counter() - begun > seconds:
                raise RuntimeError(f"there are not {replicas} replicas after {seconds:.0f} s")
            time.sleep(0.2)
        return time.perf_counter() - begun

    def encoded(self) -> dict[str, int]:
        """The states that each replica has encoded."""
        counted: dict[str, int] = {}
        for line in self.call("GET", "/metrics").body.decode().splitlines():
            if line.startswith("ragcache_misses_total{"):
                labels, _, value = line.rpartition(" ")
                counted[labels.split('"')[1]] = int(float(value))
        return counted


@cache
def _model(client: BenchClient) -> str:
    """The name of the model that a service serves."""
    return str(client.get("/v1/models")["data"][0]["id"])


@dataclass(slots=True)
class Load:
    """Clients that call until the load is stopped."""

    replies: list[Reply] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def add(self, calls: Iterator[Callable[[], Reply]]) -> None:
        """Starts a client that makes these calls one after another."""

        def run() -> None:
            for call in calls:
                if self._stopped.is_set():
                    return
                self.replies.append(call())

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def wait(self) -> list[Reply]:
        """All replies, when the clients have no more calls."""
        for thread in self._threads:
            thread.join()
        return self.replies

    def stop(self) -> None:
        """Lets each client end its last call."""
        self._stopped.set()
        self.wait()


def repeat_calls(
    call: Callable[[str], Reply], questions: Sequence[str], seed: int
) -> Iterator[Callable[[], Reply]]:
    """Calls for questions, for ever, in an order of their own."""
    rng = random.Random(seed)
    return (partial(call, rng.choice(questions)) for _ in count())


def ask_all(client: BenchClient, questions: Sequence[str], askers: int) -> list[Reply]:
    """Each question once, by clients that share them; all must be answered."""
    load = Load()
    for number in range(askers):
        load.add(partial(client.ask, question) for question in questions[number::askers])
    return check_replies(load.wait())


def check_replies(replies: list[Reply]) -> list[Reply]:
    """The replies, all of which must be answers."""
    if failed := [each for each in replies if each.failed]:
        raise RuntimeError(
            f"{len(failed)} of {len(replies)} questions failed, one with status "
            f"{failed[0].status}: {failed[0].body[:500]!r}"
        )
    return replies
