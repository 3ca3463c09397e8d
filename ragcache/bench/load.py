"""A service under load: requests arrive over time, and their documents are in several tiers.

Engine and store run in this process, at their defaults, over a model of a shape with random
weights. `benchmarks/vllm_load.py` sends the same requests to vLLM.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ragcache.bench.harness import SHAPES, LlamaShape, Progress, made_up_key
from ragcache.bench.load_workload import Arriving, LoadResult, LoadSetting, figures, is_saturated
from ragcache.bench.shape_session import PATIENCE, ShapeSession, counters_between
from ragcache.config import LEDGER_FILE
from ragcache.db import Database, Ledger
from ragcache.engine import EncodeJob, Segment
from ragcache.errors import RagCacheError
from ragcache.machine import describe_machine
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype
from ragcache.store import DeviceTier, HostTier, KVStore, Lease, LeaseRequest, Origin

THREADS = 1024
"""Requests that can wait or run at once."""

SHARE_AT_LIMITS = 0.7
"""Share of the most answers a second at which first tokens and gaps are compared with limits."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits that `missed_limits` compares a load with."""

    answered: float = 0.0
    """Least answers a second."""
    ttft_p99_ms: float = inf
    """99th percentile of first tokens, at most."""
    longest_gap_ms: float = inf
    """Longest gap between two tokens of an answer, at most."""


TIERED = LoadLimits(28.0, ttft_p99_ms=250.0, longest_gap_ms=80.0)
"""Limits of the 8B on one H200 whose documents are in two tiers."""

ON_DEVICE = LoadLimits(50.0, ttft_p99_ms=80.0, longest_gap_ms=80.0)
"""Limits of the 8B on one H200 that holds all documents."""


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """A service and its load."""

    shape: LlamaShape = SHAPES["8b"]
    """Sizes of the model."""
    setting: LoadSetting = LoadSetting()
    """The corpus and its requests."""
    device_bytes: int = 40 * 2**30
    """Memory of the device tier."""
    host_bytes: int = 84 * 2**30
    """Memory of the host tier."""
    device_kv_dtype: KVDtype = "model"
    """Dtype of the states in the device tier: `model` or `int8`."""
    quantization: str | None = None
    """`fp8` rounds the weights. Defaults to bfloat16."""
    rates: tuple[float, ...] = (5, 10, 20, 30, 40, 50, 60)
    """Requests a second, rising."""
    ingest_at: float | None = None
    """Rate of one more run, beside which new documents are encoded. Defaults to no such run."""
    max_gap_ms: float | None = None
    """Longest gap between tokens that other work may cause (`EngineConfig.max_gap_ms`)."""
    pool_bytes: int | None = None
    """Memory of the engine's pool. Defaults to the engine's own choice."""

    @classmethod
    def reduced(cls) -> ServiceLoad:
        """Return a load of a tiny model and short documents, for a CPU."""
        return cls(
            LlamaShape(2, 32, 4, 2, 48, 64, 512, tied=False),
            LoadSetting(
                documents=12, document_tokens=8, preamble=4, each=2, question=4, new_tokens=4,
                seconds=1.0,
            ),
            device_bytes=24 * 2**10, host_bytes=8 * 2**10, rates=(20, 40), pool_bytes=2**20,
        )  # fmt: skip

    def limits(self, bytes_per_token: int) -> LoadLimits:
        """Limits of the load: of the 8B's own, or that no request is refused."""
        if self.shape != SHAPES["8b"]:
            return LoadLimits()
        nbytes = self.setting.documents * self.setting.document_tokens * bytes_per_token
        return ON_DEVICE if nbytes <= self.device_bytes else TIERED


class LoadSession(ShapeSession):
    """A model, its engine at the defaults, and a store with a device tier and a host tier."""

    def __init__(self, load: ServiceLoad, device: str, progress: Progress = lambda _: None) -> None:
        super().__init__(
            *(load.shape, load.setting.preamble, device, progress, load.pool_bytes),
            quantization=load.quantization,
        )
        self.int8_states = load.device_kv_dtype == "int8"
        self.max_gap_ms = load.max_gap_ms
        self.load, self.setting = load, load.setting

    @contextmanager
    def filled_store(self) -> Iterator[KVStore]:
        """Open a store that was given every document once, the most popular ones last."""
        with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
            database = Database.open(Path(folder) / LEDGER_FILE)
            load = self.load
            device = DeviceTier(load.device_bytes, self.device, kv_dtype=load.device_kv_dtype)
            store = KVStore(Ledger(database), [device, HostTier(load.host_bytes)])
            store.ledger.begin()
            store.bind_device(self.engine.stream)
            assert self.root.length == self.setting.preamble  # encoded once the engine is warm
            self.progress("filling the tiers")
            for number in reversed(range(self.setting.documents)):
                states = self.random_states(self.setting.document_tokens, self.setting.preamble)
                store.put_states(self.key(number), states)
                del states
            self.synchronize()
            try:
                yield store
            finally:
                store.close()
                database.close()

    def key(self, number: int) -> KVKey:
        """Return the key of a document's states."""
        return made_up_key(f"document {number}")

    def fetch(self, store: KVStore, numbers: Sequence[int], origin: Origin) -> Lease:
        """Lease documents, and encode the ones that no tier has."""
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
        """Send all requests, wait for their answers, and return the figures."""
        session, setting = self.session, self.session.setting
        session.progress(f"{self.rate:.1f} requests a second")
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


class NewDocuments:
    """New documents, encoded one portion after another beside the requests."""

    def __init__(self, session: LoadSession, store: KVStore, portion: int = 8) -> None:
        self.session, self.store, self.portion = session, store, portion
        self.documents = 0
        self._stopped = threading.Event()

    def __enter__(self) -> NewDocuments:
        self._begin = time.perf_counter()
        self._thread = ThreadPoolExecutor(1, "bench-ingest")
        self._ending = self._thread.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and raise the error that ended the ingestion, if one did."""
        self._stopped.set()
        self._thread.shutdown()
        self.seconds = time.perf_counter() - self._begin
        self._ending.result()

    @property
    def tokens_s(self) -> float:
        """Number of tokens encoded a second."""
        return self.documents * self.session.setting.document_tokens / self.seconds

    def _run(self) -> None:
        number = self.session.setting.documents
        while not self._stopped.is_set():
            numbers = range(number, number + self.portion)
            self.session.fetch(self.store, numbers, "ingest").release()
            self.documents += self.portion
            number += self.portion


def bench_load(
    load: ServiceLoad, device: str, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Run at rising rates until saturation, then at 70 % of the most answers a second.

    Returns:
        `most_answered`, the figures of each run (`load_workload.figures`), of the last one as
        `at_limits`, and in `missed` the limits that they miss.
    """
    session = LoadSession(load, device, progress)
    try:
        with session.filled_store() as store:
            return _bench(session, store)
    finally:
        session.close()


def _bench(session: LoadSession, store: KVStore) -> dict[str, Any]:
    load, runs = session.load, list[dict[str, Any]]()
    session.progress("warming up")
    LoadRun(session, store, load.rates[0]).run()  # compiles and captures what warm-up left
    for rate in load.rates:
        runs.append(LoadRun(session, store, rate).run())
        if is_saturated(runs[-1]):
            break
    most = max(run["answered"] for run in runs)
    at_limits = LoadRun(session, store, SHARE_AT_LIMITS * most).run() if most else runs[-1]
    document: dict[str, Any] = {
        "most_answered": most,
        "runs": runs,
        "at_limits": at_limits,
        "load": asdict(load),
        "machine": describe_machine(),
    }
    if load.ingest_at is not None:
        with NewDocuments(session, store) as ingestion:
            beside = LoadRun(session, store, load.ingest_at).run()
        document["ingestion"] = {"tokens_s": ingestion.tokens_s, "beside": beside}
    limits = load.limits(session.causal.bytes_per_token)
    return document | {"missed": missed_limits(document, limits)}


def missed_limits(document: dict[str, Any], limits: LoadLimits) -> list[str]:
    """Return the limits that the figures of `bench_load` miss, in words."""
    run = document["at_limits"]
    others = [each for each in document["runs"] if each is not run]  # which was perhaps the last
    refused = sum(each["refused"] for each in (*others, run))
    at_most = (
        ("TTFT p99, ms", run["ttft_ms"].get("p99", inf), limits.ttft_p99_ms),
        ("longest gap, ms", run["gap_ms"].get("longest", inf), limits.longest_gap_ms),
        ("refused requests", refused, 0),
    )
    answered = document["most_answered"]
    found = [
        f"{name}: {value:.1f}, must be at most {limit:g}"
        for name, value, limit in at_most
        if value > limit
    ]
    if answered < limits.answered:
        found.append(f"answers a second: {answered:.1f}, must be at least {limits.answered:g}")
    return found
