"""A service under more load than it can answer: waits, refusals, recovery, fairness, memory.

    python benchmarks/overload.py --json benchmarks/results/overload-cpu.json

`ragcache serve` runs with the embedded reader in a process of its own. A closed loop of clients
measures its capacity. Then requests arrive at random times (Poisson) at half of the capacity, and
at a multiple of it: most of them with one key, and a tenth of the capacity with another key.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark

from ragcache import RagCache
from ragcache.evaluation import load_dataset
from ragcache.machine import RELEASE_SECONDS

_COLLECTION = "bench"
_LIGHT_SHARE = 0.1  # of the capacity, with a key of its own
_RETRIED = 10  # one of so many refused requests comes again after its `Retry-After`
_PATIENCE = 60.0  # seconds for the recovery
_PROBES = 5  # answers in a row as fast as before, until the service counts as recovered


@dataclass(frozen=True, slots=True)
class OverloadSetting:
    """factor: arrivals over capacity. seconds: of the overload; calm: of the other phases.
    clients: of the closed loop. tokens: of an answer. queue_seconds: the service's setting. rest:
    seconds after the recovery until memory is measured, in which the service returns some."""

    documents: Path
    questions: Path
    factor: float = 2.3
    seconds: float = 60.0
    calm: float = 20.0
    clients: int = 160
    tokens: int = 4
    queue_seconds: float = 10.0
    rest: float = RELEASE_SECONDS + 10


@dataclass(slots=True)
class Outcomes:
    """The responses to one key. waits: seconds of answers. retry_after: of refused requests.
    retried: whether those that came again were answered, or else how long they should wait on."""

    waits: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)
    retried: list[bool] = field(default_factory=list)
    failed: int = 0

    def figures(self) -> dict[str, Any]:
        offered = len(self.waits) + len(self.retry_after) + self.failed
        return {
            "offered": offered,
            "answered": len(self.waits),
            "failed": self.failed,
            "refused_share": len(self.retry_after) / max(1, offered),
            "p50_s": _percentile(self.waits, 0.5),
            "p99_s": _percentile(self.waits, 0.99),
            "longest_s": max(self.waits, default=None),
            "refusal_p99_s": _percentile(self.refused, 0.99),
            "retry_after_s": [
                min(self.retry_after, default=None),
                max(self.retry_after, default=None),
            ],
            "retried": len(self.retried),
            "retried_and_answered": sum(self.retried),
        }


@dataclass(slots=True)
class LoadClient:
    """Sends questions to the service, each over a connection of a pool."""

    http: httpx.AsyncClient
    questions: Iterator[str]
    tokens: int

    async def ask(self, key: str, outcomes: Outcomes, *, retries: bool = False) -> None:
        """Ask a question, and once again after `Retry-After` if it `retries` and is refused."""
        asked = {"question": next(self.questions), "collection": _COLLECTION, "k": 4}
        asked |= {"max_tokens": self.tokens, "min_tokens": self.tokens, "extractive": False}
        asked |= {"ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        begun = time.perf_counter()
        response = await self.http.post("/v1/answers", json=asked, headers=headers)
        seconds = time.perf_counter() - begun
        if response.status_code == 200:
            outcomes.waits.append(seconds)
        elif response.status_code in (429, 503) and "retry-after" in response.headers:
            after = int(response.headers["retry-after"])
            outcomes.refused.append(seconds)
            outcomes.retry_after.append(after)
            if retries:
                await asyncio.sleep(after)
                again = await self.http.post("/v1/answers", json=asked, headers=headers)
                outcomes.retried.append(again.status_code == 200)
        else:
            outcomes.failed += 1

    async def closed_loop(self, key: str, clients: int, seconds: float) -> float:
        """Return the answers a second of clients that ask again as soon as they are answered."""
        outcomes, end = Outcomes(), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.ask(key, outcomes)

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return len(outcomes.waits) / (time.perf_counter() - begun)

    async def offer(self, rates: dict[str, float], seconds: float) -> dict[str, Outcomes]:
        """Send requests of each key at random times at its rate, and wait for the last one."""
        outcomes = {key: Outcomes() for key in rates}

        async def arrive(key: str) -> None:
            asked = []
            async for number in _arrivals(rates[key], seconds):
                retries = number % _RETRIED == 0
                asked.append(asyncio.create_task(self.ask(key, outcomes[key], retries=retries)))
            await asyncio.gather(*asked)

        await asyncio.gather(*map(arrive, rates))
        return outcomes

    async def recover(self, key: str, usual: float) -> float | None:
        """Return the seconds until single requests take no longer than `usual`, if they do."""
        begun, fast = time.perf_counter(), 0
        while fast < _PROBES and time.perf_counter() - begun < _PATIENCE:
            outcomes = Outcomes()
            await self.ask(key, outcomes)
            fast = fast + 1 if outcomes.waits and outcomes.waits[0] <= usual else 0
        return time.perf_counter() - begun if fast == _PROBES else None


async def _arrivals(rate: float, seconds: float) -> AsyncIterator[int]:
    """Yield numbers at random times."""
    draw, begun, at = random.Random(7), time.perf_counter(), 0.0
    for number in itertools.count():
        at += draw.expovariate(rate)
        if at > seconds:
            return
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        yield number


def bench_overload(setting: OverloadSetting, progress: Progress) -> dict[str, Any]:
    """Measure all phases. Seconds are the clients', and memory is the service's resident set."""
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place:
        progress("ingesting documents")
        with RagCache.open(Path(place) / "state", embedding="none", force_modes=True) as rag:
            rag.ingest(_COLLECTION, [setting.documents])
            keys = {
                name: rag.keys.create(name, role="admin" if name == "heavy" else "user")[1]
                for name in ("heavy", "light")
            }
        with _service(Path(place) / "state", setting) as (process, port):
            phases = asyncio.run(_measure(setting, process, port, keys, progress))
    shown = asdict(setting) | {
        "documents": setting.documents.name,
        "questions": setting.questions.name,
    }
    return phases | {"setting": shown, "machine": describe_machine()}


async def _measure(
    setting: OverloadSetting, process: psutil.Process, port: int, keys: dict[str, str],
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    questions = itertools.cycle(
        [each.question for each in load_dataset(setting.questions).questions]
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(120.0)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as http:
        client, heavy, light = (
            LoadClient(http, questions, setting.tokens),
            keys["heavy"],
            keys["light"],
        )
        progress("capacity")
        await client.closed_loop(heavy, setting.clients, setting.calm / 2)
        capacity = await client.closed_loop(heavy, setting.clients, setting.calm)
        single = Outcomes()
        for _ in range(20):
            await client.ask(heavy, single)
        progress("half of the capacity")
        calm = (await client.offer({heavy: capacity / 2}, setting.calm))[heavy]
        before = process.memory_info().rss
        progress(f"{setting.factor:g} times the capacity")
        rates = {
            heavy: (setting.factor - _LIGHT_SHARE) * capacity,
            light: _LIGHT_SHARE * capacity,
        }
        begun = time.perf_counter()
        outcomes = await client.offer(rates, setting.seconds)
        drained = time.perf_counter() - begun - setting.seconds
        peak = process.memory_info().rss
        progress("recovery")
        recovered = await client.recover(heavy, _percentile(calm.waits, 0.99) or 0.0)
        await asyncio.sleep(setting.rest)
        after = process.memory_info().rss
    return {
        "capacity_per_second": capacity,
        "single_p50_s": _percentile(single.waits, 0.5),
        "calm": calm.figures(),
        "heavy": outcomes[heavy].figures(),
        "light": outcomes[light].figures(),
        "drained_s": drained,
        "recovered_s": recovered,
        "rss_mib": {"before": before >> 20, "overloaded": peak >> 20, "after": after >> 20},
    }


@contextmanager
def _service(state: Path, setting: OverloadSetting) -> Iterator[tuple[psutil.Process, int]]:
    """Run `ragcache serve` within the block, and yield its process and port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "RAGCACHE_EMBEDDING": "none",
        "RAGCACHE_FORCE_MODES": "true",
        "RAGCACHE_QUEUE_SECONDS": str(setting.queue_seconds),
    }
    command = [sys.executable, "-m", "ragcache_api.cli.main", "serve", "--state", str(state)]
    with subprocess.Popen(
        [*command, "--port", str(port)], env=os.environ | variables, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:  # fmt: skip
        try:
            while True:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health/ready").is_success:
                        break
                except httpx.HTTPError:
                    if started.poll() is not None:
                        raise RuntimeError("the service has not started") from None
                time.sleep(0.2)
            yield psutil.Process(started.pid), port
        finally:
            started.terminate()


def _percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def main(
    documents: Path = Path("examples/handbook"),
    questions: Path = Path("examples/questions.jsonl"),
    factor: Annotated[float, typer.Option(help="Arrivals over capacity.")] = 2.3,
    seconds: Annotated[float, typer.Option(help="Seconds of the overload.")] = 60.0,
    calm: Annotated[float, typer.Option(help="Seconds of the other phases.")] = 20.0,
    clients: Annotated[int, typer.Option(help="Clients that measure the capacity.")] = 160,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """The service under more load than it can answer."""
    setting = OverloadSetting(documents, questions, factor, seconds, calm, clients, tokens)
    result = run_benchmark(lambda progress: bench_overload(setting, progress))
    table = plain_table("load", "answered", "refused", "p50", "p99", "Retry-After", "came again")
    for name in ("calm", "heavy", "light"):
        each = result[name]
        table.add_row(
            name, str(each["answered"]), f"{each['refused_share']:.0%}", _shown(each["p50_s"]),
            _shown(each["p99_s"]), " to ".join(map(_shown, each["retry_after_s"])),
            f"{each['retried_and_answered']} of {each['retried']} answered",
        )  # fmt: skip
    print_figures([table], result, json_file)


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g} s"


if __name__ == "__main__":
    typer.run(main)
