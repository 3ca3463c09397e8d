"""Processes that share a ledger and a disk."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ragcache.store.verify import verify
from tests.ragcache.store.library import ROOT, Library, key_of, texts_of

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


def test_processes_that_ingest_the_same_encode_it_once(tmp_path: Path, where: Path | str) -> None:
    Library(tmp_path, where).close()
    start = time.monotonic() + 0.3

    def ingest(order: tuple[str, ...]) -> list[str]:
        library = Library(tmp_path, where)
        time.sleep(max(0.0, start - time.monotonic()))
        for name in order:
            library.put(name, 2)
        made = [str(key) for key in library.made]
        library.close()
        return made

    orders = (NAMES, NAMES[::-1], (*NAMES[1:], NAMES[0]))
    made: Counter[str] = Counter()
    for reading in [fork(lambda order=order: ingest(order)) for order in orders]:
        told = result(reading)
        assert isinstance(told, list), told
        made.update(told)
    keys = {str(key_of(text)) for name in NAMES for text in texts_of(name, 2)} | {str(ROOT)}
    assert made == dict.fromkeys(keys, 1)
    library = Library(tmp_path, where)
    assert library.versions() == dict.fromkeys(NAMES, 2)
    assert verify(library.store).found == ()
    library.close()


def test_readers_see_a_whole_document_while_another_process_replaces_it(
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
    deadline = time.monotonic() + 60
    while 11 not in seen and time.monotonic() < deadline:
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
