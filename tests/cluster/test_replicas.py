"""`ragcache serve --replicas 2` as compose.yaml has it: Ray Serve over PostgreSQL and an S3 store.
One replica is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import text

from ragcache.db import Database
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.conftest import REPOSITORY
from tests.ragcache.conftest import postgres_schema

pytest.importorskip("ray", reason="replicas run on Ray: pip install 'ragcache[ray]'")
moto = pytest.importorskip(
    "moto.server", reason="an S3 store to test with: pip install moto[server]"
)

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text("utf-8"))
SERVICE = COMPOSE["services"]["ragcache"]
COLLECTION = "/v1/collections/notes/documents"
DOCUMENTS = {
    "boats.md": "The survey boat Pipit is moored at the north quay.",
    "keys.md": "The spare key of the boathouse hangs in the red cupboard.",
    "leave.md": "Everybody has 26 days of leave a year.",
}
QUESTIONS = ("Where is the Pipit moored?", "Where does the spare key hang?", "How much leave?")


@pytest.fixture
def service(socket_enabled: None, tmp_path: Path) -> Iterator[tuple[httpx.Client, str]]:
    """The service of the compose file, with its command and variables, and its ledger."""
    store = moto.ThreadedMotoServer(port=0)
    store.start()
    with socket.socket() as free, postgres_schema() as ledger:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        host, s3_port = store.get_host_and_port()
        given = {
            "RAGCACHE_LEDGER": ledger, "AWS_ENDPOINT_URL": f"http://{host}:{s3_port}",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        variables = {**SERVICE["environment"], **given, "RAGCACHE_STATE": str(tmp_path / "state")}
        variables |= {"RAGCACHE_HOST_BYTES": "64MiB", "RAGCACHE_EMBEDDING": "none"}
        command = [sys.executable, "-m", "ragcache_api.cli.main", *SERVICE["command"]]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)], env={**os.environ, **variables}, cwd=tmp_path,
                stdout=log, stderr=log,
            )  # fmt: skip
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        try:
            wait_until(300, lambda: is_ready(client) or process.poll() is not None, 1.0)
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            yield client, ledger
            process.terminate()
            assert process.wait(120) == 0, (tmp_path / "log").read_text()[-4000:]
        finally:
            client.close()
            process.kill()
            store.stop()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready", timeout=5).is_success and len(replicas(client)) == 2
    except (httpx.HTTPError, KeyError):
        return False


def replicas(client: httpx.Client) -> dict[str, str]:
    """The sessions of the replicas that have said theirs, by name."""
    listed = client.get("/admin/replicas").json()["items"]
    return {each["name"]: each["session"] for each in listed if each["session"] != each["name"]}


def ask(client: httpx.Client, number: int) -> httpx.Response:
    question = QUESTIONS[number % len(QUESTIONS)]
    body = {"question": question, "collection": "notes", "k": 1, "max_tokens": 4}
    return client.post("/v1/answers", json=body)


def kept(ledger: str) -> tuple[int, dict[str, int]]:
    """The states in the remote tier, and the process numbers of sessions."""
    database = Database.open(ledger)
    with database.reading() as session:
        states = session.scalar(text("SELECT count(*) FROM states WHERE tier = 'remote'"))
        sessions = session.execute(text("SELECT id, pid FROM sessions"))
        pids = {row.id: row.pid for row in sessions}
    database.close()
    return int(states or 0), pids


def test_a_replica_is_killed_and_nobody_notices(
    service: tuple[httpx.Client, str], measured: Measured
) -> None:
    client, ledger = service
    documents = [{"id": name, "text": words} for name, words in DOCUMENTS.items()]
    number = client.post(COLLECTION, json={"documents": documents}).json()["id"]
    wait_until(120, lambda: client.get(f"/v1/jobs/{number}").json()["status"] == "done", 0.2)
    assert all(ask(client, number).is_success for number in range(6))
    before = replicas(client)
    states, pids = kept(ledger)
    assert states == len(DOCUMENTS) + 1  # and the preamble
    name, lost = next(iter(before.items()))
    os.kill(pids[lost], signal.SIGKILL)
    killed = time.monotonic()
    answered = [ask(client, number) for number in range(12)]
    assert [each.status_code for each in answered] == [200] * 12
    wait_until(240, lambda: len(replicas(client).keys() - {name}) == 2, 1.0)
    measured("seconds until there were two again", round(time.monotonic() - killed, 1))
    assert all(ask(client, number).is_success for number in range(6))
    assert kept(ledger)[0] == states
