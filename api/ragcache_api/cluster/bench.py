"""What several replicas bring and cost, measured on one machine over a PostgreSQL: encodings, hits
by routing, a lost replica, a rolling upgrade, throughput with simulated device time, and the front.

All is real but what is named: replicas of the embedded reader in float32 on Ray Serve, their front,
a ledger, and a remote tier in a folder. Where device time is simulated, a step of the engine takes
a given time, and so does each module that is brought to memory.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import create_engine, select

from ragcache.bench.harness import Progress
from ragcache.bench.routing import POLICIES, RoutingWorkload, topic_workload
from ragcache.db import Database
from ragcache.db.database import database_url
from ragcache.db.tables import SessionTable
from ragcache.errors import ConfigurationError
from ragcache.machine import describe_machine
from ragcache.routing import RoutingCosts
from ragcache.store.tiers import Tier
from ragcache_api.cluster import replicas as shared
from ragcache_api.cluster.app import ModuleRouter, Replica, application, deploy, ray_serve
from ragcache_api.cluster.haproxy import check_haproxy
from ragcache_api.cluster.load import (
    BenchClient,
    Load,
    ask_all,
    check_replies,
    repeat_calls,
)
from ragcache_api.settings import ServiceSettings

_ROUTER = "ragcache_api.cluster.bench.ComparedRouter"
_MODULE_SECONDS = 0.04  # of 50 MB over 10 GbE, which a module counts as where hits are compared
_ENCODE_RATE = 1e-9  # so slow that moving is always cheaper
_HOST_SECONDS = 0.001
_FILLERS = "the boat quay lamp store rope winch tide berth signal cable gate harbor watch".split()


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """What is run.

    Attributes:
        replicas: Of all parts but `throughput` and `front`.
        askers: Clients that ask one question after another; `kill` and `upgrade` have one more,
            which reads streams.
        seconds: Of load in `kill`, and of each measurement of `throughput`.
        requests: Of each policy in `topics` and `questions`; the first third warms the tiers.
        documents, questions: Texts, and what is asked about them; 96 made-up texts by default.
        throughput_replicas: Those that are compared with one.
        slots, step_seconds, tokens, move_seconds: Of the simulated device: requests that a step
            takes without becoming longer, seconds of a step, tokens of an answer, and seconds to
            bring a module.
        rounds: Of `front`.
    """

    replicas: int = 3
    askers: int = 3
    seconds: float = 45.0
    requests: int = 600
    documents: Sequence[str] = ()
    questions: Sequence[str] = ()
    throughput_replicas: Sequence[int] = (3, 4)
    slots: int = 4
    step_seconds: float = 0.4
    tokens: int = 10
    move_seconds: float = 0.8
    rounds: int = 6


class ComparedRouter(ModuleRouter):
    """Routes by one of `POLICIES`, at costs that are given."""

    def initialize_state(self, **options: Any) -> None:
        """options: `policy` and `costs`, the fields of `RoutingCosts`."""
        super().initialize_state()
        shared.PROCESS_TABLE.policy = POLICIES[options["policy"]]
        shared.PROCESS_TABLE.costs = RoutingCosts(**options["costs"])


class UnmeasuredReplica(Replica):
    """A replica that does not tell what moving states costs here: the costs given count."""

    def record_routing_stats(self) -> dict[str, Any]:
        return super().record_routing_stats() | {"costs": {}}


_DEVICE = "RAGCACHE_BENCH_DEVICE"


class SimulatedReplica(UnmeasuredReplica):
    """A replica whose device takes the time that `RAGCACHE_BENCH_DEVICE` says, as JSON."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        device = json.loads(os.environ[_DEVICE])
        services = self._rag.internals.shared
        _simulate_steps(services.engine.core.runner, device["step_seconds"], device["slots"])
        for index in services.store.persistent.indexes:
            _simulate_moves(index.tier, device["move_seconds"])


def _simulate_steps(runner: Any, seconds: float, slots: int) -> None:
    prepare = runner.prepare_batch

    def prepare_batch(chunks: Sequence[Any]) -> Callable[[], Any]:
        compute = prepare(chunks)
        return lambda: _at_least(seconds * max(1.0, len(chunks) / slots), compute)

    runner.prepare_batch = prepare_batch


def _simulate_moves(tier: Tier, seconds: float) -> None:
    get = tier.get
    tier.get = lambda key: _at_least(seconds, partial(get, key))  # type: ignore[method-assign]  # of this one alone


def _at_least(seconds: float, call: Callable[[], Any]) -> Any:
    end = time.perf_counter() + seconds
    result = call()
    time.sleep(max(0.0, end - time.perf_counter()))
    return result


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one part runs: an empty schema of the database, and a folder."""

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
    def cluster(self, settings: ServiceSettings, **served: Any) -> Iterator[BenchClient]:
        """A running service. served: as for `application`."""
        with ray_serve(settings):
            deploy(application(settings, **served))
            client = BenchClient(settings.port)
            client.wait_for(settings.replicas or 1)
            yield client


@contextmanager
def _place(ledger: str) -> Iterator[_Place]:
    name = f"ragcache_bench_{uuid4().hex}"
    engine = create_engine(database_url(ledger))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            mark = "&" if "?" in ledger else "?"
            yield _Place(f"{ledger}{mark}options=-csearch_path%3D{name}", Path(folder))
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
        engine.dispose()


def _word(number: int) -> str:
    """A word of its own for each number, which no stemmer shortens."""
    syllables = [a + b for a in "bdfgklmnprtvz" for b in "aou"]
    places = (number // len(syllables) ** n for n in range(3))
    return "".join(syllables[place % len(syllables)] for place in places) + "x"


def made_up_texts(number: int) -> list[str]:
    """Texts of about a hundred tokens, each of which alone has `_word` of its number."""
    rng = random.Random(3)
    return [
        " ".join(f"{_word(each)} is by {' '.join(rng.choices(_FILLERS, k=16))}." for _ in range(4))
        for each in range(number)
    ]


def questions_for(workload: RoutingWorkload) -> list[str]:
    """Questions for which BM25 finds the modules of each request among `made_up_texts`."""
    return [" ".join(map(_word, modules)) for modules in workload.requests]


def measure_encodings(
    place: _Place, setting: ClusterSetting, progress: Progress
) -> dict[str, Any]:  # fmt: skip
    """What is encoded when documents are ingested through the front and asked everywhere."""
    texts, questions = _corpus(setting)
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


def _corpus(setting: ClusterSetting) -> tuple[Sequence[str], Sequence[str]]:
    if setting.documents:
        return setting.documents, setting.questions
    return made_up_texts(96), questions_for(topic_workload(requests=96))


def measure_topics(place: _Place, setting: ClusterSetting, progress: Progress) -> dict[str, Any]:
    """The share of modules that are found in memory, by policy, where each replica holds half:
    twelve topics of eight modules, of which a question reads four."""
    workload = topic_workload(requests=setting.requests)
    return _compare_hits(place, made_up_texts(96), questions_for(workload), setting, progress)


def measure_questions(
    place: _Place, setting: ClusterSetting, progress: Progress
) -> dict[str, Any]:  # fmt: skip
    """The same for the questions over the documents."""
    texts, questions = _corpus(setting)
    rng = random.Random(7)
    asked = [rng.choice(questions) for _ in range(setting.requests)]
    return _compare_hits(place, texts, asked, setting, progress)


def _compare_hits(
    place: _Place, texts: Sequence[str], questions: Sequence[str], setting: ClusterSetting,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    half, costs = _prepare_hits(place, texts)
    found: dict[str, Any] = {}
    for policy in ("modules", "prefix", "two choices"):
        progress(f"hits by {policy}")
        settings = place.settings(setting.replicas, host_bytes=half)
        options = {"replica": UnmeasuredReplica, "policy": policy, "costs": costs}
        with place.cluster(settings, router=_ROUTER, **options) as client:
            found[policy] = _hit_rate(client, questions, setting)
    return found


def _prepare_hits(place: _Place, texts: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Stores the texts; returns half of their states' bytes, and what routing is to assume."""
    with place.cluster(place.settings(1)) as client:
        client.ingest(texts)
        listed = client.get("/admin/tiers")["items"]
    [remote] = [tier for tier in listed if tier["name"] == "remote"]
    nbytes = remote["used_bytes"] / len(texts)
    costs = {
        "remote_bandwidth": nbytes / _MODULE_SECONDS, "host_bandwidth": nbytes / _HOST_SECONDS,
        "encode_rate": _ENCODE_RATE,
    }  # fmt: skip
    return int(remote["used_bytes"] / 2), costs


def _hit_rate(
    client: BenchClient, questions: Sequence[str], setting: ClusterSetting
) -> dict[str, Any]:  # fmt: skip
    """Asks all questions once."""
    warm = len(questions) // 3
    ask_all(client, questions[:warm], setting.askers)
    replies = ask_all(client, questions[warm:], setting.askers)
    tiers = [source["tier"] for each in replies for source in each.json["sources"]]
    hits = sum(tier in ("host", "device") for tier in tiers)
    routed = sorted(each["routed"] for each in client.replicas().values())
    return {"hits": hits / len(tiers), "modules": len(tiers), "routed": routed}


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
    """Replaces every replica, and the front, under load."""
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
    texts, questions = _corpus(setting)
    client.ingest(texts)
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


def measure_throughput(
    place: _Place, setting: ClusterSetting, progress: Progress
) -> dict[str, Any]:  # fmt: skip
    """Answers a second of several replicas over those of one, with simulated device time: as many
    clients as slots, and room for half of the modules in each replica."""
    workload = topic_workload(requests=1200)
    texts, questions = made_up_texts(96), questions_for(workload)
    half, _ = _prepare_hits(place, texts)
    device = ("step_seconds", "slots", "move_seconds")
    os.environ[_DEVICE] = json.dumps({name: getattr(setting, name) for name in device})
    service = setting.tokens * setting.step_seconds
    found: dict[str, Any] = {}
    runs = [(1, "modules")] + [
        (number, policy) for policy in ("modules", "two choices")
        for number in setting.throughput_replicas
    ]  # fmt: skip
    for number, policy in runs:
        progress(f"throughput: {number} replicas by {policy}")
        settings = place.settings(number, host_bytes=half)
        nbytes = 2 * half / len(texts)
        costs = {
            "remote_bandwidth": nbytes / setting.move_seconds, "host_bandwidth": 1e15,
            "encode_rate": _ENCODE_RATE, "slots": setting.slots, "service_seconds": service,
        }  # fmt: skip
        options = {"replica": SimulatedReplica, "router": _ROUTER, "policy": policy, "costs": costs}
        with place.cluster(settings, **options) as client:
            found[f"{number} by {policy}"] = _rate(client, questions, number, setting)
    one = found["1 by modules"]["answers_per_second"]
    for each in found.values():
        each["times_one"] = each["answers_per_second"] / one
    return found


def _rate(
    client: BenchClient, questions: Sequence[str], replicas: int, setting: ClusterSetting
) -> dict[str, Any]:  # fmt: skip
    load = Load()
    chat = partial(client.chat, tokens=setting.tokens)
    for number in range(replicas * setting.slots):
        load.add(repeat_calls(chat, questions, number))
    time.sleep(setting.seconds)
    first, begun = len(load.replies), time.perf_counter()
    time.sleep(setting.seconds)
    replies, seconds = load.replies[first:], time.perf_counter() - begun
    load.stop()
    check_replies(load.replies)
    tiers = [source["tier"] for each in replies for source in each.json["sources"]]
    return {
        "answers_per_second": len(replies) / seconds,
        "hits": sum(tier in ("host", "device") for tier in tiers) / max(1, len(tiers)),
    }


def measure_front(place: _Place, setting: ClusterSetting, progress: Progress) -> dict[str, Any]:
    """The same calls through the front to one replica, through HAProxy to one, and to a service by
    itself, in turn."""
    texts, questions = _corpus(setting)
    settings = place.settings(1)
    with ExitStack() as running:
        sides = {"front": running.enter_context(place.cluster(settings))}
        sides["direct"] = running.enter_context(_service(place, "direct"))
        try:
            check_haproxy(settings)
        except ConfigurationError as error:
            progress(f"front: not through HAProxy: {error}")
        else:
            more = ("--replicas=1", "--set=data_plane=haproxy")
            sides["haproxy"] = running.enter_context(_service(place, "haproxy", *more))
        sides["front"].ingest(texts)
        return _compare_sides(sides, questions, setting, progress)


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
        progress(f"front: round {number + 1} of {setting.rounds}")
        for name, client in sides.items():
            got = check_replies([client.call("GET", "/v1/collections") for _ in range(30)])
            asked = check_replies([client.ask(each) for each in questions[:24]])
            seconds[name] += [each.seconds for each in got]
            answers[name] += [each.seconds for each in asked]
            events[name].append(_events_per_second(client, questions))
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    rates = {name: statistics.median(each) for name, each in events.items()}
    others = [name for name in sides if name != "direct"]
    return {
        "get_seconds": middle,
        "get_added_seconds": {name: middle[name] - middle["direct"] for name in others},
        "answer_seconds": {name: statistics.median(each) for name, each in answers.items()},
        "events_per_second": rates,
        "events_share": {name: rates[name] / rates["direct"] for name in others},
        "events_per_second_by_round": events,
    }  # fmt: skip


@contextmanager
def _service(place: _Place, name: str, *more: str) -> Iterator[BenchClient]:
    """`ragcache serve` over the same ledger and remote. more: options."""
    settings = place.settings(1)
    names = ("ledger", "remote", "embedding", "dtype", "page", "lame_duck")
    options = [f"--set={name}={getattr(settings, name)}" for name in names[:2] + names[4:]]
    options += [f"--{name}={getattr(settings, name)}" for name in names[2:4]]
    options += [f"--port={settings.port}", f"--state={place.folder / name}", *more]
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
    "encodings": measure_encodings, "topics": measure_topics, "questions": measure_questions,
    "kill": measure_kill, "upgrade": measure_upgrade, "throughput": measure_throughput,
    "front": measure_front,
}  # fmt: skip


def bench_cluster(
    ledger: str, parts: Sequence[str] = tuple(PARTS), setting: ClusterSetting | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Runs parts, each with replicas of its own.

    Args:
        ledger: The URL of a PostgreSQL database, in which each part makes a schema and drops it.
        parts: Of `PARTS`.
        setting: What is run.
        progress: Called with what is being measured.
    """
    setting = setting or ClusterSetting()
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
