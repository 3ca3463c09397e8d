"""Many streaming clients at once: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
import pytest

from tests.api.http.conftest import LEAVE, Start
from tests.api.http.events import events
from tests.api.http.server_process import Started

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]
# What fills as it is used is small here, so that it is full after seconds, and what grows after
# that is a leak: the pool of private states, and PyTorch's two caches of compiled matrix products
# (oneDNN's and its wrapper's), each of which otherwise holds 1,024 shapes of up to half a MiB.
SMALL = {
    "RAGCACHE_PRIVATE_BYTES": "64MiB",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
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


async def load(server: Started, clients: int, seconds: float) -> tuple[int, set[str]]:
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
    assert told["batch"]["rows"] == 0
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "ragcache_open_requests 0.0" in metrics
    assert "ragcache_engine_waiting 0.0" in metrics
    leased = re.search(r"^ragcache_leased_states (\S+)", metrics, re.MULTILINE)
    assert leased is not None
    assert float(leased[1]) == 0
    failed = httpx.get(f"{server.url}/admin/stats").json()["requests"]
    assert failed["failed"] == failed["cancelled"] == 0


def test_fifty_clients_get_what_one_gets(server: Started) -> None:
    answers, texts = asyncio.run(load(server, 50, 1.0))
    assert answers >= 50
    assert len(texts) <= len(QUESTIONS)
    check_nothing_left(server)


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute(start: Start, state: Path) -> None:
    server = start(state, **SMALL)
    asyncio.run(load(server, 200, 10.0))
    before = resident(server)
    answers, texts = asyncio.run(load(server, 200, 60.0))
    assert answers >= 200
    assert len(texts) <= len(QUESTIONS)
    check_nothing_left(server)
    assert resident(server) < before + 32 * 2**20
    assert server.stop() == 0
