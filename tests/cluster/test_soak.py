"""Services of several machines that ingest, answer and delete while they are killed and restarted.

15 minutes in `make test-all`; `RAGCACHE_SOAK_SECONDS` says otherwise.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from ragcache.db.sessions import DEAD_SECONDS
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.cluster.services import Service, Services

SECONDS = float(os.environ.get("RAGCACHE_SOAK_SECONDS", "900"))
MACHINES = ("a", "b", "c", "d")
NAMES = tuple(f"document{number}" for number in range(24))


@dataclass
class Soak:
    """Acknowledged changes. jobs: by name the last accepted job and its text; deleted: names whose
    deletion was acknowledged, and when."""

    services: Services
    running: dict[str, Service]
    jobs: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    deleted: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def any(self, rng: random.Random) -> Service:
        with self.lock:
            return self.running[rng.choice(sorted(self.running))]

    def change(self, rng: random.Random) -> None:
        """Ingests a document anew, or deletes one; the next change waits for its job."""
        name, service = rng.choice(NAMES), self.any(rng)
        if name in self.texts and rng.random() < 0.4:
            del self.texts[name], self.jobs[name]  # unknown until it is acknowledged
            service.delete(name)
            self.deleted[name] = time.monotonic()
            self.counts["deleted"] += 1
            return
        version = rng.randrange(10**6)
        text = f"The {name} of version{version} is in shed {version % 9}. " * rng.randint(5, 60)
        self.deleted.pop(name, None)
        self.texts.pop(name, None)
        number = service.submit({name: text})
        self.counts["accepted"] += 1
        self.jobs[name], self.texts[name] = number, text
        wait_until(60 + 3 * DEAD_SECONDS, lambda: self._is_done(rng, number), every=0.2)

    def _is_done(self, rng: random.Random, number: str) -> bool:
        try:
            return bool(self.any(rng).job(number).get("status") == "done")
        except httpx.HTTPError:
            return False

    def ask(self, rng: random.Random) -> None:
        """Asks for a document; one whose deletion was acknowledged before must not be cited."""
        name, began = rng.choice(NAMES), time.monotonic()
        gone = {each for each, at in list(self.deleted.items()) if at < began}
        answered = self.any(rng).ask(f"Where is the {name}?", 3)
        self.counts[f"answers {answered.status_code}"] += 1
        if answered.status_code == 200:
            cited = {each["document"] for each in answered.json()["sources"]}
            with self.lock:
                self.wrong += [f"{each} was deleted" for each in cited & gone & set(self.deleted)]

    def work(self, action: str, seed: int, until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            try:
                getattr(self, action)(rng)
            except httpx.HTTPError:
                self.counts["cut off"] += 1  # its service was killed
            except AssertionError as error:
                if "503" not in str(error) and '"status":404' not in str(error):
                    self.wrong.append(repr(error))
            except RuntimeError as error:  # a client that was closed meanwhile
                self.counts[type(error).__name__] += 1

    def restart_one(self, rng: random.Random) -> None:
        """Kills a service or stops it, and starts it again on its disk."""
        name = rng.choice(sorted(self.running))
        with self.lock:
            service = self.running.pop(name)
        if rng.random() < 0.7:
            service.kill()
            self.counts["killed"] += 1
        else:
            service.started.stop()
            self.counts["stopped"] += 1
        time.sleep(rng.uniform(0, 3))
        started = self.services.start(name)
        with self.lock:
            self.running[name] = started


@pytest.mark.nightly
def test_acknowledged_documents_stay_and_deleted_ones_do_not(
    services: Services, measured: Measured
) -> None:
    soak = Soak(services, {name: services.start(name) for name in MACHINES})
    soak.running["a"].ingest({"first": "The first document is in the first shed."})
    rng, until = random.Random(16), time.monotonic() + SECONDS
    work = [("change", 1, until), ("ask", 2, until), ("ask", 3, until)]
    threads = [threading.Thread(target=soak.work, args=each) for each in work]
    for thread in threads:
        thread.start()
    while time.monotonic() < until - 10:
        time.sleep(rng.uniform(3, 8))
        soak.restart_one(rng)
    for thread in threads:
        thread.join()
    measured("soak", dict(soak.counts))
    assert soak.wrong == []
    for name, text in soak.texts.items():
        service = soak.any(rng)
        wait_until(60 + 3 * DEAD_SECONDS, lambda name=name: soak._is_done(rng, soak.jobs[name]))
        version = text.split("version")[1].split()[0]
        assert name in service.sources(f"Where is the {name} of version{version}?", 3), name
    for machine, service in soak.running.items():
        time.sleep(3)  # a sweep or two
        report = service.verify()
        assert report["clean"], (machine, report)
