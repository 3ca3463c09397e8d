"""The server process: proxies, connections, many clients at once, and its end by a signal."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings, create_app, server
from ragcache_api.http.server import (
    KeyRequired,
    check_exposure,
    is_loopback,
    server_config,
)
from tests.api.http.asgi import App, Caller, events
from tests.api.http.conftest import LEAVE, Start, serving
from tests.api.http.server_process import Started
from tests.conftest import scaled


async def statuses(app: App, client: str, number: int) -> list[int]:
    """Return the statuses of calls from one address, each of which names another in a header."""
    callers = [Caller() for _ in range(number)]
    for each, caller in enumerate(callers):
        await caller.call(app, "GET", "/v1/models", client=client, x_forwarded_for=f"10.0.0.{each}")
    return [caller.status for caller in callers]


@pytest.mark.parametrize(
    ("trusted", "client", "refused"),
    [("", "127.0.0.1", True), ("127.0.0.1", "127.0.0.1", False), ("127.0.0.1", "127.0.0.2", True)],
)
def test_only_proxies_that_are_named_tell_who_calls(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch, trusted: str, client: str, refused: bool
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn reads it by itself
    settings = ServiceSettings.read(rate="2/minute", trusted_proxies=trusted)
    config = server_config(create_app(rag, settings), settings)
    config.load()
    assert (429 in asyncio.run(statuses(config.loaded_app, client, 3))) is refused


def test_connections_are_counted(rag: RagCache) -> None:
    settings = ServiceSettings.read(connections=7)
    assert server_config(create_app(rag, settings), settings).limit_concurrency == 7


def test_a_service_returns_freed_memory_while_it_runs(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(server, "release_freed_memory_regularly", lambda: done.append("release"))
    monkeypatch.setattr(server.GracefulServer, "run", lambda _: done.append("run"))
    server.serve(rag, ServiceSettings.read())
    assert done == ["release", "run"]


ARENAS = """
import ctypes, sys
from pathlib import Path
from ragcache_api.cli.main import app
from ragcache_api.http import server

def count_arenas(rag, settings):
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(b"malloc.xml", b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(Path("malloc.xml").read_text().count("<heap "))

server.serve = count_arenas
sys.argv = ["ragcache", "serve", "--state", "state"]
app()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's malloc's")
@pytest.mark.slow
def test_all_threads_of_a_service_share_one_arena(tmp_path: Path) -> None:
    """Memory at the end of another one would not be returned."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC")}
    command = [sys.executable, "-c", ARENAS]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"]


pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]
LONG = {
    "question": LEAVE, "collection": "notes", "stream": True, "max_tokens": 2500,
    "ignore_eos": True, "extractive": False,
}  # fmt: skip


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> str:
    """How a request ended: `answer`, `error`, or the status that refused it."""
    try:
        response = await client.post(f"{url}/v1/answers", json=body)
    except httpx.ConnectError:
        return "refused"
    if response.status_code != 200:
        return str(response.status_code)
    return events(response.text)[-1][0] if body["stream"] else "answer"


async def load(server: Started, clients: int, seconds: float) -> list[str]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        short = {**LONG, "max_tokens": 3}
        whole = {**LONG, "stream": False}
        asked = [
            asyncio.create_task(ask(client, server.url, body))
            for _ in range(clients // 3)
            for body in (LONG, short, whole)
        ]
        await asyncio.sleep(seconds)
        server.process.terminate()
        return await asyncio.wait_for(asyncio.gather(*asked), 60)


@pytest.mark.slow
def test_every_client_gets_an_end_or_an_error(start: Start, state: Path) -> None:
    server = start(state, "--set", "grace=1")
    begun = time.monotonic()
    ends = asyncio.run(load(server, 24, 0.7))
    assert server.stop() == 0, "".join(server.log)
    assert time.monotonic() - begun < 60
    assert set(ends) <= {"answer", "error", "503", "refused"}
    assert "error" in ends or "503" in ends, "the long ones cannot have ended by themselves"
    with sqlite3.connect(state / "ledger.sqlite") as ledger:
        assert ledger.execute("select count(*) from sessions").fetchone() == (0,)


@pytest.mark.slow
def test_what_runs_has_time_to_finish(start: Start, state: Path) -> None:
    server = start(state)
    body = {**LONG, "max_tokens": 150}

    async def ask_and_stop() -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            asked = asyncio.create_task(ask(client, server.url, body))
            while not (await client.get(f"{server.url}/admin/requests")).json()["running"]:
                await asyncio.sleep(0.02)
            server.process.terminate()
            return await asked

    assert asyncio.run(ask_and_stop()) == "answer"
    assert server.stop() == 0


@pytest.mark.slow
def test_further_signals_still_let_the_folder_close(start: Start, state: Path) -> None:
    server = start(state)
    while server.process.is_alive():
        server.process.terminate()
        time.sleep(0.005)
    assert server.process.exitcode == 0, "".join(server.log)
    with sqlite3.connect(state / "ledger.sqlite") as ledger:
        assert ledger.execute("select count(*) from sessions").fetchone() == (0,)


@pytest.mark.usefixtures("slow_steps")
def test_what_runs_ends_with_an_error_after_grace(rag: RagCache) -> None:
    with (
        serving(rag, grace=0.2) as (server, url),
        httpx.stream("POST", f"{url}/v1/answers", json=LONG, timeout=60) as response,
    ):
        lines = response.iter_lines()
        first = next(lines)
        server.handle_exit(signal.SIGTERM, None)
        rest = list(lines)
    assert (first, "event: error" in rest) == ("event: sources", True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_an_open_address_without_a_key_is_refused(reader: LoadedModel, tmp_path: Path) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        check_exposure(rag.keys, ServiceSettings.read(host="127.0.0.1"))
        with pytest.raises(KeyRequired, match="ragcache keys create"):
            check_exposure(rag.keys, ServiceSettings.read(host="0.0.0.0"))
        rag.keys.create("me")
        check_exposure(rag.keys, ServiceSettings.read(host="0.0.0.0"))


@pytest.mark.parametrize(
    ("host", "closed"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.0.7", False), ("reader.example", False)],
)  # fmt: skip
def test_loopback_is_known_by_its_address(host: str, closed: bool) -> None:
    assert is_loopback(host) is closed


# What fills as it is used is small here, so that it is full after seconds, and what grows after
# that is a leak: the pool of private states, and PyTorch's two caches of compiled matrix products
# (oneDNN's and its wrapper's), each of which otherwise holds 1,024 shapes of up to half a MiB.
SMALL = {
    "RAGCACHE_PRIVATE_BYTES": "64MiB",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    "RAGCACHE_QUEUE_SECONDS": "600",  # none of the clients is refused
}
QUESTIONS = (LEAVE, "Where is the survey boat moored?", "Where hangs the spare key?")


async def stream(client: httpx.AsyncClient, url: str, question: str) -> str:
    body = {"question": question, "collection": "notes", "stream": True, "max_tokens": 8}
    response = await client.post(f"{url}/v1/answers", json=body)
    assert response.status_code == 200, response.text
    told = events(response.text)
    assert told[0][0] == "sources"
    assert told[-1][0] == "answer", told[-1]
    pieces = "".join(value["text"] for name, value in told if name == "token")
    assert pieces.strip() == told[-1][1]["text"]
    return str(told[-1][1]["text"])


async def stream_load(server: Started, clients: int, seconds: float) -> tuple[int, set[str]]:
    """Clients that ask one question after the other; how many answers came, and which."""
    until = time.monotonic() + seconds
    texts: list[str] = []

    async def ask_on(number: int, client: httpx.AsyncClient) -> None:
        question = QUESTIONS[number % len(QUESTIONS)]
        while True:
            texts.append(await stream(client, server.url, question))
            if time.monotonic() > until:
                return

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(ask_on(number, client) for number in range(clients)))
    return len(texts), set(texts)


def resident(server: Started) -> int:
    """Bytes of memory that the server holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def check_nothing_left(server: Started) -> None:
    told = httpx.get(f"{server.url}/admin/requests").json()
    assert told["running"] == []
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "ragcache_open_requests 0.0" in metrics
    assert "ragcache_engine_running 0.0" in metrics
    assert "ragcache_engine_waiting 0.0" in metrics
    leased = re.search(r"^ragcache_leased_states (\S+)", metrics, re.MULTILINE)
    assert leased is not None
    assert float(leased[1]) == 0
    failed = httpx.get(f"{server.url}/admin/stats").json()["requests"]
    assert failed["failed"] == failed["cancelled"] == 0


@pytest.mark.slow
def test_another_process_encodes_nothing_and_answers_the_same(
    server: Started, state: Path, reader: LoadedModel
) -> None:
    with RagCache.open(state, reader, max_tokens=8) as rag:
        here = rag.ask(LEAVE, collection="notes")
        assert rag.stats().encoded == 0
    body = {"question": LEAVE, "collection": "notes", "max_tokens": 8}
    there = httpx.post(f"{server.url}/v1/answers", json=body, timeout=60).json()
    assert there["text"] == here.text
    assert there["reuse"]["cached_tokens"] == here.reuse.cached_tokens > 0
    encoded = httpx.get(f"{server.url}/admin/stats").json()["tokens"].get("encoded", 0)
    assert encoded == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_two_hundred_clients_for_long(start: Start, state: Path) -> None:
    """A minute under the profile `full`."""
    server = start(state, **SMALL)
    asyncio.run(stream_load(server, 200, scaled(10, quick=0.6)))
    before = resident(server)
    answers, texts = asyncio.run(stream_load(server, 200, scaled(60, quick=0.15)))
    assert answers >= 200
    assert len(texts) <= len(QUESTIONS)
    check_nothing_left(server)
    assert resident(server) < before + 32 * 2**20
    assert server.stop() == 0
