"""The threads of an open store: one for what every second brings, one for prefetching."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from ragcache.errors import StoreError
from ragcache.states import KVKey

if TYPE_CHECKING:
    from ragcache.store.store import KVStore

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
_WAITING = 256  # prefetches; when more wait, the next are left out


class Background:
    """Threads that end with `stop`, or with the store that nobody refers to any more."""

    def __init__(self, store: KVStore) -> None:
        self._store = weakref.ref(store)
        self._stopped = threading.Event()
        self._wanted: queue.Queue[list[KVKey] | None] = queue.Queue(_WAITING)
        self._threads = [
            threading.Thread(target=_sweep, args=(self._store, self._stopped), daemon=True),
            threading.Thread(
                target=_prefetch, args=(self._store, self._stopped, self._wanted), daemon=True
            ),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def prefetch(self, keys: list[KVKey]) -> None:
        try:
            self._wanted.put_nowait(keys)
        except queue.Full:
            logger.debug("prefetching falls behind; some states are read when they are needed")

    def stop(self) -> None:
        """Ends the threads, and does the last sweep."""
        self._stopped.set()
        with suppress(queue.Full):
            self._wanted.put_nowait(None)  # wakes the thread
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        store = self._store()
        if store is not None:
            _once(store)


def _sweep(reference: weakref.ref[KVStore], stopped: threading.Event) -> None:
    while not stopped.wait(TICK_SECONDS):
        store = reference()
        if store is None:
            return
        _once(store)
        del store


def _once(store: KVStore) -> None:
    try:
        store.sweep()
    except StoreError as error:
        store.counters.unreadable += 1
        logger.warning("%s; the store's upkeep is tried again in a second", error)


def _prefetch(
    reference: weakref.ref[KVStore],
    stopped: threading.Event,
    wanted: queue.Queue[list[KVKey] | None],
) -> None:
    while not stopped.is_set():
        try:
            keys = wanted.get(timeout=TICK_SECONDS)
        except queue.Empty:
            if reference() is None:
                return
            continue
        store = reference()
        if store is None or keys is None:
            return
        try:
            store.read_ahead(keys)
        except StoreError as error:
            logger.warning("%s; the states are read when they are needed", error)
        del store
