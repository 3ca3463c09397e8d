"""The upkeep of several processes: heartbeats, uses, one clock."""

from __future__ import annotations

import random
import time

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from ragcache.db.tables import SessionTable, StateTable
from tests.cluster.conftest import Measured
from tests.cluster.machines import Machines, Report, wait_until
from tests.ragcache.store.store_fixture import Library

NAMES = tuple(f"tree {number}" for number in range(40))


def test_a_failing_sweep_leaves_the_heart_beating(machines: Machines, measured: Measured) -> None:
    def fail(library: Library, report: Report) -> None:
        def collide() -> None:
            raise IntegrityError("INSERT", {}, Exception("another process was first"))

        library.store.ledger.flush = collide  # type: ignore[method-assign]
        report(library.store.ledger.sessions.id)
        time.sleep(600)

    failing = machines.start("a", fail)
    session_id = failing.read_line()
    database, beats = machines.database(), set()

    def look() -> bool:
        with database.reading() as session:
            chosen = select(SessionTable.heartbeat).where(SessionTable.id == session_id)
            beats.add(session.scalars(chosen).one())
        return len(beats) >= 4

    wait_until(30, look)
    spans = [b - a for a, b in zip(sorted(beats), sorted(beats)[1:], strict=False)]
    measured("longest time between heartbeats while every sweep fails", f"{max(spans):.1f} s")
    assert max(spans) < 10
    database.close()


def test_processes_that_share_states_do_not_deadlock(
    machines: Machines, measured: Measured
) -> None:
    def ask(library: Library, report: Report) -> None:
        rng, asked = random.Random(library.store.ledger.sessions.id), 0
        keys = {name: library.keys(name) for name in NAMES}
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            wanted = [key for name in rng.sample(NAMES, 20) for key in keys[name]]
            library.store.fetch(wanted).release()
            library.store.evict(wanted[:3], "host")
            asked += 1
            if asked % 5 == 0:
                library.store.ledger.flush()
        report([asked, library.store.ledger.failures])

    seed = Library(machines.disk("seed"), machines.url, states=400)
    for name in NAMES:
        seed.put(name, 2)
    processes = [machines.start(f"m{number}", ask) for number in range(4)]
    told = [process.read_all() for process in processes]
    assert all(len(lines) == 1 and isinstance(lines[0], list) for lines in told), told
    asked, failed = (sum(lines[0][n] for lines in told) for n in range(2))
    measured("writes of uses that failed, of four processes with leases in all", (failed, asked))
    assert failed == 0
    seed.close()


def test_the_last_use_of_states_never_runs_backwards(
    machines: Machines, measured: Measured
) -> None:
    def busy(library: Library, report: Report) -> None:
        for _ in range(500):
            library.read("ash")
        library.store.sweep()
        report("used")
        time.sleep(600)

    def idle(library: Library, report: Report) -> None:
        report("opened")
        while not (library.folder / "go").exists():
            time.sleep(0.01)
        library.read("ash")
        library.store.sweep()
        report("used")

    seed = Library(machines.disk("seed"), machines.url)
    seed.put("ash", 1)
    last = machines.start("idle", idle)
    assert last.read_line() == "opened"
    assert machines.start("busy", busy).read_line() == "used"
    with seed.database.reading() as session:
        before = max(session.scalars(select(StateTable.last_use)))
    (machines.disk("idle") / "go").touch()
    assert last.read_line() == "used"
    with seed.database.reading() as session:
        after = max(session.scalars(select(StateTable.last_use)))
    measured("last use of states, before and after a process that was idle", (before, after))
    assert after > before > 500
    seed.close()
