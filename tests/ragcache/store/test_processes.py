"""Several processes on one folder, and processes that are killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from select import select

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from ragcache.db import Database
from ragcache.db.tables import Base
from ragcache.store.verify import verify
from tests.conftest import scaled
from tests.ragcache.store.store_fixture import ROOT, Library, key_of, texts_of

NAMES = ("ash", "elm", "fir")


def fork(work: Callable[[], object]) -> int:
    """The file descriptor that what a new process returns can be read from, as JSON."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        except BaseException as error:
            os.write(writing, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    return reading


def result(reading: int) -> object:
    with os.fdopen(reading) as told:
        found = json.loads(told.read())
    os.wait()
    return found


@pytest.mark.slow
def test_processes_that_ingest_the_same_encode_it_once(tmp_path: Path, where: Path | str) -> None:
    Library(tmp_path, where).close()
    start = time.monotonic() + 0.3

    def ingest(order: tuple[str, ...]) -> list[str]:
        library = Library(tmp_path, where)
        time.sleep(max(0.0, start - time.monotonic()))
        for name in order:
            library.put(name, 2)
        made = list(library.made)
        library.close()
        return made

    orders = (NAMES, NAMES[::-1], (*NAMES[1:], NAMES[0]))
    made: Counter[str] = Counter()
    for reading in [fork(lambda order=order: ingest(order)) for order in orders]:
        told = result(reading)
        assert isinstance(told, list), told
        made.update(told)
    keys = {key_of(text) for name in NAMES for text in texts_of(name, 2)} | {ROOT}
    assert made == dict.fromkeys(keys, 1)
    library = Library(tmp_path, where)
    assert library.versions() == dict.fromkeys(NAMES, 2)
    assert verify(library.store).found == ()
    library.close()


@pytest.mark.slow
def test_readers_see_whole_documents_during_a_replacement(
    tmp_path: Path, where: Path | str
) -> None:
    Library(tmp_path, where).close()

    def replace() -> str:
        library = Library(tmp_path, where)
        for version in range(12):
            library.put("ash", version)
        library.close()
        return "done"

    reading = fork(replace)
    library = Library(tmp_path, where)
    seen = set()
    ended = False
    while not ended:
        ended = bool(select([reading], [], [], 0)[0])  # then it is read once more
        if "library" in library.catalog.collections():
            rows = library.catalog.modules("library")
            texts = [row.text for row in rows]
            versions = [n for n in range(12) if texts == texts_of("ash", n)]
            assert versions or not texts, f"a mixture: {texts}"
            seen.update(versions)
            library.read("ash")
    assert result(reading) == "done"
    assert 11 in seen
    library.close()


TREES = ("ash", "elm", "fir", "oak")
LONGEST = 0.25  # seconds until a process is killed


def run_and_kill(
    work: Callable[[Callable[[str], None]], None], seconds: float, lines: int = 0
) -> list[str]:
    """Runs work in a process of its own, which is killed when it has told so many lines and then so
    many seconds have passed; returns the lines that it had told by then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            work(lambda line: os.write(writing, f"{line}\n".encode()) and None)
        except BaseException as error:
            os.write(writing, f"failed {error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    told = b""
    while told.count(b"\n") < lines and (more := os.read(reading, 1 << 16)):
        told += more
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as rest:
        return (told + rest.read()).decode().splitlines()


def live(folder: Path, where: Path | str, seed: int, tell: Callable[[str], None]) -> None:
    """Changes a library until killed. Every change is told before it begins and when it is done."""
    rng = random.Random(seed)
    library = Library(folder, where)
    tell("opened")
    for turn in range(10_000):
        name, version = rng.choice(TREES), seed * 10_000 + turn
        kind = rng.choice(("put", "put", "put", "delete", "evict", "read"))
        if kind != "put" and name not in library.versions():
            continue
        if kind in ("put", "delete"):
            tell(f"begin {name} {version if kind == 'put' else -1}")
            library.put(name, version) if kind == "put" else library.delete(name)
            tell("done")
        elif kind == "evict":
            library.store.evict(library.keys(name))
        else:
            library.read(name)


def settle(expected: dict[str, int], lines: list[str]) -> dict[str, set[int]]:
    """Return the versions that each document may have: acknowledged, or under way. -1 is gone."""
    assert not [line for line in lines if line.startswith("failed")], lines
    possible = {name: {version} for name, version in expected.items()}
    for number, line in enumerate(lines):
        if line.startswith("begin"):
            _, name, version = line.split()
            acknowledged = number + 1 < len(lines) and lines[number + 1] == "done"
            before = set() if acknowledged else possible.get(name, {-1})
            possible[name] = {int(version)} | before
    return possible


def check(folder: Path, where: Path | str, possible: dict[str, set[int]]) -> dict[str, int]:
    """Restarts; returns what the documents are now."""
    library = Library(folder, where)
    try:
        report = verify(library.store)
        assert report.found == ()
        assert set(library.store.disk.keys()) == library.store.ledger.keys("disk")
        assert not list(folder.glob("states/??/*.part"))
        now = library.versions()
        for name, versions in possible.items():
            assert now.get(name, -1) in versions, f"{name} is {now.get(name, -1)} of {versions}"
        for name in now:
            library.read(name)
        return {name: now.get(name, -1) for name in possible}
    finally:
        library.close()


@pytest.mark.slow
def test_many_kills(tmp_path: Path, where: Path | str) -> None:
    """Two hundred under the profile `full`."""
    rng, kills, acknowledged = random.Random(1000), scaled(200, quick=0.05), 0
    expected: dict[str, int] = {}
    for turn in range(kills):
        work = lambda tell, turn=turn: live(tmp_path, where, 1000 + turn, tell)  # noqa: E731
        lines = run_and_kill(work, rng.uniform(0.0, LONGEST), rng.choice((0, 1, 2, 3, 5, 9)))
        acknowledged += lines.count("done")
        expected = check(tmp_path, where, settle(expected, lines))
    assert acknowledged > kills / 2


@pytest.mark.slow
def test_many_kills_of_a_migration(tmp_path: Path) -> None:
    """Fifty under the profile `full`. The moments of the kills close in on the time that a
    migration takes, however busy the machine is."""
    rng, seen, longest = random.Random(7), set(), 0.1
    for turn in range(scaled(50, quick=0.3)):
        path = tmp_path / f"new{turn}.sqlite3"
        opening = lambda tell, path=path: (Database.open(path), tell("done"))  # noqa: E731
        done = "done" in run_and_kill(opening, rng.uniform(0.0, longest))
        longest *= 0.8 if done else 1.25
        seen.add(done)
        database = Database.open(path)
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        database.close()
    assert seen == {False, True}
