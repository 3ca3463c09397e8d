"""The rate of many streams over HTTP, of that of the same calls without it."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import uvicorn

from ragcache import Generation, RagCache
from ragcache_api.bench.clients import run_clients

Asked = tuple[str, int]
"""A question, and how many tokens its answer has."""


def closed_loop(
    topics: Sequence[str], clients: int, requests: int, tokens: int
) -> list[list[Asked]]:
    """What each client asks, one after another. Answers have from half of `tokens` to half more,
    so that no two clients stay in step."""

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
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """throughput_share: tokens a second of all clients over HTTP, of those of calls in a loop as
    the service has it, over all rounds. A round is called, served, served, called, so that a
    machine which becomes slower or faster meanwhile favours neither. throughput_share_interval:
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
            return _seconds(_called(rag, collection, load), expected)

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


def _called(rag: RagCache, collection: str, load: list[list[Asked]]) -> tuple[int, float]:
    loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        begin = time.perf_counter()
        tokens = runner.run(_call_all(rag, collection, load))
        return tokens, time.perf_counter() - begin


async def _call_all(rag: RagCache, collection: str, load: list[list[Asked]]) -> int:
    async def client(mine: list[Asked]) -> int:
        tokens = 0
        for question, length in mine:
            # no token ends an answer, so that every one of them is text, and an event over HTTP
            generation = Generation(max_new_tokens=length, min_new_tokens=length, ignore_eos=True)
            stream = await rag.astream(question, collection=collection, generation=generation)
            async for piece in stream.pieces():
                tokens += piece.chosen is not None
        return tokens

    return sum(await asyncio.gather(*map(client, load)))
