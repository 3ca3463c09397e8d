"""Services of several machines over one ledger and one remote, while some of them end."""

from __future__ import annotations

import signal
import socket
import time

from sqlalchemy import select

from ragcache.db import Catalog, Database
from ragcache.db.sessions import DEAD_SECONDS
from ragcache.db.tables import StateTable
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.cluster.services import COLLECTION, Services

WORDS = ("anchor", "beacon", "cutter", "dinghy", "ensign", "fathom", "galley", "halyard")
TEXTS = {word: f"The {word} is kept in shed {n}. " * 200 for n, word in enumerate(WORDS)}


def test_d3_an_accepted_ingestion_goes_on_where_its_process_died(
    services: Services, measured: Measured
) -> None:
    first, second = services.start("a"), services.start("b")
    number = first.submit(TEXTS)
    first.kill()
    began = time.monotonic()
    wait_until(120, lambda: second.job(number)["status"] == "done")
    took = time.monotonic() - began
    began = time.monotonic()
    second.ingest({f"{word} 2": text.replace("kept", "stored") for word, text in TEXTS.items()})
    encoding = time.monotonic() - began
    measured("D3 done after, of which encoding takes about", f"{took:.1f} s, {encoding:.1f} s")
    assert took < DEAD_SECONDS + 5 + encoding
    assert second.sources("Where is the beacon kept?").keys() <= {"beacon", "beacon 2"}
    report = second.verify()
    assert report["clean"], report


def test_d6_what_is_deleted_leaves_every_machine(services: Services, measured: Measured) -> None:
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
    measured("D6 blobs of a deleted document leave another machine within",
             f"{time.monotonic() - began:.1f} s")  # fmt: skip
    assert time.monotonic() - began < 3
    for service in (first, second):
        wait_until(10, lambda service=service: service.verify()["clean"])
    database.close()
    assert "anchor" not in second.sources("Where is the anchor kept?", 4)


def test_d9_a_service_that_ends_refuses_no_connection_until_it_is_noticed(
    services: Services, measured: Measured
) -> None:
    service = services.start("a", lame_duck="4")
    service.send(signal.SIGTERM)
    began = time.monotonic()
    wait_until(3, lambda: service.client.get("/health/ready").status_code == 503, every=0.01)
    measured("D9 not ready after", f"{(time.monotonic() - began) * 1000:.0f} ms")
    accepted, refused = 0, 0
    while time.monotonic() - began < 3:
        try:
            socket.create_connection(("127.0.0.1", service.started.port), timeout=5).close()
            accepted += 1
        except OSError:
            refused += 1
        time.sleep(0.003)
    measured("D9 connections accepted and refused in 3 s after SIGTERM", (accepted, refused))
    assert service.client.get("/health/live").status_code == 200
    assert refused == 0
    service.started.process.join(60)
    assert service.started.process.exitcode == 0
