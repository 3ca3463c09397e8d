"""The mixed load of `benchmarks/soak.py`: clients that ask, stream, leave, upload, delete and
administer, each at a rate of its own, and what became of every call."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

HANDBOOK, NOTES = "handbook", "notes"
NAMES = tuple(f"note-{number}" for number in range(32))
SETTLE_SECONDS = 15.0
"""Seconds after a disturbance in which its errors still count as its own."""
_TEXTS, _PROMPTS_OF_A_TEXT = 12, 2  # texts that clients paste meanwhile; prompts until one goes
_MOST_DELETED = 3  # notes, or an upload brings one back: what is stored stays about as much
_PATIENCE = 180.0  # seconds until a change must be acknowledged, and until its job must be done
_PAGES = (
    "/v1/collections",
    "/v1/models",
    "/v1/jobs?limit=20",
    f"/v1/collections/{NOTES}/documents",
    "/admin/stats",
    "/admin/tiers",
    "/admin/memory",
    "/admin/state",
    "/admin/evictions?limit=20",
    "/admin/modules?sort=nbytes&descending=true&limit=50",
    "/admin/modules?search=note&limit=20",
    "/admin/requests",
    "/admin/schemas",
    "/admin/keys",
    "/metrics",
    "/openapi.json",
    "/admin/",
)

CLIENTS: Mapping[str, tuple[float, Mapping[str, float]]] = {
    "asker": (3.0, {"answer": 1.0}),
    "streamer": (8.0, {"stream": 0.3, "leave": 0.7}),
    "chatter": (10.0, {"schema": 0.2, "tools": 0.2, "pasted": 0.2, "recurring": 0.4}),
    "editor": (15.0, {"upload": 0.5, "files": 0.2, "delete": 0.3}),
    "operator": (8.0, {"listing": 0.8, "key": 0.1, "evict": 0.1}),
    "builder": (90.0, {"pml": 0.5, "collection": 0.5}),
}
"""Clients by name: the mean seconds between two of its calls, and the shares of their kinds."""


class WrongResponse(Exception):
    """A response that the service must not give; `outcome` is its kind."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome


@dataclass(slots=True)
class MixedLoad:
    """Clients of one service. Thread-safe.

    An error counts as *excused* if its call overlaps a disturbance and it is one that a client
    can repeat: a connection that was cut off, a 503, an `error` event of a stream.
    """

    url: str
    headers: Mapping[str, str]
    """Headers with an operator's key."""
    handbook: Mapping[str, str]
    questions: tuple[str, ...]
    seed: int = 0
    documents: dict[str, str] = field(default_factory=dict)
    """Texts of the notes that are certainly stored, by name."""
    deleted: dict[str, float] = field(default_factory=dict)
    """Notes whose deletion was acknowledged, with the time."""
    counts: Counter[str] = field(default_factory=Counter)
    """Calls by kind and outcome, as `answer ok` and `answer excused 503`."""
    unexpected: list[str] = field(default_factory=list)
    """Errors that no disturbance explains."""
    _pasted: int = 0  # prompts with texts that nobody has ingested
    _seconds: dict[str, list[float]] = field(default_factory=dict)
    _disturbed: list[list[float]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Stores the handbook and all notes, and starts the clients."""
        rng = random.Random(f"{self.seed} notes")
        with self._client() as client:
            documents = [{"id": name, "text": text} for name, text in self.handbook.items()]
            self._store(client, HANDBOOK, {"json": {"documents": documents}})
            texts = {name: self._text(rng) for name in NAMES}
            documents = [{"id": name, "text": text} for name, text in texts.items()]
            self._change(client, texts, {"json": {"documents": documents}})
        for name, (mean, kinds) in CLIENTS.items():
            self._threads.append(
                threading.Thread(target=self._run, args=(name, mean, kinds), daemon=True)
            )
            self._threads[-1].start()

    def stop(self) -> None:
        """Lets every client end its last call."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_PATIENCE * 2)

    @contextmanager
    def disturbance(self) -> Iterator[None]:
        """Excuses what calls suffer within the block and `SETTLE_SECONDS` after it."""
        span = [time.monotonic(), float("inf")]
        self._disturbed.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic() + SETTLE_SECONDS

    def take_seconds(self) -> dict[str, list[float]]:
        """The durations of successful calls since the last such call, by kind."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def compare_documents(self) -> list[str]:
        """Differences between acknowledged changes and what the service holds."""
        with self._client() as client:
            path = f"/v1/collections/{NOTES}/documents?limit=1000"
            listed = {each["id"] for each in _json(client.get(path))["items"]}
        lost = [f"{name} was stored and is gone" for name in self.documents.keys() - listed]
        return lost + [f"{name} was deleted and is there" for name in self.deleted.keys() & listed]

    def verify(self) -> dict[str, Any]:
        """The service's own comparison of every row with every blob."""
        with self._client() as client:
            report: dict[str, Any] = _json(client.post("/admin/verify"))
        return report

    def tiers(self) -> dict[str, list[int]]:
        """Bytes and states of each tier; empty without an answer."""
        with self._client() as client, suppress(httpx.HTTPError, WrongResponse):
            listed = _json(client.get("/admin/tiers", timeout=5))["items"]
            return {each["name"]: [each["used_bytes"], each["states"]] for each in listed}
        return {}

    def observed(self) -> int | None:
        """Number of texts that became modules by themselves; None without an answer."""
        with self._client() as client, suppress(httpx.HTTPError, WrongResponse):
            return len(_json(client.get("/admin/observed", timeout=5))["items"])
        return None

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=90)

    def _run(self, name: str, mean: float, kinds: Mapping[str, float]) -> None:
        rng = random.Random(f"{self.seed} {name}")
        with self._client() as client:
            while not self._stopped.wait(min(rng.expovariate(1 / mean), 5 * mean)):
                [kind] = rng.choices(list(kinds), list(kinds.values()))
                self._call(kind, client, rng)

    def _call(self, kind: str, client: httpx.Client, rng: random.Random) -> None:
        begun, outcome, detail = time.monotonic(), "ok", ""
        try:
            getattr(self, f"_do_{kind}")(client, rng)
        except httpx.HTTPError as error:
            outcome, detail = "cut off", repr(error)
        except WrongResponse as error:
            outcome, detail = error.outcome, str(error)
        except Exception as error:  # a response without an expected field: the load goes on
            outcome, detail = "malformed", repr(error)
        self._note(kind, outcome, detail, begun)

    def _note(self, kind: str, outcome: str, detail: str, begun: float) -> None:
        ended = time.monotonic()
        repeatable = outcome in ("cut off", "503", "error event", "stale")
        excused = repeatable and any(b <= ended and begun <= e for b, e in self._disturbed)
        with self._lock:
            self.counts[f"{kind} excused {outcome}" if excused else f"{kind} {outcome}"] += 1
            if outcome == "ok":
                self._seconds.setdefault(kind, []).append(round(ended - begun, 4))
            elif not excused:
                self.unexpected.append(f"{kind} {detail:.600}")

    def _repeat(self, call: Callable[[], httpx.Response], *statuses: int) -> httpx.Response:
        """Repeats a call that is safe to repeat while the service is away, as a client should."""
        until = time.monotonic() + _PATIENCE
        while True:
            begun = time.monotonic()
            try:
                response = call()
                if response.status_code != 503:
                    return _expect(response, *statuses)
                outcome, detail = "503", response.text
            except httpx.TransportError as error:
                outcome, detail = "cut off", repr(error)
            if begun > until:
                raise WrongResponse(outcome, f"{detail}, for {_PATIENCE:.0f} s")
            self._note("try", outcome, detail, begun)
            time.sleep(1)

    def _do_answer(self, client: httpx.Client, rng: random.Random) -> None:
        begun = time.monotonic()
        gone = {name for name, at in self.deleted.copy().items() if at < begun}
        if self.documents and rng.random() < 0.5:
            name = rng.choice(list(self.documents.copy()))
            body = {"question": f"What does {name} say?", "collection": NOTES, "k": 3}
        else:
            body = {"question": rng.choice(self.questions), "collection": HANDBOOK, "k": 4}
        answer = _json(client.post("/v1/answers", json=body | {"max_tokens": 8}))
        cited = {each["document"] for each in answer["sources"]}
        if stale := cited & gone & self.deleted.keys():
            raise WrongResponse("stale", f"cites {sorted(stale)}, which were deleted before")

    def _stream(self, rng: random.Random) -> dict[str, Any]:
        return {
            "question": rng.choice(self.questions),
            "collection": HANDBOOK,
            "stream": True,
            "max_tokens": 24,
            "min_tokens": 24,
            "ignore_eos": True,
            "extractive": False,
        }

    def _do_stream(self, client: httpx.Client, rng: random.Random) -> None:
        with client.stream("POST", "/v1/answers", json=self._stream(rng)) as events:
            _expect(events, 200)
            lines = [line for line in events.iter_lines() if line]
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        if names[-1] == "error":
            raise WrongResponse("error event", lines[-1])
        if names[0] != "sources" or names[-1] != "answer":
            raise WrongResponse("malformed", f"events {names}")

    def _do_leave(self, client: httpx.Client, rng: random.Random) -> None:
        """Closes the connection before the response, or after some lines of it."""
        if rng.random() < 0.3:
            with suppress(httpx.ReadTimeout):
                client.post(
                    "/v1/answers", json=self._stream(rng), timeout=httpx.Timeout(5, read=0.03)
                )
            return
        with client.stream("POST", "/v1/answers", json=self._stream(rng)) as events:
            _expect(events, 200)
            for _ in zip(events.iter_lines(), range(rng.randint(1, 30)), strict=False):
                pass

    def _do_schema(self, client: httpx.Client, rng: random.Random) -> None:
        name = f"place{rng.randrange(1000)}"
        word = {"type": "string", "pattern": "^[a-z]{1,20}$"}  # the reader refuses empty strings
        fields = {name: word, "sure": {"type": "boolean"}}
        schema = {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "found", "schema": schema}}
        choice = self._chat(client, rng, HANDBOOK, response_format=form, max_tokens=64)
        if choice["finish_reason"] == "stop":
            found = json.loads(choice["message"]["content"])
            if found.keys() != fields.keys():
                raise WrongResponse("malformed", f"{found} has not the fields {list(fields)}")

    def _do_tools(self, client: httpx.Client, rng: random.Random) -> None:
        parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
        function = {"name": f"look_up_{rng.randrange(50)}", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        self._chat(client, rng, HANDBOOK, tools=tools, max_tokens=12)

    def _do_pasted(self, client: httpx.Client, rng: random.Random) -> None:
        """A chat whose message holds the text of a stored document."""
        text = rng.choice(list(self.handbook.values()))
        self._chat(client, rng, None, before=f"{text}\n\n", max_tokens=8)

    def _do_recurring(self, client: httpx.Client, rng: random.Random) -> None:
        """A chat whose client retrieves by itself, from texts that nobody has ingested."""
        self._pasted += 1
        newest = self._pasted // _PROMPTS_OF_A_TEXT
        chosen = rng.sample(range(newest, newest + _TEXTS), 2)
        texts = [self._text(random.Random(f"{self.seed} text {each}"), 12) for each in chosen]
        sources = "".join(f"<source>{text}</source>\n" for text in texts)
        self._chat(client, rng, None, before=f"Answer from these.\n{sources}\n", max_tokens=8)

    def _chat(
        self,
        client: httpx.Client,
        rng: random.Random,
        collection: str | None,
        before: str = "",
        **more: Any,
    ) -> dict[str, Any]:
        messages = [{"role": "user", "content": before + rng.choice(self.questions)}]
        body = {"messages": messages, "collection": collection, **more}
        answer = _json(client.post("/v1/chat/completions", json=body))
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def _do_upload(self, client: httpx.Client, rng: random.Random) -> None:
        gone = sorted(self.deleted)
        name = rng.choice(gone if len(gone) > _MOST_DELETED else NAMES)
        text = self._text(rng)
        self._change(client, {name: text}, {"json": {"documents": [{"id": name, "text": text}]}})

    def _do_files(self, client: httpx.Client, rng: random.Random) -> None:
        texts = {name: self._text(rng) for name in rng.sample(NAMES, 2)}
        pages = {name: f"<html><body><p>{text}</p></body></html>" for name, text in texts.items()}
        files = [("files", (name, page, "text/html")) for name, page in pages.items()]
        self._change(client, texts, {"files": files})

    def _change(self, client: httpx.Client, texts: Mapping[str, str], body: dict[str, Any]) -> None:
        """Stores notes; they are unknown until the upload is acknowledged."""
        for name in texts:
            self.documents.pop(name, None)
            self.deleted.pop(name, None)
        self._store(client, NOTES, body)
        self.documents.update(texts)

    def _store(self, client: httpx.Client, collection: str, body: dict[str, Any]) -> None:
        path = f"/v1/collections/{collection}/documents"
        headers = {"Idempotency-Key": f"{self.seed}-{time.time_ns()}"}
        job = self._repeat(partial(client.post, path, headers=headers, **body), 202).json()["id"]
        until = time.monotonic() + _PATIENCE
        read = partial(client.get, f"/v1/jobs/{job}")
        while (found := self._repeat(read, 200).json())["status"] != "done":
            if time.monotonic() > until or found["status"] in ("failed", "canceled"):
                raise WrongResponse("lost job", json.dumps(found))
            time.sleep(0.5)

    def _do_delete(self, client: httpx.Client, rng: random.Random) -> None:
        name = rng.choice(NAMES)
        self.documents.pop(name, None)
        path = f"/v1/collections/{NOTES}/documents/{name}"
        self._repeat(partial(client.delete, path), 200, 204, 404)
        self.deleted[name] = time.monotonic()

    def _text(self, rng: random.Random, most: int = 40) -> str:
        sentences = [
            s for text in self.handbook.values() for s in text.split(". ") if "\n" not in s
        ]
        chosen = rng.choices(sentences, k=rng.randint(5, most))
        return f"Version {rng.randrange(10**9)}. " + ". ".join(chosen) + "."

    def _do_listing(self, client: httpx.Client, rng: random.Random) -> None:
        _expect(client.get(rng.choice(_PAGES)), 200)

    def _do_key(self, client: httpx.Client, rng: random.Random) -> None:
        """Makes a key, uses it, revokes it."""
        namespace = rng.choice(("default", "tenant"))
        body = {"name": f"soak-{rng.randrange(100)}", "namespace": namespace}
        made = _expect(client.post("/admin/keys", json=body), 201).json()
        own = {"Authorization": f"Bearer {made['secret']}"}
        _expect(client.get("/v1/collections", headers=own), 200)
        self._repeat(partial(client.delete, f"/admin/keys/{made['id']}"), 200)

    def _do_evict(self, client: httpx.Client, rng: random.Random) -> None:
        documents = rng.sample(sorted(self.handbook), 3)
        wanted = {"collection": HANDBOOK, "documents": documents, "tier": "host"}
        _expect(client.post("/admin/evict", json=wanted), 200)

    def _do_pml(self, client: httpx.Client, rng: random.Random) -> None:
        """Replaces a schema, and asks over it."""
        text = self._text(rng).replace("&", "and").replace("<", "")
        schema = f'<schema name="soak"><module name="rule">{text}</module></schema>'
        _expect(client.post("/v1/schemas", json={"text": schema}), 200, 201)
        prompt = '<prompt schema="soak"><rule/>What is the rule?</prompt>'
        _json(client.post("/v1/prompts", json={"prompt": prompt, "max_tokens": 4}))

    def _do_collection(self, client: httpx.Client, rng: random.Random) -> None:
        """Makes a collection with a document, asks it, deletes it."""
        name = f"passing-{rng.randrange(10**6)}"
        self._store(client, name, {"json": {"documents": [{"id": "a", "text": self._text(rng)}]}})
        body = {"question": "What does it say?", "collection": name, "max_tokens": 4}
        _json(client.post("/v1/answers", json=body))
        self._repeat(partial(client.delete, f"/v1/collections/{name}"), 200, 204, 404)


def read_handbook(folder: Path) -> dict[str, str]:
    """The texts of a folder of Markdown files, by file name."""
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.md"))}


def _expect(response: httpx.Response, *statuses: int) -> httpx.Response:
    if response.status_code not in statuses:
        response.read()
        path = response.request.url.path
        raise WrongResponse(str(response.status_code), f"{path} {response.text[:400]}")
    return response


def _json(response: httpx.Response) -> Any:
    return _expect(response, 200).json()
