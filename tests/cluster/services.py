"""Services as on several machines, over one PostgreSQL and one remote tier."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.api.http.server_process import Started, start_server
from tests.cluster.machines import wait_until

COLLECTION = "notes"
DOCUMENTS = f"/v1/collections/{COLLECTION}/documents"


@dataclass
class Service:
    """A running `ragcache serve` with a client of it."""

    started: Started
    state: Path
    client: httpx.Client

    def submit(self, texts: dict[str, str]) -> str:
        """Hands documents over; returns the number of their job."""
        documents = [{"id": name, "text": text} for name, text in texts.items()]
        answered = self.client.post(DOCUMENTS, json={"documents": documents})
        assert answered.status_code == 202, answered.text
        return str(answered.json()["id"])

    def job(self, number: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/v1/jobs/{number}").json()
        return found

    def ingest(self, texts: dict[str, str]) -> None:
        """Hands documents over and waits until they are stored."""
        number = self.submit(texts)
        wait_until(60, lambda: self.job(number)["status"] == "done")

    def ask(self, question: str, k: int = 1) -> httpx.Response:
        body = {"question": question, "collection": COLLECTION, "k": k, "max_tokens": 1}
        return self.client.post("/v1/answers", json=body)

    def sources(self, question: str, k: int = 1) -> dict[str, str]:
        """The documents that an answer cites, with the tiers of their states."""
        answered = self.ask(question, k)
        assert answered.status_code == 200, answered.text
        return {each["document"]: each["tier"] for each in answered.json()["sources"]}

    def delete(self, *names: str) -> None:
        for name in names:
            answered = self.client.delete(f"{DOCUMENTS}/{name}")
            assert answered.status_code in (200, 204, 404), answered.text

    def verify(self) -> dict[str, Any]:
        report: dict[str, Any] = self.client.post("/admin/verify").json()
        return report

    def blobs(self) -> set[str]:
        return {path.stem for path in (self.state / "states").glob("??/*.safetensors")}

    def send(self, number: signal.Signals) -> None:
        assert self.started.process.pid is not None
        os.kill(self.started.process.pid, number)

    def kill(self) -> None:
        """As power that fails."""
        self.client.close()
        self.started.process.kill()
        self.started.process.join()


@dataclass
class Services:
    """Starts services over one ledger and one remote."""

    folder: Path
    url: str
    running: list[Service] = field(default_factory=list)

    def start(self, machine: str, **settings: str) -> Service:
        """Starts a service on a machine, with its disk if it had one. settings: variables without
        their prefix."""
        named = {"ledger": self.url, "remote": f"file://{self.folder / 'remote'}", **settings}
        environment = {f"RAGCACHE_{name.upper()}": value for name, value in named.items()}
        state = self.folder / machine
        started = start_server(state, machine=machine, **environment)
        service = Service(started, state, httpx.Client(base_url=started.url, timeout=60))
        self.running.append(service)
        return service

    def end(self) -> None:
        for service in self.running:
            if service.started.process.is_alive():
                service.kill()
