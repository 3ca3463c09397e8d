"""The parts that run through an engine at its defaults, as a service opens it: first tokens as a
user meets them, by the length of new text, beside other answers, and from the start of a process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import gpu_start
from gpu_session import GpuSession, median_ms
from gpu_table import Ceilings

from ragcache.bench.shape_session import PATIENCE
from ragcache.states import KVStates

IDLE_SECONDS = 0.2
"""Idleness of the engine before each first token of a user."""

BESIDE_SECONDS = 0.03
"""Mean time between the end of one first token beside other answers and the next request."""


def bench_user(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """The first of many streamed tokens, after idleness, over documents in random order."""
    load, found = session.load, dict[str, Any]()
    session.serve_at_defaults()
    for count in load.placed:
        times = []
        for _run in range(3 + load.runs):
            time.sleep(IDLE_SECONDS)
            states = session.rng.sample(session.documents, count)
            times.append(_first_of_many(session, states, load.user_tokens))
        found[str(count)] = {"ms": statistics.median(times[3:]), "runs_ms": times[3:]}
    return found


def _first_of_many(session: GpuSession, states: Sequence[KVStates], new_tokens: int) -> float:
    """Milliseconds from the states to the first of so many tokens. Waits for all of them."""
    question = session.tokens(session.load.question)
    begin = time.perf_counter()
    context = session.context(states, new_tokens, question)
    tokens = iter(session.engine.submit_request(session.request(context, new_tokens)))
    next(tokens)
    seconds = time.perf_counter() - begin
    for _ in tokens:  # to the end: a stream that is left cancels its request
        pass
    return 1e3 * seconds


def bench_chunks(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """First tokens by the number of new tokens, which no states hold."""
    session.serve_at_defaults()
    found: dict[str, Any] = {}
    for count in session.load.new_texts:
        session.progress(f"first tokens after {count} new tokens")
        texts = [session.tokens(count) for _ in range(3 + session.load.runs)]
        middle, times = median_ms(partial(_ask_next, session, texts), session.load.runs, warm=3)
        found[str(count)] = {"ms": middle, "runs_ms": times}
    return found


def _ask_next(session: GpuSession, texts: list[list[int]]) -> None:
    session.first_token([], texts.pop())


def bench_beside(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """First tokens of requests that arrive at random times while others decode, and the gaps
    between the tokens of these."""
    load, found = session.load, dict[str, Any]()
    engine = session.serve_at_defaults()
    for rows in load.beside:
        each = load.question + load.beside_tokens
        if not engine.core.kv_manager.can_hold(rows * each):
            found[str(rows)] = {"skipped": f"the pool does not hold {rows} answers"}
            continue
        session.progress(f"first tokens beside {rows} answers")
        with _answers(session, rows) as streams:
            times = []
            for _run in range(load.beside_runs):
                time.sleep(session.rng.expovariate(1 / BESIDE_SECONDS))
                states = session.rng.sample(session.documents, load.each)
                times.append(_first_of_many(session, states, 1))
            decoding = sum(len(stream) < load.beside_tokens for stream in streams)
        gaps = sorted(1e3 * (b - a) for stream in streams for a, b in pairwise(stream))
        found[str(rows)] = {
            "ms": statistics.median(times),
            "p90_ms": sorted(times)[int(0.9 * len(times))],
            "runs_ms": times,
            "decoding_at_end": decoding,
            "gap_p50_ms": statistics.median(gaps),
            "gap_p99_ms": gaps[int(0.99 * len(gaps))],
            "longest_gap_ms": gaps[-1],
        }
    return found


@contextmanager
def _answers(session: GpuSession, rows: int) -> Iterator[list[list[float]]]:
    """So many long answers that decode. Yields the times of their tokens, which grow."""
    load, streams = session.load, [list[float]() for _ in range(rows)]
    threads = []
    for stream in streams:
        states = session.rng.sample(session.documents, load.each)
        context = session.context(states, load.beside_tokens)
        handle = session.engine.submit_request(session.request(context, load.beside_tokens))

        def read(handle: Any = handle, stream: list[float] = stream) -> None:
            for _ in handle:
                stream.append(time.perf_counter())

        threads.append(Thread(target=read))
        threads[-1].start()
    while not all(len(stream) > 1 for stream in streams):
        time.sleep(0.001)
    yield streams
    for thread in threads:
        thread.join(PATIENCE)


def bench_start(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """Seconds from the start of a process to its first answer, without kernels of earlier
    processes and with them."""
    session.free_memory()
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        return {name: _started(session, Path(folder)) for name in ("cold", "warm")}


def _started(session: GpuSession, folder: Path) -> dict[str, float]:
    """Stages of a process that opens a model of the session's shape, and keeps kernels there."""
    shape = json.dumps(asdict(session.shape))
    caches = {
        "HF_ASSETS_CACHE": str(folder / "assets"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    begin = time.time()
    command = [sys.executable, gpu_start.__file__, shape, session.device]
    run = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    stages: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return {name: round(at - begin, 2) for name, at in stages.items()}


SERVED_PARTS: dict[str, Callable[[GpuSession, Ceilings], dict[str, Any]]] = {
    "user": bench_user,
    "chunks": bench_chunks,
    "beside": bench_beside,
    "start": bench_start,
}
"""In the order in which they run, after the parts of an engine that is set up for batches."""
