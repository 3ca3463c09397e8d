"""Processes of other machines that die, or that are silent and come back."""

from __future__ import annotations

import signal
import time

from sqlalchemy import func, select

from ragcache.db.sessions import DEAD_SECONDS
from ragcache.db.tables import ClaimTable, SessionTable, StateTable
from ragcache.store import LeaseRequest
from tests.cluster.conftest import Measured
from tests.cluster.machines import Machines, Report, wait_until
from tests.ragcache.conftest import full_lease
from tests.ragcache.store.store_fixture import Library, key_of

KEYS = [key_of(f"text {number}") for number in range(5)]


def test_a_question_hardly_waits_for_a_dead_machines_claims(
    machines: Machines, measured: Measured
) -> None:
    def claim(library: Library, report: Report) -> None:
        library.store.ledger.locks.acquire(KEYS)
        report("claimed")
        time.sleep(600)

    library = Library(machines.disk("here"), machines.url)
    other = machines.start("there", claim)
    assert other.read_line() == "claimed"
    other.end()
    began = time.monotonic()
    with full_lease(library.store, KEYS, library.produce) as lease:
        assert set(lease.source.values()) == {"encoded"}
    waited = time.monotonic() - began
    measured("a question over five keys that a dead machine had claimed", f"{waited:.2f} s")
    assert waited < DEAD_SECONDS, "it did not wait for the other's death"
    with full_lease(library.store, [key_of("x"), *KEYS], library.produce, LeaseRequest("ingest")):
        measured("an ingestion of the same keys", f"{time.monotonic() - began:.1f} s")
    library.close()


def test_a_halted_machine_comes_back_as_the_next_generation(
    machines: Machines, measured: Measured
) -> None:
    def live(library: Library, report: Report) -> None:
        library.put("ash", 2)
        library.store.ledger.flush()
        report(library.store.ledger.sessions.id)
        while not (library.folder / "go").exists():
            time.sleep(0.05)
        library.store.ledger.locks.acquire(KEYS)
        report("claimed")
        time.sleep(600)

    library = Library(machines.disk("here"), machines.url)
    other = machines.start("there", live)
    session_id = other.read_line()

    def count(table: type, *chosen: object) -> int:
        with library.database.reading() as session:
            return int(session.scalar(select(func.count()).select_from(table).where(*chosen)) or 0)

    in_memory = StateTable.place == session_id
    held = count(StateTable, in_memory)
    assert held
    other.send(signal.SIGSTOP)
    row = SessionTable.id == session_id
    began = time.monotonic()
    wait_until(6 * DEAD_SECONDS, lambda: not count(SessionTable, row))
    measured("a silent machine counts as dead after", f"{time.monotonic() - began:.1f} s")
    assert count(StateTable, in_memory) == 0
    (machines.disk("there") / "go").touch()
    other.send(signal.SIGCONT)
    began = time.monotonic()
    wait_until(10, lambda: count(SessionTable, row, SessionTable.generation == 2))
    wait_until(10, lambda: count(StateTable, in_memory) == held)
    measured("it is known again, with its rows, after", f"{time.monotonic() - began:.1f} s")
    assert other.read_line() == "claimed"
    other.end()
    began = time.monotonic()
    wait_until(6 * DEAD_SECONDS, lambda: not count(ClaimTable))
    measured("its later claims are free after its death by", f"{time.monotonic() - began:.1f} s")
    library.close()
