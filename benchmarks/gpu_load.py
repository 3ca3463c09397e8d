"""A service under load: requests arrive over time, and their documents are in several tiers.

    python benchmarks/gpu_load.py --device-bytes 40GiB --host-bytes 84GiB --json FILE --check
    python benchmarks/gpu_load.py --device-bytes 76GiB --host-bytes 1GiB --documents 560

Engine and store run in this process, at their defaults, over a model of a shape with random
weights. Rates rise until requests are refused or answers fall behind. A last run at 70 % of the
highest number of answers a second is the one that limits are compared with. Needs torch,
transformers, triton, numpy, safetensors, and SQLAlchemy with what the ledger needs beside it.
`vllm_load.py` sends the same requests to vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gpu_session import PATIENCE, GpuSession, counters_between
from gpu_table import GpuWorkload
from load_workload import Arriving, LoadResult, LoadSetting, figures, is_saturated, table
from shapes import SHAPES, made_up_key

from ragcache.bench.harness import LlamaShape, Progress
from ragcache.config import parse_bytes
from ragcache.db import Database, Ledger
from ragcache.engine import EncodeJob, EngineConfig, LLMEngine, Segment
from ragcache.errors import RagCacheError
from ragcache.machine import describe_machine
from ragcache.states import KVKey
from ragcache.store import DeviceTier, HostTier, KVStore, Lease, LeaseRequest, Origin

THREADS = 1024
"""Requests that can wait or run at once."""

SHARE_AT_LIMITS = 0.7
"""Share of the most answers a second at which first tokens and gaps are compared with limits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one set of tiers, of the 8B on one H200."""

    answered: float
    """Least answers a second."""
    ttft_p99_ms: float = 250.0
    longest_gap_ms: float = 80.0


TIERED = Limits(answered=28.0)
ON_DEVICE = Limits(answered=50.0, ttft_p99_ms=80.0)


class LoadSession(GpuSession):
    """A model, its engine at the defaults, and a store with a device tier and a host tier."""

    def __init__(
        self,
        shape: LlamaShape,
        setting: LoadSetting,
        device: str,
        tiers: tuple[int, int],
        progress: Progress = lambda _: None,
        pool_bytes: int | None = None,
    ) -> None:
        """tiers: bytes of the device tier and of the host tier. pool_bytes: of the engine's pool,
        by default as many as it takes itself."""
        load = GpuWorkload(preamble=setting.preamble, document_tokens=setting.document_tokens)
        super().__init__(shape, load, device, progress)
        self.setting, self.tiers, self.pool_bytes = setting, tiers, pool_bytes

    @cached_property
    def engine(self) -> LLMEngine:
        config = EngineConfig.for_device(
            torch.device(self.device), warm_up=True, pool_bytes=self.pool_bytes
        )
        return LLMEngine(self.causal, config)

    @contextmanager
    def filled_store(self) -> Iterator[KVStore]:
        """A store that was given every document once, the most popular ones last."""
        with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
            database = Database.open(Path(folder) / "ledger.sqlite")
            device_bytes, host_bytes = self.tiers
            device, host = DeviceTier(device_bytes, self.device), HostTier(host_bytes)
            store = KVStore(Ledger(database), [device, host])
            store.ledger.begin()
            store.bind_device(self.engine.stream)
            assert self.root.length == self.setting.preamble  # encoded once the engine is warm
            begin = time.perf_counter()
            for number in reversed(range(self.setting.documents)):
                states = self.random_states(self.setting.document_tokens, self.setting.preamble)
                store.put_states(self.key(number), states)
                del states
            self.synchronize()
            self.progress(f"filled the tiers in {time.perf_counter() - begin:.1f} s")
            try:
                yield store
            finally:
                store.close()
                database.close()

    def key(self, number: int) -> KVKey:
        """The key of a document's states."""
        return made_up_key(f"document {number}")

    def fetch(self, store: KVStore, numbers: Sequence[int], origin: Origin) -> Lease:
        """Leases documents, and encodes those that no tier has."""
        keys = [self.key(number) for number in numbers]
        by_key = dict(zip(keys, numbers, strict=True))
        nbytes = self.setting.document_tokens * self.causal.bytes_per_token
        lease = store.lease(keys, LeaseRequest(origin, size_of=lambda _: nbytes))
        try:
            while missing := lease.claim():
                jobs = [self._job(by_key[key]) for key in missing]
                for key, states in zip(missing, self.engine.encode(jobs), strict=True):
                    lease.put(key, states)
        except BaseException:
            lease.release()
            raise
        return lease

    def _job(self, number: int) -> EncodeJob:
        text = self.setting.document(number, self.shape.vocabulary)
        return EncodeJob(text, self.setting.preamble, Segment(self.root, 0))


class LoadRun:
    """Requests of one rate, each in a thread of its own as a service's are."""

    def __init__(self, session: LoadSession, store: KVStore, rate: float) -> None:
        self.session, self.store, self.rate = session, store, rate
        self._begin = 0.0

    def run(self) -> dict[str, Any]:
        """Sends all requests, waits for their answers, and returns the figures."""
        session, setting = self.session, self.session.setting
        arrivals, engine = setting.arrivals(self.rate), session.engine
        served = [LoadResult(each.at) for each in arrivals]
        before = replace(engine.stats)
        with ThreadPoolExecutor(THREADS) as threads:
            self._begin = time.perf_counter()
            for arriving, result in zip(arrivals, served, strict=True):
                time.sleep(max(0.0, self._begin + arriving.at - time.perf_counter()))
                threads.submit(self._serve, arriving, result)
        wall = time.perf_counter() - self._begin
        stats = counters_between(before, engine.stats)
        steps = max(1.0, stats["steps"])
        return figures(setting, self.rate, served) | {
            "wall_s": wall,
            "planning_ms": 1e3 * stats["planning"] / steps,
            "step_ms": 1e3 * wall / steps,
            "decoding": stats["decoded_tokens"] / steps,
            "stats": stats,
        }

    def _serve(self, arriving: Arriving, result: LoadResult) -> None:
        try:
            self._answer(arriving, result)
        except RagCacheError as error:
            result.error = type(error).__name__
        except Exception as error:  # the other requests go on; the figure shows it
            result.error = repr(error)

    def _answer(self, arriving: Arriving, result: LoadResult) -> None:
        session, setting = self.session, self.session.setting
        question = arriving.question(setting.question, session.shape.vocabulary)
        with session.fetch(self.store, arriving.documents, "question") as lease:
            result.sources += [lease.source[key] for key in lease.keys]
            context = session.context(lease.states, setting.new_tokens, question)
            handle = session.engine.submit_request(session.request(context, setting.new_tokens))
            for _ in handle:
                result.tokens.append(time.perf_counter() - self._begin)
            handle.result(PATIENCE)


class _Ingestion:
    """New documents, encoded one portion after another beside the requests."""

    def __init__(self, session: LoadSession, store: KVStore, portion: int = 8) -> None:
        self.session, self.store, self.portion = session, store, portion
        self.documents = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-ingest")

    def __enter__(self) -> _Ingestion:
        self._begin = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._begin

    @property
    def tokens_s(self) -> float:
        """Tokens encoded a second."""
        return self.documents * self.session.setting.document_tokens / self.seconds

    def _run(self) -> None:
        number = self.session.setting.documents
        while not self._stopped.is_set():
            numbers = range(number, number + self.portion)
            self.session.fetch(self.store, numbers, "ingest").release()
            self.documents += self.portion
            number += self.portion


def bench_load(
    session: LoadSession, rates: Sequence[float], *, ingest_at: float | None = None
) -> dict[str, Any]:
    """Runs at rising rates until saturation, then at 70 % of the most answers a second.

    Args:
        session: Model, engine and sizes of the tiers.
        rates: Requests a second, rising.
        ingest_at: Rate of one more run, beside which new documents are encoded.
    """
    setting = session.setting
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "shape": asdict(session.shape),
        "setting": asdict(setting),
        "tiers": dict(zip(("device_bytes", "host_bytes"), session.tiers, strict=True)),
        "runs": [],
    }
    with session.filled_store() as store:
        LoadRun(session, store, rates[0]).run()  # compiles and captures what warm-up left
        runs: list[dict[str, Any]] = document["runs"]
        for rate in rates:
            runs.append(LoadRun(session, store, rate).run())
            session.progress(table(runs[-1:]))
            if is_saturated(runs[-1]):
                break
        most = max(run["answered"] for run in runs)
        document["most_answered"] = most
        document["at_limits"] = LoadRun(session, store, SHARE_AT_LIMITS * most).run()
        if ingest_at is not None:
            with _Ingestion(session, store) as ingestion:
                beside = LoadRun(session, store, ingest_at).run()
            document["ingestion"] = {"tokens_s": ingestion.tokens_s, "beside": beside}
    return document


def missed(document: dict[str, Any], limits: Limits) -> list[str]:
    """The limits that a document misses, in words."""
    run = document["at_limits"]
    refused = run["refused"] + sum(each["refused"] for each in document["runs"])
    found = [
        ("answers a second", document["most_answered"], limits.answered, True),
        ("TTFT p99, ms", run["ttft_ms"].get("p99", float("inf")), limits.ttft_p99_ms, False),
        ("longest gap, ms", run["gap_ms"].get("longest", float("inf")), limits.longest_gap_ms,
         False),
        ("refused requests", refused, 0, False),
    ]  # fmt: skip
    return [
        f"{name}: {value:.1f}, must be {'at least' if least else 'at most'} {limit:g}"
        for name, value, limit, least in found
        if (value < limit if least else value > limit)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the load and prints its table. Returns the exit status."""
    options = _parser().parse_args(arguments)
    begin = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    setting = LoadSetting(documents=options.documents, seconds=options.seconds)
    tiers = parse_bytes(options.device_bytes), parse_bytes(options.host_bytes)
    session = LoadSession(SHAPES[options.shape], setting, options.device, tiers, progress)
    rates = [float(rate) for rate in options.rates.split(",")]
    document = bench_load(session, rates, ingest_at=options.ingest_at)
    document["command"] = " ".join(["python", "benchmarks/gpu_load.py", *sys.argv[1:]])
    nbytes = setting.documents * setting.document_tokens * session.causal.bytes_per_token
    limits = ON_DEVICE if nbytes <= tiers[0] else TIERED
    document["missed"] = missed(document, limits)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    report(document)
    session.close()
    return int(options.check and bool(document["missed"]))


def report(document: dict[str, Any], write: Callable[[str], object] = print) -> None:
    """Prints the table of all runs, and the limits that were missed."""
    write(table([*document["runs"], document["at_limits"]]))
    write(f"most answers a second: {document['most_answered']:.1f}; the last run is at 70 % of it")
    if "ingestion" in document:
        tokens = document["ingestion"]["tokens_s"]
        write(f"beside ingestion of {tokens:,.0f} tokens a second:")
        write(table([document["ingestion"]["beside"]]))
    for each in document["missed"]:
        write(f"missed: {each}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-bytes", default="40GiB", help="of the device tier")
    parser.add_argument("--host-bytes", default="84GiB", help="of the host tier")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--rates", default="5,10,20,30,40,50,60", help="requests a second, rising")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--ingest-at", type=float, help="rate beside which documents are ingested")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
