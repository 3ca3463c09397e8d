"""The gains and costs of several replicas, measured on one machine over a PostgreSQL: encodings, a
lost replica, a rolling upgrade, and the gateway.

    python benchmarks/cluster.py --ledger URL --documents FOLDER --questions FILE --json FILE

Replicas of the embedded reader in float32 run on Ray Serve behind a gateway, over a ledger and a
remote tier in a folder.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from harness import (
    JsonFile,
    Progress,
    describe_machine,
    empty_schema,
    plain_table,
    print_figures,
    run_benchmark,
)
from sqlalchemy import select

from ragcache.db import Database
from ragcache.db.tables import SessionTable
from ragcache.documents import load_sources
from ragcache.evaluation import load_dataset
from ragcache_api.cluster.app import application, deploy, ray_serve
from ragcache_api.settings import ServiceSettings

_COLLECTION = "bench"


@dataclass(frozen=True, slots=True)
class Reply:
    """The stream that a client got. seconds: until its end; cut: it ended before its answer."""

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


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """The workload that every part runs.

    Attributes:
        documents, questions: Texts, and what is asked about them.
        replicas: Of all parts but `gateway`.
        askers: Clients that ask one question after another; `kill` and `upgrade` have one more,
            which reads streams.
        seconds: Of load in `kill`.
        rounds: Of `gateway`.
    """

    documents: Sequence[str]
    questions: Sequence[str]
    replicas: int = 3
    askers: int = 3
    seconds: float = 45.0
    rounds: int = 6


@dataclass(frozen=True, slots=True)
class _Place:
    """The surroundings of one part: an empty schema of the database, and a folder."""

    ledger: str
    folder: Path

    def settings(self, replicas: int, **more: Any) -> ServiceSettings:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {
            "ledger": self.ledger, "remote": f"file://{self.folder / 'remote'}",
            "state": self.folder / f"state-{uuid4().hex[:8]}", "embedding": "none",
            "dtype": "float32", "host": "127.0.0.1", "page": False, "lame_duck": 0,
        }  # fmt: skip
        return ServiceSettings.read(**(given | {"port": port, "replicas": replicas} | more))

    @contextmanager
    def cluster(self, settings: ServiceSettings) -> Iterator[BenchClient]:
        """A running service."""
        with ray_serve(settings):
            deploy(application(settings))
            client = BenchClient(settings.port)
            client.wait_for(settings.replicas or 1)
            yield client


@contextmanager
def _place(ledger: str) -> Iterator[_Place]:
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with empty_schema(ledger) as url, temporary as folder:
        yield _Place(url, Path(folder))


def measure_encodings(
    place: _Place, setting: ClusterSetting, progress: Progress
) -> dict[str, Any]:  # fmt: skip
    """Encodings when documents are ingested through the gateway and asked everywhere."""
    texts, questions = setting.documents, setting.questions
    with place.cluster(place.settings(setting.replicas)) as client:
        progress(f"encodings: {len(texts)} documents")
        seconds = client.ingest(texts)
        ask_all(client, questions, setting.askers)
        encoded = client.encoded()
        routed = [each["routed"] for each in client.replicas().values()]
    return {
        "modules": len(texts), "encoded": sum(encoded.values()),
        "questions": len(questions), "routed": sorted(routed), "ingest_seconds": seconds,
    }  # fmt: skip


def measure_kill(place: _Place, setting: ClusterSetting, progress: Progress) -> dict[str, Any]:
    """Kills a replica under load."""
    with place.cluster(place.settings(setting.replicas)) as client:
        load, streams = _begin_load(client, setting)
        time.sleep(setting.seconds / 4)
        before, encoded = client.replicas(), client.encoded()
        name, lost = next(iter(before.items()))
        progress("kill: one replica is lost")
        os.kill(_pid(place.ledger, lost["session"]), signal.SIGKILL)
        seconds = client.wait_for(setting.replicas, without=[name])
        time.sleep(max(0.0, 0.75 * setting.seconds - seconds))
        again = client.encoded()
        load.stop()
        streams.stop()
        retried = client.get("/admin/replicas")["retried"]
    survivors = {key: each for key, each in encoded.items() if key != name}
    again = {key: each - survivors.get(key, 0) for key, each in again.items()}
    return _figures(load, streams) | {
        "seconds_until_all_again": seconds, "encoded_again": sum(again.values()),
        "retried": retried,
    }  # fmt: skip


def measure_upgrade(place: _Place, setting: ClusterSetting, progress: Progress) -> dict[str, Any]:
    """Replaces every replica, and the gateway, under load."""
    settings = place.settings(setting.replicas)
    with place.cluster(settings) as client:
        load, streams = _begin_load(client, setting)
        time.sleep(5)
        before = client.replicas()
        progress("upgrade: replicas are replaced one by one")
        begun = time.perf_counter()
        deploy(application(settings))
        client.wait_for(setting.replicas, without=list(before))
        seconds = time.perf_counter() - begun
        time.sleep(5)
        load.stop()
        streams.stop()
        encoded = sum(client.encoded().values())
    return _figures(load, streams) | {"upgrade_seconds": seconds, "encoded_again": encoded}


def _begin_load(client: BenchClient, setting: ClusterSetting) -> tuple[Load, Load]:
    """Askers, and one reader of greedy streams, over a corpus that is ingested."""
    questions = setting.questions
    client.ingest(setting.documents)
    load, streams = Load(), Load()
    for number in range(setting.askers):
        load.add(repeat_calls(client.ask, questions, number))
    stream = partial(client.chat, tokens=48, stream=True, temperature=0)
    streams.add(repeat_calls(stream, questions, setting.askers))
    return load, streams


def _figures(load: Load, streams: Load) -> dict[str, Any]:
    return {
        "asked": len(load.replies), "failed": sum(each.failed for each in load.replies),
        "longest_seconds": max(each.seconds for each in load.replies),
        "streams": len(streams.replies), "streams_failed": sum(s.failed for s in streams.replies),
        "statuses_of_failed":
            sorted(each.status for each in (*load.replies, *streams.replies) if each.failed),
    }  # fmt: skip


def _pid(ledger: str, session: str) -> int:
    database = Database.open(ledger)
    try:
        [row] = database.fetch(select(SessionTable.pid).where(SessionTable.id == session))
    finally:
        database.close()
    return int(row[0])


def measure_gateway(place: _Place, setting: ClusterSetting, progress: Progress) -> dict[str, Any]:
    """The same calls through the gateway to one replica and to a service by itself, in turn."""
    with ExitStack() as running:
        sides = {"gateway": running.enter_context(place.cluster(place.settings(1)))}
        sides["direct"] = running.enter_context(_service(place))
        sides["gateway"].ingest(setting.documents)
        return _compare_sides(sides, setting.questions, setting, progress)


def _compare_sides(
    sides: Mapping[str, BenchClient], questions: Sequence[str], setting: ClusterSetting,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[float]] = {name: [] for name in sides}
    events: dict[str, list[float]] = {name: [] for name in sides}
    for question in questions[:24]:
        for client in sides.values():
            client.ask(question)
    for number in range(setting.rounds):
        progress(f"gateway: round {number + 1} of {setting.rounds}")
        for name, client in sides.items():
            got = check_replies([client.call("GET", "/v1/collections") for _ in range(30)])
            asked = check_replies([client.ask(each) for each in questions[:24]])
            seconds[name] += [each.seconds for each in got]
            answers[name] += [each.seconds for each in asked]
            events[name].append(_events_per_second(client, questions))
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    rates = {name: statistics.median(each) for name, each in events.items()}
    return {
        "get_seconds": middle,
        "get_added_seconds": middle["gateway"] - middle["direct"],
        "answer_seconds": {name: statistics.median(each) for name, each in answers.items()},
        "events_per_second": rates,
        "events_share": rates["gateway"] / rates["direct"],
        "events_per_second_by_round": events,
    }  # fmt: skip


@contextmanager
def _service(place: _Place) -> Iterator[BenchClient]:
    """`ragcache serve` over the same ledger and remote."""
    settings = place.settings(1)
    names = ("ledger", "remote", "embedding", "dtype", "page", "lame_duck")
    options = [f"--set={name}={getattr(settings, name)}" for name in names[:2] + names[4:]]
    options += [f"--{name}={getattr(settings, name)}" for name in names[2:4]]
    options += [f"--port={settings.port}", f"--state={place.folder / 'direct'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ragcache_api.cli.main", "serve", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    client = BenchClient(settings.port)
    try:
        while client.call("GET", "/health/ready").status != 200:
            if process.poll() is not None:
                raise RuntimeError(f"the service has ended: {process.returncode}")
            time.sleep(0.2)
        yield client
    finally:
        process.terminate()
        process.wait()


def _events_per_second(client: BenchClient, questions: Sequence[str], streams: int = 8) -> float:
    """Tokens a second of streams at once."""
    load, begun = Load(), time.perf_counter()
    stream = partial(client.chat, tokens=64, stream=True)
    for number in range(streams):
        load.add(islice(repeat_calls(stream, questions, number), 2))
    check_replies(load.wait())
    seconds = time.perf_counter() - begun
    return sum(each.body.count(b'"delta":{"content":"') for each in load.replies) / seconds


PARTS: Mapping[str, Callable[[_Place, ClusterSetting, Progress], dict[str, Any]]] = {
    "encodings": measure_encodings, "kill": measure_kill, "upgrade": measure_upgrade,
    "gateway": measure_gateway,
}  # fmt: skip


def bench_cluster(
    ledger: str, parts: Sequence[str], setting: ClusterSetting,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Runs parts, each with replicas of its own.

    Args:
        ledger: The URL of a PostgreSQL database, in which each part makes a schema and drops it.
        parts: Of `PARTS`.
        setting: The workload.
        progress: Called with what is being measured.
    """
    measured: dict[str, Any] = {}
    for name in parts:
        progress(name)
        load = os.getloadavg()[0]
        with _place(ledger) as place:
            figures = PARTS[name](place, setting, progress)
        measured[name] = figures | {"load_before": load, "date": describe_machine()["date"]}
    told = asdict(setting)
    told |= {"documents": len(setting.documents), "questions": len(setting.questions)}
    return measured | {"setting": told, "machine": describe_machine()}


def _figure(value: object) -> str:
    """A figure, or several with their names, as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(
    ledger: Annotated[str, typer.Option(help="A PostgreSQL database; schemas of it are used.")],
    documents: Annotated[Path, typer.Option(help="A folder of texts.")],
    questions: Annotated[Path, typer.Option(help="Questions over it, as for `ragcache eval`.")],
    part: Annotated[list[str] | None, typer.Option(help="Only this; repeatable.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Replicas on this machine behind their gateway: encodings, lost replicas, upgrades."""
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"no part {sorted(unknown)}; parts: {', '.join(PARTS)}")
    texts = [each.text for each in load_sources([documents]).documents]
    asked = [each.question for each in load_dataset(questions).questions]
    setting = ClusterSetting(texts, asked)
    result = run_benchmark(
        lambda progress: bench_cluster(ledger, part or tuple(PARTS), setting, progress)
    )
    tables = []
    for name in filter(result.__contains__, PARTS):
        table = plain_table(name, "")
        for figure, value in result[name].items():
            table.add_row(figure.replace("_", " "), _figure(value))
        tables.append(table)
    print_figures(tables, result, json_file)


if __name__ == "__main__":
    typer.run(main)
