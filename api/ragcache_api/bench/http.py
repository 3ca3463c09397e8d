"""What the HTTP layer adds: to the first token, to the rate of many streams, to a long listing.

The service and the calls that it is compared with run in one process, over one engine, in turn.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ragcache import Generation, RagCache
from ragcache.bench.ledger import fill_ledger
from ragcache.bench.machine import describe_machine
from ragcache.bench.shapes import LlamaShape, shaped_model
from ragcache_api.bench.clients import first_token, request, run_streams
from ragcache_api.bench.foreign import foreign_first_tokens
from ragcache_api.http import ServiceSettings, create_app

Report = Callable[[str], None]
_TOPICS = ("boats", "keys", "leave", "lamps", "ropes", "dogs", "stores", "fires")
_COLLECTION = "bench"


@dataclass(frozen=True, slots=True)
class HttpSetting:
    """runs: first tokens of each side. streams, tokens: that run at once, and of each. rounds: how
    often each side streams. shape: of the model that streams; the reader does too. modules, pages:
    of the listing. foreign: texts of another namespace."""

    runs: int = 60
    streams: int = 32
    tokens: int = 96
    rounds: int = 5
    shape: LlamaShape = LlamaShape(num_layers=6)
    modules: int = 100_000
    pages: int = 60
    foreign: int = 24


def bench_http(
    setting: HttpSetting | None = None, progress: Report = lambda _: None
) -> dict[str, Any]:
    """ttft_overhead_ms_p50: of the differences of neighbours. throughput_share: tokens a second of
    all streams over HTTP, of those of the calls beside; the median of the rounds, with six layers
    of the shape of all our figures, and (`_reader`) with the reader, whose steps are short.
    list_ms_p50: of a page of 100. foreign_ttft_ratio: see `foreign_first_tokens`."""
    setting = setting or HttpSetting()
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place:
        progress("ingesting documents")
        with RagCache.open(Path(place) / "state") as rag:
            for topic in _TOPICS:
                rag.ingest(_COLLECTION, [_document(topic)])
            with serving(rag) as port:
                result = _first_tokens(rag, port, setting, progress)
                result |= _throughput(rag, port, setting, "_reader", progress)
                progress("texts of another namespace")
                result |= foreign_first_tokens(rag, port, setting.foreign)
        progress("building a model of the shape")
        with RagCache.open(Path(place) / "shape", shaped_model(setting.shape)) as rag:
            rag.ingest(_COLLECTION, [_document(topic) for topic in _TOPICS])
            with serving(rag) as port:
                result |= _throughput(rag, port, setting, "", progress)
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
            body = _chat(rag, question, 2)
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


def _throughput(
    rag: RagCache, port: int, setting: HttpSetting, suffix: str, progress: Report
) -> dict[str, Any]:
    progress(f"{setting.streams} streams, in turn, of {rag.stats().model}")
    questions = [f"What of {_TOPICS[n % len(_TOPICS)]}?" for n in range(setting.streams)]
    told = {"min_tokens": setting.tokens, "stream_options": {"include_usage": True}}
    bodies = [_chat(rag, question, setting.tokens) | told for question in questions]
    rates: dict[str, list[float]] = {"served": [], "called": []}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as clients:
        sides: dict[str, Callable[[], tuple[int, float]]] = {
            "served": lambda: clients.submit(run_streams, port, bodies).result(),
            "called": lambda: asyncio.run(_called_streams(rag, questions, setting.tokens)),
        }
        for number in range(setting.rounds + 1):
            for side in sorted(sides, reverse=bool(number % 2)):
                count, seconds = sides[side]()
                rates[side].append(count / seconds)
    shares = [s / c for s, c in zip(rates["served"][1:], rates["called"][1:], strict=True)]
    return {
        f"throughput_share{suffix}": statistics.median(shares),
        f"throughput_share_by_round{suffix}": shares,
        f"called_tokens_per_second{suffix}": statistics.median(rates["called"][1:]),
        f"served_tokens_per_second{suffix}": statistics.median(rates["served"][1:]),
    }


def _chat(rag: RagCache, question: str, tokens: int) -> dict[str, Any]:
    return {
        "model": rag.stats().model, "messages": [{"role": "user", "content": question}],
        "collection": _COLLECTION, "max_tokens": tokens, "stream": True, "ignore_eos": True,
    }  # fmt: skip


async def _called_streams(rag: RagCache, questions: list[str], tokens: int) -> tuple[int, float]:
    async def run(question: str) -> int:
        # no token ends an answer, so that every one of them is text, and an event over HTTP
        generation = Generation(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
        stream = await rag.astream(question, collection=_COLLECTION, generation=generation)
        return sum([piece.chosen is not None async for piece in stream.pieces()])

    begin = time.perf_counter()
    counts = await asyncio.gather(*map(run, questions))
    return sum(counts), time.perf_counter() - begin


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
