"""Cost of the HTTP layer: on the first token, on the rate of many streams, on a long listing.

The service and the calls that it is compared with run in one process, over one engine, in turn; its
clients run in another.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from harness import (
    BenchDTypeOption,
    JsonFile,
    LlamaShape,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
    shaped_model,
)
from service_clients import ClientProcess, request, run_clients
from tiers import fill_ledger

from ragcache import AsyncRagCache, GenerationParams, RagCache, SourceDocument
from ragcache.machine import frozen_heap
from ragcache_api.http import ServiceSettings, create_app

_TOPICS = ("boats", "keys", "leave", "lamps", "ropes", "dogs", "stores", "fires")
_COLLECTION = "bench"
_WORDS = ("mooring", "lantern", "ledger", "harbour", "cable", "winch", "survey", "tide", "signal")
_SENTENCES = 24
_OPENING: dict[str, Any] = {"embedding": "none", "force_modes": True}
Asked = tuple[str, int]
"""A question, and how many tokens its answer has."""


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
    dtype: Any = "auto"
    modules: int = 100_000
    pages: int = 60
    foreign: int = 24


def bench_http(
    setting: HttpSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """ttft_overhead_ms_p50: of the differences of neighbors. throughput_share: see
    `throughput`; with six layers of the shape of all our figures, and (`_reader`) with the reader,
    whose steps are short. list_ms_p50: of a page of 100. foreign_ttft_ratio: see
    `foreign_first_tokens`."""
    setting = setting or HttpSetting()
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place:
        progress("ingesting documents")
        with RagCache.open(Path(place) / "state", dtype=setting.dtype, **_OPENING) as rag:
            for topic in _TOPICS:
                rag.ingest(_COLLECTION, [_document(topic)])
            with serving(rag) as port:
                result = _first_tokens(rag, port, setting, progress)
                result |= _interfaces(rag, port, setting, progress)
                result |= _streams(rag, port, setting, "_reader", progress)
                progress("texts of another namespace")
                result |= foreign_first_tokens(rag, port, setting.foreign)
        progress("building a model of the shape")
        model = shaped_model(setting.shape, dtype=setting.dtype)
        with RagCache.open(Path(place) / "shape", model, **_OPENING) as rag:
            rag.ingest(_COLLECTION, [_document(topic) for topic in _TOPICS])
            with serving(rag) as port:
                result |= _streams(rag, port, setting, "", progress)
        progress(f"filling a ledger with {setting.modules:,} modules")
        many = Path(place) / "many"
        many.mkdir()
        fill_ledger(many, setting.modules)
        with RagCache.open(many, **_OPENING) as rag, serving(rag) as port:
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
        with frozen_heap():
            yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _first_tokens(
    rag: RagCache, port: int, setting: HttpSetting, progress: Progress
) -> dict[str, Any]:
    progress("first tokens, in turn")
    called: list[float] = []
    served: list[float] = []
    with ClientProcess(port) as client:
        for number in range(setting.runs + 5):
            question = f"What of {_TOPICS[number % len(_TOPICS)]}?"
            body = chat(rag, _COLLECTION, question, 2)
            if number % 2:
                served.append(client.first_token(request("/v1/chat/completions", body, port)))
                called.append(_called(rag, question))
            else:
                called.append(_called(rag, question))
                served.append(client.first_token(request("/v1/chat/completions", body, port)))
    called, served = called[5:], served[5:]
    p50 = statistics.median(s - c for s, c in zip(served, called, strict=True))
    return {
        "ttft_overhead_ms_p50": 1000 * p50,
        "ttft_called_ms_p50": 1000 * statistics.median(called),
        "ttft_served_ms_p50": 1000 * statistics.median(served),
    }


def bench_interfaces(setting: HttpSetting, progress: Progress) -> dict[str, Any]:
    """Measure first tokens of the interfaces alone."""
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place:
        progress("ingesting documents")
        with RagCache.open(Path(place) / "state", dtype=setting.dtype, **_OPENING) as rag:
            rag.ingest(_COLLECTION, [_document(topic) for topic in _TOPICS])
            with serving(rag) as port:
                result = _interfaces(rag, port, setting, progress)
    return result | {"setting": asdict(setting), "machine": describe_machine()}


def _interfaces(
    rag: RagCache, port: int, setting: HttpSetting, progress: Progress
) -> dict[str, Any]:
    """Measure first tokens of the same questions by each interface, in turn.

    interface_more_ms_p50: medians of the differences from the chat of the same question.
    """
    progress("first tokens by interface, in turn")
    times: dict[str, list[float]] = {}
    with ClientProcess(port) as client:
        for number in range(setting.runs + 5):
            bodies = interfaces(rag, f"What of {_TOPICS[number % len(_TOPICS)]}?")
            turn = number % len(bodies)
            for path in (*list(bodies)[turn:], *list(bodies)[:turn]):
                seconds = client.first_token(request(path, bodies[path], port))
                times.setdefault(path, []).append(seconds)
    kept = {path: each[5:] for path, each in times.items()}
    chats = kept.pop("/v1/chat/completions")
    return {
        "interface_ms_p50": {p: 1000 * statistics.median(each[5:]) for p, each in times.items()},
        "interface_more_ms_p50": {
            path: 1000 * statistics.median(o - c for o, c in zip(each, chats, strict=True))
            for path, each in kept.items()
        },
    }


def interfaces(rag: RagCache, question: str) -> dict[str, dict[str, Any]]:
    """Return the same streamed question in each interface, by path."""
    asked = chat(rag, _COLLECTION, question, 2)
    plain = {name: value for name, value in asked.items() if name not in ("messages", "max_tokens")}
    return {
        "/v1/chat/completions": asked,
        "/v1/messages": asked,
        "/v1/responses": plain | {"input": question, "max_output_tokens": 2},
    }


def _called(rag: RagCache, question: str) -> float:
    begin = time.perf_counter()
    generation = GenerationParams(max_tokens=2, ignore_eos=True, extractive=False)
    with rag.stream(question, collection=_COLLECTION, generation=generation) as stream:
        for piece in stream.pieces():
            if piece.text:
                seconds = time.perf_counter() - begin
                stream.result()
                return seconds
    raise AssertionError("an answer without a token")


def _streams(
    rag: RagCache, port: int, setting: HttpSetting, suffix: str, progress: Progress
) -> dict[str, Any]:
    load = closed_loop(_TOPICS, setting.streams, setting.requests, setting.tokens)
    measured = throughput(rag, port, _COLLECTION, load, setting.rounds, progress)
    return {f"{name}{suffix}": value for name, value in measured.items()}


def _listing(port: int, setting: HttpSetting, progress: Progress) -> dict[str, Any]:
    progress("listing modules, page after page")
    sorts = ("id", "name", "nbytes", "hits", "used_at")
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


def _document(topic: str) -> SourceDocument:
    text = " ".join(f"Rule {n} of {topic}: they are kept in place {n}." for n in range(24))
    return SourceDocument(topic, f"# {topic}\n\n{text}")


def foreign_first_tokens(rag: RagCache, port: int, runs: int) -> dict[str, Any]:
    """First tokens of chats that paste a text in, by who has ingested it.

    own: the asker. foreign: another namespace, which has just asked the same. unknown: nobody.
    foreign_ttft_ratio: the median over neighbors of foreign to unknown; 1 is equal. Makes keys, so
    that the service is closed to callers without one.
    """
    draw = random.Random(7)
    texts = [_text(draw) for _ in range(runs)]
    rag.within("red").ingest("texts", [SourceDocument(str(n), t) for n, t in enumerate(texts)])
    red, blue = (rag.keys.create(name, namespace=name)[1] for name in ("red", "blue"))
    name = rag.stats().model
    times: dict[str, list[float]] = {"own": [], "foreign": [], "unknown": []}
    with ClientProcess(port) as client:

        def ask(kind: str, text: str, key: str) -> None:
            body = {
                "model": name, "max_tokens": 2, "stream": True, "ignore_eos": True,
                "messages": [{"role": "user", "content": f"{text}\n\nWhat is kept there?"}],
            }  # fmt: skip
            sent = request("/v1/chat/completions", body, port, key)
            times[kind].append(client.first_token(sent))

        for number, text in enumerate(texts):
            ask("own", text, red)
            asked = [("foreign", text), ("unknown", _text(draw))]
            for kind, each in asked if number % 2 else reversed(asked):
                ask(kind, each, blue)
    ratios = [f / u for f, u in zip(times["foreign"], times["unknown"], strict=True)]
    return {
        "foreign_ttft_ratio": statistics.median(ratios),
        "ttft_ms_p50_by_owner": {k: 1000 * statistics.median(v) for k, v in times.items()},
    }


def _text(draw: random.Random) -> str:
    """As long as the others, and like none of them."""
    return " ".join(
        f"The {draw.choice(_WORDS)} of berth {draw.randrange(100, 999)} is by the "
        f"{draw.choice(_WORDS)} {draw.randrange(100, 999)}."
        for _ in range(_SENTENCES)
    )


def closed_loop(
    topics: Sequence[str], clients: int, requests: int, tokens: int
) -> list[list[Asked]]:
    """Draw the requests of each client, in order.

    Answers have from half of `tokens` to half more, so that no two clients stay in step.
    """

    def asked(client: int, number: int) -> Asked:
        part = (5 * client + 11 * number) % clients
        length = max(1, tokens // 2 + tokens * part // clients)
        return f"What of {topics[(client + number) % len(topics)]}?", length

    return [[asked(client, number) for number in range(requests)] for client in range(clients)]


def throughput(
    rag: RagCache,
    port: int,
    collection: str,
    load: list[list[Asked]],
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """throughput_share: tokens a second of all clients over HTTP, of those of calls in a loop as
    the service has it, over all rounds. A round is called, served, served, called, so that a
    machine which becomes slower or faster meanwhile favors neither. throughput_share_interval:
    where the share of such rounds lies in 90 of 100 cases (bootstrap). called_again_by_round: the
    last run of a round over the first, which should be 1 and tells how much the machine scatters.
    """
    name = f"{len(load)} streams of {rag.stats().model}"
    expected = sum(tokens for client in load for _, tokens in client)
    bodies = [[_told(rag, collection, *asked) for asked in client] for client in load]
    context = multiprocessing.get_context("spawn")
    runs: list[list[float]] = []
    with ProcessPoolExecutor(1, mp_context=context) as clients:

        def served() -> float:
            return _seconds(clients.submit(run_clients, port, bodies).result(), expected)

        def called() -> float:
            return _seconds(_called_all(rag, collection, load), expected)

        called(), served()  # warm
        for number in range(rounds):
            progress(f"{name}, round {number + 1} of {rounds}")
            runs.append([called(), served(), served(), called()])
    return {
        "throughput_share": _share(runs),
        "throughput_share_interval": _interval(runs),
        "throughput_share_by_round": [_share([run]) for run in runs],
        "called_again_by_round": [run[0] / run[3] for run in runs],
        "called_tokens_per_second": expected / statistics.mean(run[0] + run[3] for run in runs) * 2,
        "served_tokens_per_second": expected / statistics.mean(run[1] + run[2] for run in runs) * 2,
    }


def chat(rag: RagCache, collection: str, question: str, tokens: int) -> dict[str, Any]:
    """A streamed chat about a collection that has so many tokens, whatever the model says."""
    return {
        "model": rag.stats().model, "messages": [{"role": "user", "content": question}],
        "collection": collection, "max_tokens": tokens, "stream": True, "ignore_eos": True,
        "extractive": False,
    }  # fmt: skip


def _told(rag: RagCache, collection: str, question: str, tokens: int) -> dict[str, Any]:
    body = chat(rag, collection, question, tokens)
    return body | {"min_tokens": tokens, "stream_options": {"include_usage": True}}


def _share(runs: Sequence[Sequence[float]]) -> float:
    """Seconds of calls over seconds over HTTP, as many of each."""
    return sum(run[0] + run[3] for run in runs) / sum(run[1] + run[2] for run in runs)


def _interval(runs: list[list[float]]) -> list[float]:
    draw = random.Random(0)
    shares = sorted(_share(draw.choices(runs, k=len(runs))) for _ in range(2000))
    return [shares[100], shares[1899]]


def _seconds(counted: tuple[int, float], expected: int) -> float:
    if counted[0] != expected:
        raise RuntimeError(f"{expected} tokens were asked for, and {counted[0]} came")
    return counted[1]


def _called_all(rag: RagCache, collection: str, load: list[list[Asked]]) -> tuple[int, float]:
    loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        begin = time.perf_counter()
        tokens = runner.run(_call_all(rag, collection, load))
        return tokens, time.perf_counter() - begin


async def _call_all(rag: RagCache, collection: str, load: list[list[Asked]]) -> int:
    async def client(mine: list[Asked]) -> int:
        caller, tokens = AsyncRagCache(rag), 0
        for question, length in mine:
            # no token ends an answer, so that every one of them is text, and an event over HTTP
            generation = GenerationParams(
                max_tokens=length, min_tokens=length, ignore_eos=True, extractive=False
            )
            stream = await caller.stream(question, collection=collection, generation=generation)
            async for piece in stream.pieces():
                tokens += piece.chosen is not None
        return tokens

    return sum(await asyncio.gather(*map(client, load)))


def main(
    runs: Annotated[int, typer.Option(min=2, help="First tokens of each side.")] = 60,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of streams, four runs each.")] = 8,
    modules: Annotated[int, typer.Option(min=100, help="Modules to list.")] = 100_000,
    dtype: BenchDTypeOption = "auto",
    only_interfaces: Annotated[
        bool, typer.Option("--interfaces", help="First tokens of the interfaces alone.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """The service beside calls of the engine: first tokens, streams, and a long listing."""
    setting = HttpSetting(runs=runs, streams=streams, rounds=rounds, modules=modules, dtype=dtype)
    if only_interfaces:
        result = run_benchmark(lambda progress: bench_interfaces(setting, progress))
        print_figures([_interface_table(result)], result, json_file)
        return
    result = run_benchmark(lambda progress: bench_http(setting, progress))
    table = plain_table("over HTTP", "", "of the calls")
    table.add_row(
        "to the first token, more", f"{result['ttft_overhead_ms_p50']:.2f} ms",
        f"{result['ttft_called_ms_p50']:.1f} ms",
    )  # fmt: skip
    for model, suffix in (("six layers", ""), ("reader", "_reader")):
        low, high = result[f"throughput_share_interval{suffix}"]
        table.add_row(
            f"tokens a second, {streams} streams, {model}",
            f"{100 * result[f'throughput_share{suffix}']:.1f}% "
            f"({100 * low:.1f}% to {100 * high:.1f}%)",
            f"{result[f'called_tokens_per_second{suffix}']:.0f}",
        )
    table.add_row(f"a page of {modules:,} modules", f"{result['list_ms_p50']:.1f} ms", "")
    table.add_row(
        "first token of a text that another namespace has ingested",
        f"{result['foreign_ttft_ratio']:.2f}x", "of one that nobody has",
    )  # fmt: skip
    print_figures([table, _interface_table(result)], result, json_file)


def _interface_table(result: dict[str, Any]) -> Any:
    table = plain_table("first token", "", "more than a chat")
    more = result["interface_more_ms_p50"]
    for path, milliseconds in result["interface_ms_p50"].items():
        told = f"{more[path]:+.2f} ms" if path in more else ""
        table.add_row(path, f"{milliseconds:.1f} ms", told)
    return table


if __name__ == "__main__":
    typer.run(main)
