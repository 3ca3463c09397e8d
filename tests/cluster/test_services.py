"""Services of several machines over one ledger and one remote, while some of them end."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, select

from ragcache.db import Catalog, Database
from ragcache.db.tables import StateTable
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.cluster.services import COLLECTION, Services
from tests.ragcache.store.test_faults import Switch

WORDS = ("anchor", "beacon", "cutter", "dinghy", "ensign", "fathom", "galley", "halyard")
_REMOTE_ROWS = select(StateTable.tier, StateTable.key).where(StateTable.tier == "remote")
TEXTS = {word: f"The {word} is kept in shed {n}. " * 200 for n, word in enumerate(WORDS)}


def test_an_accepted_ingestion_survives_its_process(services: Services, measured: Measured) -> None:
    first, second = services.start("a"), services.start("b")
    number = first.submit(TEXTS)
    first.kill()
    began = time.monotonic()
    wait_until(120, lambda: second.job(number)["status"] == "done")
    took = time.monotonic() - began
    began = time.monotonic()
    second.ingest({f"{word} 2": text.replace("kept", "stored") for word, text in TEXTS.items()})
    encoding = time.monotonic() - began
    measured("done after, of which encoding takes about", f"{took:.1f} s, {encoding:.1f} s")
    assert second.sources("Where is the beacon kept?").keys() <= {"beacon", "beacon 2"}
    report = second.verify()
    assert report["clean"], report


def test_a_deleted_document_leaves_every_machine(services: Services, measured: Measured) -> None:
    first, second = services.start("a"), services.start("b")
    first.ingest({word: TEXTS[word] for word in WORDS[:2]})
    for service in (first, second, second):
        assert "anchor" in service.sources("Where is the anchor kept?", 4)
    database = Database.open(services.url)
    keys = set(map(str, Catalog(database, "", None).keys(COLLECTION, ["anchor"])))

    def left() -> set[str]:
        with database.reading() as session:
            rows = select(StateTable.key).where(StateTable.key.in_(keys))
            return set(session.scalars(rows)) | (keys & second.blobs())

    wait_until(10, lambda: keys & second.blobs())
    first.delete("anchor")
    began = time.monotonic()
    wait_until(30, lambda: not left())
    measured("blobs of a deleted document leave another machine within",
             f"{time.monotonic() - began:.1f} s")  # fmt: skip
    for service in (first, second):
        wait_until(10, lambda service=service: service.verify()["clean"])
    database.close()
    assert "anchor" not in second.sources("Where is the anchor kept?", 4)


def test_a_service_with_another_remote_neither_starts_nor_writes(
    services: Services, measured: Measured
) -> None:
    first = services.start("a")
    first.ingest({word: TEXTS[word] for word in WORDS[:2]})
    database = Database.open(services.url)

    def rows() -> set[tuple[str, str]]:
        with database.reading() as session:
            return {(tier, key) for tier, key in session.execute(_REMOTE_ROWS)}

    before = rows()
    with pytest.raises(AssertionError, match="it is another one, or what is mounted there is away"):
        services.start("b", remote=f"file://{services.folder / 'unmounted'}")
    measured("rows of the remote before and after a start with another", (len(before), len(rows())))
    assert rows() == before
    assert len(before) > 0
    assert not list((services.folder / "unmounted").glob("**/*"))
    second = services.start("b")
    assert set(second.sources("Where is the anchor kept?").values()) == {"remote"}
    assert first.verify()["clean"]
    database.close()


def test_an_ending_service_accepts_connections_until_noticed(
    services: Services, measured: Measured
) -> None:
    service = services.start("a", lame_duck="4")
    service.send(signal.SIGTERM)
    began = time.monotonic()
    wait_until(3, lambda: service.client.get("/health/ready").status_code == 503, every=0.01)
    measured("not ready after", f"{(time.monotonic() - began) * 1000:.0f} ms")
    accepted, refused = 0, 0
    while time.monotonic() - began < 3:
        try:
            socket.create_connection(("127.0.0.1", service.started.port), timeout=5).close()
            accepted += 1
        except OSError:
            refused += 1
        time.sleep(0.003)
    measured("connections accepted and refused in 3 s after SIGTERM", (accepted, refused))
    assert service.client.get("/health/live").status_code == 200
    assert refused == 0
    service.started.process.join(60)
    assert service.started.process.exitcode == 0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The URL of a Redis that ends with the test."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server; .ci/redis installs it")
    path = tmp_path / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as server:
        wait_until(10, path.exists)
        yield f"redis+unix://{path}"
        server.terminate()


def test_a_rate_counts_for_all_services_together(
    services: Services, redis: str, measured: Measured
) -> None:
    shared = {"rate": "10/hour", "rate_storage": redis}
    running = [services.start(machine, **shared) for machine in ("a", "b")]
    statuses = [running[n % 2].client.get("/v1/jobs").status_code for n in range(30)]
    measured("requests of 30 that two services with a rate of 10 took", statuses.count(200))
    assert statuses == [200] * 10 + [429] * 20
    assert running[0].client.get("/v1/jobs").headers["retry-after"].isdigit()


def test_questions_over_states_in_memory_need_no_ledger(
    services: Services, tmp_path: Path, measured: Measured
) -> None:
    switch = Switch(tmp_path, make_url(services.url))
    switch.on()
    service = services.start("a", ledger=switch.through(services.url), stale_seconds="16")
    service.ingest({word: TEXTS[word] for word in WORDS[:2]})
    question = "Where is the anchor kept?"
    asked = [service.sources(question) for _ in range(2)]
    switch.off()
    away = time.monotonic()
    answered = 0
    while time.monotonic() - away < 5:
        assert service.sources(question).keys() == asked[0].keys()
        answered += 1
        time.sleep(0.2)  # other tests need the processors
    refused = service.client.post(f"/v1/collections/{COLLECTION}/documents", json={"documents": [
        {"id": "new", "text": "The new one."}
    ]})  # fmt: skip
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    time.sleep(13)
    late = service.ask(question)
    assert (late.status_code, "retry-after" in late.headers) == (503, True)
    switch.on()
    back = time.monotonic()
    wait_until(30, lambda: service.ask(question).status_code == 200)
    measured("answers in 5 s without the ledger; answers again after it is back",
             f"{answered}; {time.monotonic() - back:.1f} s")  # fmt: skip
    service.kill()
    switch.off()
