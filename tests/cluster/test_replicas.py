"""`ragcache serve --replicas 2` as compose.yaml has it: Ray Serve over PostgreSQL and an S3 store.
One replica is killed, one is halted, and PostgreSQL goes away. One service, which takes a minute to
start, meets all three."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
import yaml
from sqlalchemy import make_url, text

from ragcache.db import Database
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.conftest import REPOSITORY
from tests.deploy.read_only_root import read_only_root
from tests.ragcache.conftest import postgres_schema
from tests.ragcache.store.test_faults import Switch

pytest.importorskip("ray", reason="replicas run on Ray: pip install 'ragcache[ray]'")
moto = pytest.importorskip(
    "moto.server", reason="an S3 store to test with: pip install moto[server]"
)

pytestmark = pytest.mark.enable_socket

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text("utf-8"))
SERVICE = COMPOSE["services"]["ragcache"]
UNSET = re.compile(r"\$\{\w+:-(.*?)\}")
"""A variable of compose that nobody has set, with its default."""
COLLECTION = "/v1/collections/notes/documents"
DOCUMENTS = {
    "boats.md": "The survey boat Pipit is moored at the north quay.",
    "keys.md": "The spare key of the boathouse hangs in the red cupboard.",
    "leave.md": "Everybody has 26 days of leave a year.",
}
QUESTIONS = ("Where is the Pipit moored?", "Where does the spare key hang?", "How much leave?")

STALE_SECONDS = 20


@dataclass
class Cluster:
    """The running service, and the ledger of its replicas behind a switch."""

    client: httpx.Client
    ledger: str
    switch: Switch


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The service of the compose file, with its command and variables, and its ledger."""
    tmp_path = tmp_path_factory.mktemp("service")
    store = moto.ThreadedMotoServer(port=0)
    store.start()
    with socket.socket() as free, postgres_schema() as ledger:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        host, s3_port = store.get_host_and_port()
        switch = Switch(tmp_path, make_url(ledger))
        switch.on()
        given = {
            "RAGCACHE_LEDGER": switch.through(ledger), "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{s3_port}", "AWS_SECRET_ACCESS_KEY": "secret",
            "RAGCACHE_STALE_SECONDS": str(STALE_SECONDS),
        }  # fmt: skip
        stated = {k: UNSET.sub(r"\1", v) for k, v in SERVICE["environment"].items()}
        variables = {**stated, **given, "RAGCACHE_STATE": str(tmp_path / "state")}
        variables |= {"RAGCACHE_HOST_BYTES": "64MiB", "RAGCACHE_EMBEDDING": "none"}
        variables |= {"HOME": str(tmp_path), "USER": "ragcache"}
        assert SERVICE["read_only"]
        program = [sys.executable, "-m", "ragcache_api.cli.main"]
        command = [*read_only_root(), *program, *SERVICE["command"]]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)], env={**os.environ, **variables}, cwd=tmp_path,
                stdout=log, stderr=log,
            )  # fmt: skip
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        try:
            wait_until(300, lambda: is_ready(client) or process.poll() is not None, 1.0)
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            yield Cluster(client, ledger, switch)
            process.terminate()
            assert process.wait(120) == 0, (tmp_path / "log").read_text()[-4000:]
        finally:
            client.close()
            process.kill()
            store.stop()
            switch.off()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready", timeout=5).is_success and len(replicas(client)) == 2
    except (httpx.HTTPError, KeyError):
        return False


def replicas(client: httpx.Client) -> dict[str, str]:
    """The sessions of the replicas that have said theirs, by name."""
    listed = client.get("/admin/replicas").json()["items"]
    return {each["name"]: each["session"] for each in listed if each["session"] != each["name"]}


def routed(client: httpx.Client) -> dict[str, int]:
    """The number of requests that each replica got, by session."""
    listed = client.get("/admin/replicas").json()["items"]
    return {each["session"]: each["routed"] for each in listed}


def ask(client: httpx.Client, number: int) -> httpx.Response:
    question = QUESTIONS[number % len(QUESTIONS)]
    body = {"question": question, "collection": "notes", "k": 1, "max_tokens": 4}
    return client.post("/v1/answers", json=body)


def ask_all(client: httpx.Client, at_once: int = 1) -> None:
    """Ask each question twice, and check that all are answered."""
    with ThreadPoolExecutor(at_once) as askers:
        for answered in askers.map(partial(ask, client), range(6)):
            assert answered.status_code == 200, answered.text


def kept(ledger: str) -> tuple[int, dict[str, int]]:
    """The states in the remote tier, and the process numbers of sessions."""
    database = Database.open(ledger)
    with database.reading() as session:
        states = session.scalar(text("SELECT count(*) FROM states WHERE tier = 'remote'"))
        sessions = session.execute(text("SELECT id, pid FROM sessions"))
        pids = {row.id: row.pid for row in sessions}
    database.close()
    return int(states or 0), pids


def ingest(client: httpx.Client) -> None:
    """Store the documents, and ask each question twice."""
    documents = [{"id": name, "text": words} for name, words in DOCUMENTS.items()]
    number = client.post(COLLECTION, json={"documents": documents}).json()["id"]
    wait_until(120, lambda: client.get(f"/v1/jobs/{number}").json()["status"] == "done", 0.2)
    ask_all(client)


def test_a_replica_is_killed_and_nobody_notices(service: Cluster, measured: Measured) -> None:
    client = service.client
    measured("words before the command for a read-only root", read_only_root()[:1])
    ingest(client)
    before = replicas(client)
    states, pids = kept(service.ledger)
    assert states == len(DOCUMENTS) + 1  # and the preamble
    for session in before.values():  # malloc reads it once, when a process begins
        assert psutil.Process(pids[session]).environ()["MALLOC_ARENA_MAX"] == "2"
    name, lost = next(iter(before.items()))
    os.kill(pids[lost], signal.SIGKILL)
    killed = time.monotonic()
    answered = [ask(client, number) for number in range(12)]
    assert [each.status_code for each in answered] == [200] * 12
    wait_until(240, lambda: len(replicas(client).keys() - {name}) == 2, 1.0)
    measured("seconds until there were two again", round(time.monotonic() - killed, 1))
    ask_all(client)
    assert kept(service.ledger)[0] == states


def test_no_question_waits_as_long_as_a_replica_is_halted(
    service: Cluster, measured: Measured
) -> None:
    """The replica that has just answered a question is halted, and gets some of six at once."""
    client = service.client
    ingest(client)
    before = routed(client)
    ask(client, 0)
    after = routed(client)
    chosen = max(after, key=lambda session: after[session] - before[session])
    halted = kept(service.ledger)[1][chosen]
    retried = client.get("/admin/replicas").json()["retried"]

    def wait(number: int) -> float:
        began = time.monotonic()
        answered = ask(client, 0)
        assert answered.status_code == 200, answered.text
        return round(time.monotonic() - began, 1)

    os.kill(halted, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(6) as askers:
            waited = list(askers.map(wait, range(6)))
        measured("seconds that questions waited while a replica was halted", waited)
    finally:
        os.kill(halted, signal.SIGCONT)
    assert client.get("/admin/replicas").json()["retried"] > retried
    ask_all(client)


def test_replicas_answer_without_postgresql(service: Cluster, measured: Measured) -> None:
    """As a single service does: questions over states in memory, for `stale_seconds`."""
    client = service.client
    ingest(client)
    made = client.post("/admin/keys", json={"name": "page", "role": "admin"})
    client.headers["Authorization"] = f"Bearer {made.json()['secret']}"  # the last test's
    first = routed(client)

    def both_know_the_key() -> bool:
        ask_all(client, at_once=6)
        now = routed(client)
        return len(now) == 2 and all(now[each] > first.get(each, 0) for each in now)

    wait_until(30, both_know_the_key)
    service.switch.off()
    away = time.monotonic()
    answered, before = 0, routed(client)
    while time.monotonic() - away < STALE_SECONDS - 8:
        ask_all(client, at_once=6)
        answered += 6
        time.sleep(1)  # other tests need the processors
    after = routed(client)
    measured("questions were answered without PostgreSQL", answered)
    measured("requests to each replica before and after", (before, after))
    wait_until(2 * STALE_SECONDS, lambda: ask(client, 0).status_code == 503, 0.5)
    assert ask(client, 0).headers["retry-after"].isdigit()
    service.switch.on()
    back = time.monotonic()
    wait_until(30, lambda: ask(client, 0).is_success)
    measured("seconds until answers came again", round(time.monotonic() - back, 1))
