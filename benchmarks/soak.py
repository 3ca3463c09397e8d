"""A soak: mixed load on a service for hours, with kills and outages, and what must stay flat.

    python benchmarks/soak.py run single soak/single.jsonl --seconds 7200
    python benchmarks/soak.py run replicas soak/replicas.jsonl --seconds 7200
    python benchmarks/soak.py report soak/*.jsonl --plot soak.svg

`single` is one service on SQLite. `replicas` are two behind their gateway, on Ray Serve, over a
PostgreSQL that the script starts from the binaries on this machine, and a remote tier in a folder.
Exit status 1 says that something grew or that an error was seen which no disturbance explains.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import httpx
import psutil
import typer
from harness import describe_machine
from soak_load import MixedLoad, read_handbook
from soak_report import WARM_UP_SECONDS, SoakRun, draw
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from ragcache.db.database import APPLICATION_NAME, database_url
from ragcache.db.tables import Base
from ragcache.evaluation import load_dataset

_EXAMPLES = Path(__file__).parent.parent / "examples"
_START_SECONDS = 300.0  # until a service must be ready
_OUTAGE_SECONDS = 8.0  # of PostgreSQL
_BUDGETS = {
    "host_bytes": "48MiB",  # half of the states that are in use, so that it is full in minutes
    "disk_bytes": "192MiB",
    "private_bytes": "24MiB",  # half of it holds ended prompts, and is full in minutes
}
_REPLICA_DISK = "64MiB"  # less than all states take, so that it is full in minutes
_SQLITE_SIZE = text("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
_POSTGRES_SIZE = text("SELECT pg_database_size(current_database())")
_CONNECTIONS = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # else its kernels fill a gigabyte in some hours
    "LRU_CACHE_CAPACITY": "64",
}

SetUp = Literal["single", "replicas"]
app = typer.Typer(add_completion=False)


class Postgres:
    """A PostgreSQL of this machine's binaries in a folder, as an unprivileged user."""

    def __init__(self, folder: Path) -> None:
        self._data, self._port = folder / "data", free_port()
        self._user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        self._log = (folder / "log").open("w")
        if self._user is not None:
            shutil.chown(folder, self._user)
        command = [_binary("initdb"), "-D", str(self._data), "-U", "ragcache", "-A", "trust", "-N"]
        subprocess.run(command, check=True, user=self._user, stdout=self._log, stderr=self._log)
        self.start()
        self.url = f"postgresql://ragcache@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        given = {
            "port": self._port,
            "listen_addresses": "127.0.0.1",
            "shared_buffers": "32MB",
            "unix_socket_directories": "",
            "max_wal_size": "64MB",
            "min_wal_size": "32MB",
        }
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [_binary("postgres"), "-D", str(self._data), *options]
        self.process = subprocess.Popen(
            command, user=self._user, stdout=self._log, stderr=self._log, start_new_session=True
        )
        ready = [_binary("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        wait_until(60, lambda: subprocess.run(ready, check=False).returncode == 0)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ends it: SIGINT cuts connections off, SIGQUIT is as a crash."""
        self.process.send_signal(number)
        self.process.wait(60)


@dataclass
class ServiceUnderTest:
    """`ragcache serve` in a folder, as one process on SQLite or as replicas on PostgreSQL."""

    folder: Path
    replicas: int = 0
    postgres: Postgres | None = None
    port: int = field(default_factory=lambda: free_port())
    headers: dict[str, str] = field(default_factory=dict)
    """Headers with the operator's key, once there is one."""
    _process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ledger(self) -> str:
        """URL of the ledger."""
        file = self.folder / "state" / "ledger.sqlite"
        return f"sqlite:///{file}" if self.postgres is None else self.postgres.url

    def start(self) -> None:
        """Starts it, and waits until it takes requests."""
        given = {**_BUDGETS, "state": str(self.folder / "state"), "port": str(self.port)}
        if self.replicas:
            given |= {"replicas": str(self.replicas), "ledger": self.ledger}
            given |= {"remote": f"file://{self.folder / 'remote'}", "disk_bytes": _REPLICA_DISK}
        variables = {f"RAGCACHE_{name.upper()}": value for name, value in given.items()}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ragcache_api.cli.main", "serve"],
                cwd=self.folder,
                env={**_ENVIRONMENT, **os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        self.wait()

    def wait(self) -> None:
        """Waits until it takes requests, with all replicas."""

        def is_ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service has ended; {self.folder / 'log'} says why")
            with suppress(httpx.HTTPError):
                ready = httpx.get(f"{self.url}/health/ready", timeout=5).is_success
                return ready and len(self._listed()) == self.replicas
            return False

        wait_until(_START_SECONDS, is_ready, every=0.5)

    def _listed(self) -> set[str]:
        """The names of the replicas that have said their sessions."""
        path = f"{self.url}/admin/replicas"
        with suppress(httpx.HTTPError):
            items = httpx.get(path, headers=self.headers, timeout=5).json().get("items", ())
            return {each["name"] for each in items if each["session"] != each["name"]}
        return set()

    def kill(self) -> None:
        """SIGKILLs the service and starts it again, or the replica that began last."""
        if not self.replicas:
            self._process.kill()
            self._process.wait()
            self.start()
            return
        replicas = [each for each in self.processes() if _role(each) == "replica"]
        latest = max(replicas, key=psutil.Process.create_time)
        before = self._listed()
        latest.kill()
        wait_until(_START_SECONDS, lambda: len(self._listed() - before) == 1, every=0.5)
        self.wait()

    def processes(self) -> list[psutil.Process]:
        """The process with all that it has started."""
        return family(self._process.pid)

    def stop(self) -> int:
        """Ends it as an operator does, and returns its exit status."""
        self._process.terminate()
        try:
            return self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass
class Probe:
    """Measures a service, its processes, disks and ledger."""

    service: ServiceUnderTest
    load: MixedLoad
    events: list[dict[str, Any]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _cpu: dict[int, float] = field(default_factory=dict)
    _engine: Engine | None = None

    def sample(self) -> dict[str, Any]:
        """Everything at this moment; times and bytes, and calls since the last sample."""
        service, postgres = self.service, self.service.postgres
        events, self.events = self.events, []
        measured = [m for each in service.processes() if (m := self._process(each))]
        if postgres is not None:
            every = family(postgres.process.pid)
            if backends := [m for each in every if (m := self._process(each))]:
                sums = {kind: sum(each[kind] for each in backends) for kind in ("memory", "mapped")}
                measured.append({"role": "postgres", "pid": 0, **sums})
        ledger = self._ledger()
        numbers = {"processes": len(measured), "connections": ledger.pop("connections", None)}
        return {
            "at": round(time.monotonic() - self.begun, 2),
            "events": events,
            "processes": [each for each in measured if each["role"] != "other"],
            "numbers": numbers | {"observed": self.load.observed()},
            "cpu": round(sum(self._cpu.values()), 2),
            "disk": {
                name: _bytes_below(service.folder / name)
                for name in ("state", "remote")
                if (service.folder / name).exists()
            },
            "ledger": ledger,
            "tiers": self.load.tiers(),
            "counts": dict(self.load.counts),
            "seconds": self.load.take_seconds(),
            "unexpected": list(self.load.unexpected),
        }

    def _process(self, process: psutil.Process) -> dict[str, Any] | None:
        try:
            role, memory = _role(process), process.memory_info()
            times = process.cpu_times()
            self._cpu[process.pid] = times.user + times.system
            return {
                "role": role,
                "pid": process.pid,
                "memory": memory.rss - memory.shared,
                "mapped": memory.shared,
                "threads": process.num_threads(),
                "descriptors": process.num_fds(),
            }
        except psutil.Error:
            return None  # it has just ended

    def _ledger(self) -> dict[str, Any]:
        """Bytes, rows, and the service's connections to PostgreSQL; empty without an answer."""
        if self._engine is None:
            self._engine = create_engine(database_url(self.service.ledger))
        try:
            with self._engine.connect() as connection:
                rows = {
                    name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
                    for name in Base.metadata.tables
                }
                size, found = _SQLITE_SIZE, {"rows": rows}
                if self.service.postgres is not None:
                    size, named = _POSTGRES_SIZE, {"name": APPLICATION_NAME}
                    found["connections"] = connection.execute(_CONNECTIONS, named).scalar_one()
                return found | {"bytes": connection.execute(size).scalar_one()}
        except SQLAlchemyError:
            self._engine.dispose()
            return {}


def disturb(probe: Probe, plan: Sequence[tuple[float, str]], ended: threading.Event) -> None:
    """Does what the plan says, at its seconds since the beginning of the run."""
    service, postgres = probe.service, probe.service.postgres
    for number, (at, name) in enumerate(plan):
        if ended.wait(max(0.0, probe.begun + at - time.monotonic())):
            return
        begun = time.monotonic()
        with probe.load.disturbance():
            try:
                if name == "kill":
                    service.kill()
                elif postgres is not None:
                    postgres.stop(signal.SIGINT if number % 4 == 1 else signal.SIGQUIT)
                    time.sleep(_OUTAGE_SECONDS)
                    postgres.start()
            except (TimeoutError, RuntimeError) as error:
                probe.load.unexpected.append(f"{name} {error!r}")
        seconds = round(time.monotonic() - begun, 1)
        probe.events.append({"name": name, "at": at, "seconds": seconds})


def make_plan(replicas: bool, seconds: float) -> list[tuple[float, str]]:
    """Disturbances: one kill of a single service after a quarter; of replicas and PostgreSQL in
    turn eleven, so that the replica that is never the last to begin lives throughout."""
    if not replicas:
        return [(seconds / 4, "kill")]
    return [(seconds * n / 12, "kill" if n % 2 else "restart") for n in range(1, 12)]


@contextmanager
def running(setup: SetUp, folder: Path) -> Iterator[ServiceUnderTest]:
    """A service of a set-up in a folder, with its PostgreSQL."""
    folder.chmod(0o755)  # PostgreSQL's user must reach its own folder in it
    (folder / "postgres").mkdir()
    replicas = setup == "replicas"
    postgres = Postgres(folder / "postgres") if replicas else None
    service = ServiceUnderTest(folder, 2 if replicas else 0, postgres)
    try:
        service.start()
        yield service
    finally:
        for each in reversed(service.processes()):
            with suppress(psutil.Error):
                each.kill()
        if postgres is not None:
            postgres.stop(signal.SIGQUIT)


def soak(setup: SetUp, seconds: float, every: float, write: Callable[[Any], None]) -> None:
    """Runs a set-up under load, and writes its setting, a sample every few seconds, and its end."""
    write({"setup": setup, "seconds": seconds, "every": every, "machine": describe_machine()})
    questions = tuple(
        each.question for each in load_dataset(_EXAMPLES / "questions.jsonl").questions
    )
    with (
        tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name,
        running(setup, Path(name)) as service,
    ):
        key = httpx.post(f"{service.url}/admin/keys", json={"name": "soak", "role": "admin"})
        service.headers["Authorization"] = f"Bearer {key.json()['secret']}"
        load = MixedLoad(
            service.url, service.headers, read_handbook(_EXAMPLES / "handbook"), questions
        )
        load.start()
        probe, ended = Probe(service, load), threading.Event()
        plan = make_plan(setup == "replicas", seconds)
        disturbing = threading.Thread(target=disturb, args=(probe, plan, ended))
        disturbing.start()
        while (now := time.monotonic() - probe.begun) < seconds:
            write(probe.sample())
            time.sleep(max(0.0, min(every - now % every, seconds - now)))
        ended.set()
        disturbing.join()
        load.stop()
        write(probe.sample())
        problems = load.compare_documents()
        time.sleep(5)  # a sweep or two
        report = load.verify()
        problems += [] if report["clean"] else [f"verify is not clean: {report['found']}"]
        status = service.stop()
        problems += [f"the service ended with status {status}"] if status else []
        write({"problems": problems})


def family(pid: int) -> list[psutil.Process]:
    """A process with all that it has started; empty if it has ended."""
    try:
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_until(seconds: float, found: Callable[[], bool], every: float = 0.1) -> None:
    """Waits until something is so. Raises `TimeoutError` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not found():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(every)


def free_port() -> int:
    """A free port of loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _role(process: psutil.Process) -> str:
    """Return the role of a process of a service. Short-lived helpers are `other`."""
    try:
        title, name = " ".join(process.cmdline()[:4]), process.name()
    except psutil.Error:
        return "other"
    known = {
        "Replica:ragcache:Replica": "replica",
        "Replica:ragcache:Gateway": "gateway",
        "ServeController": "ray controller",
        "ProxyActor": "ray proxy",
        "raylet": "raylet",
        "gcs_server": "ray gcs",
        "ragcache_api.cli.main": "service",
        "postgres": "postgres",
    }
    return next((role for part, role in known.items() if part in title or part == name), "other")


def _binary(name: str) -> str:
    """A program of the newest PostgreSQL here: of Debian's folders, or of PATH."""
    if installed := sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}")):
        return str(installed[-1])
    if found := shutil.which(name):
        return found
    raise FileNotFoundError(f"{name} is not installed (package `postgresql`)")


def _bytes_below(folder: Path) -> int:
    """Bytes on disk of the files below a folder, without the ledger's."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if not path.name.startswith("ledger.sqlite"):
                total += path.lstat().st_blocks * 512
    return total


@app.command()
def run(
    setup: Annotated[SetUp, typer.Argument(help="What is run.")],
    file: Annotated[Path, typer.Argument(help="File for the samples, as JSON lines.")],
    seconds: Annotated[float, typer.Option(help="How long.")] = 7200.0,
    every: Annotated[float, typer.Option(help="Seconds between two samples.")] = 10.0,
    warm_up: Annotated[float, typer.Option(help="Seconds that are not judged.")] = WARM_UP_SECONDS,
) -> None:
    """Run a soak, and judge it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        soak(setup, seconds, every, lambda line: _write(lines, line))
    _tell([SoakRun.read(file)], warm_up)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Samples of runs, also of such as go on.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the curves: .png or .svg.")] = None,
    warm_up: Annotated[float, typer.Option(help="Seconds that are not judged.")] = WARM_UP_SECONDS,
) -> None:
    """Print the figures of runs, and judge them."""
    runs = [SoakRun.read(file) for file in files]
    if plot is not None:
        draw(runs, plot)
    _tell(runs, warm_up)


def _write(lines: TextIO, line: Mapping[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()


def _tell(runs: Sequence[SoakRun], warm_up: float) -> None:
    for each in runs:
        typer.echo(each.table(warm_up) + "\n")
    if any(each.problems(warm_up) for each in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending what it started
    app()
