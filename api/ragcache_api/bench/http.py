"""What the HTTP layer adds: to the first token, to the rate of many streams, to a long listing.

The service and the calls that it is compared with run in one process, over one engine, in turn.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ragcache import Generation, RagCache
from ragcache.bench.ledger import fill_ledger
from ragcache.bench.machine import describe_machine
from ragcache.bench.shapes import LlamaShape, shaped_model
from ragcache_api.bench.clients import first_token, request
from ragcache_api.bench.foreign import foreign_first_tokens
from ragcache_api.bench.streams import chat, closed_loop, throughput
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.serving import long_lived

Report = Callable[[str], None]
_TOPICS = ("boats", "keys", "leave", "lamps", "ropes", "dogs", "stores", "fires")
_COLLECTION = "bench"


@dataclass(frozen=True, slots=True)
class HttpSetting:
    """runs: first tokens of each side. streams: clients at once; requests: of each, one after
    another; tokens: of an answer on average, from half of it to half more. rounds: in each, both
    sides run twice. shape: of the model that streams; the reader does too. modules, pages: of the
    listing. foreign: texts of another namespace."""

    runs: int = 60
    streams: int = 32
    requests: int = 2
    tokens: int = 64
    rounds: int = 8
    shape: LlamaShape = LlamaShape(num_layers=6)
    modules: int = 100_000
    pages: int = 60
    foreign: int = 24


def bench_http(
    setting: HttpSetting | None = None, progress: Report = lambda _: None
) -> dict[str, Any]:
    """ttft_overhead_ms_p50: of the differences of neighbours. throughput_share: see
    `throughput`; with six layers of the shape of all our figures, and (`_reader`) with the reader,
    whose steps are short. list_ms_p50: of a page of 100. foreign_ttft_ratio: see
    `foreign_first_tokens`."""
    setting = setting or HttpSetting()
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place:
        progress("ingesting documents")
        with RagCache.open(Path(place) / "state") as rag:
            for topic in _TOPICS:
                rag.ingest(_COLLECTION, [_document(topic)])
            with serving(rag) as port:
                result = _first_tokens(rag, port, setting, progress)
                result |= _streams(rag, port, setting, "_reader", progress)
                progress("texts of another namespace")
                result |= foreign_first_tokens(rag, port, setting.foreign)
        progress("building a model of the shape")
        with RagCache.open(Path(place) / "shape", shaped_model(setting.shape)) as rag:
            rag.ingest(_COLLECTION, [_document(topic) for topic in _TOPICS])
            with serving(rag) as port:
                result |= _streams(rag, port, setting, "", progress)
        progress(f"filling a ledger with {setting.modules:,} modules")
        many = Path(place) / "many"
        many.mkdir()
        fill_ledger(many, setting.modules)
        with RagCache.open(many) as rag, serving(rag) as port:
            result |= _listing(port, setting, progress)
    return result | {"setting": asdict(setting), "machine": describe_machine()}


@contextmanager
def serving(rag: RagCache) -> Iterator[int]:
    """A service in a thread of this process; yields its port."""
    app = create_app(rag, ServiceSettings.read(page=False))
    config = uvicorn.Config(
        app, port=0, log_level="error", access_log=False,
        timeout_keep_alive=75,  # as in `serve`; a slow call between two requests ends no connection
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="ragcache-bench-http")
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with long_lived():
            yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _first_tokens(
    rag: RagCache, port: int, setting: HttpSetting, progress: Report
) -> dict[str, Any]:
    progress("first tokens, in turn")
    called: list[float] = []
    served: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(setting.runs + 5):
            question = f"What of {_TOPICS[number % len(_TOPICS)]}?"
            body = chat(rag, _COLLECTION, question, 2)
            if number % 2:
                served.append(first_token(link, request("/v1/chat/completions", body, port)))
                called.append(_called(rag, question))
            else:
                called.append(_called(rag, question))
                served.append(first_token(link, request("/v1/chat/completions", body, port)))
    called, served = called[5:], served[5:]
    p50 = statistics.median(s - c for s, c in zip(served, called, strict=True))
    return {
        "ttft_overhead_ms_p50": 1000 * p50,
        "ttft_called_ms_p50": 1000 * statistics.median(called),
        "ttft_served_ms_p50": 1000 * statistics.median(served),
    }


def _called(rag: RagCache, question: str) -> float:
    begin = time.perf_counter()
    generation = Generation(max_new_tokens=2, ignore_eos=True)
    with rag.stream(question, collection=_COLLECTION, generation=generation) as stream:
        for piece in stream.pieces():
            if piece.text:
                seconds = time.perf_counter() - begin
                stream.result()
                return seconds
    raise AssertionError("an answer without a token")


def _streams(
    rag: RagCache, port: int, setting: HttpSetting, suffix: str, progress: Report
) -> dict[str, Any]:
    load = closed_loop(_TOPICS, setting.streams, setting.requests, setting.tokens)
    measured = throughput(rag, port, _COLLECTION, load, setting.rounds, progress)
    return {f"{name}{suffix}": value for name, value in measured.items()}


def _listing(port: int, setting: HttpSetting, progress: Report) -> dict[str, Any]:
    progress("listing modules, page after page")
    sorts = ("id", "name", "nbytes", "hits", "last_use")
    by_sort: dict[str, list[float]] = {}
    for sort in sorts:
        query = f"/admin/modules?limit=100&sort={sort}&descending={sort != 'id'}"
        cursor, times = None, by_sort.setdefault(sort, [])
        for _ in range(max(1, setting.pages // len(sorts))):
            begin = time.perf_counter()
            page = _get(port, query + (f"&cursor={cursor}" if cursor else ""))
            times.append(time.perf_counter() - begin)
            cursor = page["next"]
            if cursor is None:
                break
    every = [seconds for times in by_sort.values() for seconds in times]
    return {
        "list_ms_p50": 1000 * statistics.median(every),
        "list_ms_p50_by_sort": {
            sort: 1000 * statistics.median(times) for sort, times in by_sort.items()
        },
    }


def _get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://localhost:{port}{path}") as response:
        return json.load(response)


def _document(topic: str) -> Any:
    from ragcache import SourceDocument

    text = " ".join(f"Rule {n} of {topic}: they are kept in place {n}." for n in range(24))
    return SourceDocument(topic, f"# {topic}\n\n{text}")
