"""The ledger: opening a store of many modules, and what it costs a request."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import insert

from ragcache.states import KVKey, KVStates
from ragcache.store import Catalogue, Database, KVStore, NewDocument, NewModule, Wish
from ragcache.store.rows import Facts, StateRow
from ragcache.store.tables import StateTable

_WARM = 64  # modules that requests ask for
_A_REQUEST = 4
_A_DOCUMENT = 100


def bench_ledger(folder: Path, modules: int = 100_000, requests: int = 1000) -> dict[str, float]:
    """ledger_ms_p50: milliseconds of a request that the ledger takes: the collection's stamp, token
    ids and a lease of four modules in memory. open_s: seconds to open a store of so many modules.

    The blobs are small, and most of them empty: what is measured is bookkeeping.
    """
    fill_ledger(folder, modules)
    began = time.perf_counter()
    database = Database.open(folder / "ledger.sqlite")
    store = KVStore.open(folder, database, 1 << 30)
    opened = time.perf_counter() - began
    try:
        times = _requests(store, Catalogue(database, "tokenizer", None), requests)
    finally:
        store.close()
        database.close()
    return {"ledger_ms_p50": 1000 * statistics.median(times), "open_s": opened}


def _requests(store: KVStore, catalogue: Catalogue, requests: int) -> list[float]:
    rows = catalogue.modules("bench")[:_WARM]
    keys = [_key(number) for number in range(_WARM)]
    for _ in range(2):  # the second use admits
        store.fetch(keys).release()
    times = []
    for number in range(requests):
        chosen = [(7 * number + i) % _WARM for i in range(_A_REQUEST)]
        began = time.perf_counter()
        catalogue.stamp("bench")
        catalogue.token_ids([rows[i].id for i in chosen])
        with store.fetch([keys[i] for i in chosen]):
            times.append(time.perf_counter() - began)
    return times


def fill_ledger(folder: Path, modules: int) -> None:
    """Makes a state folder of so many modules in the collection `bench`."""
    database = Database.open(folder / "ledger.sqlite")
    store = KVStore.open(folder, database, 1 << 30)
    documents = [
        NewDocument(f"d{first}", "", "", [
            NewModule(f"m{n}", "text", [1, 2, 3], _key(n))
            for n in range(first, min(first + _A_DOCUMENT, modules))
        ])
        for first in range(0, modules, _A_DOCUMENT)
    ]  # fmt: skip
    Catalogue(database, "tokenizer", None).replace("bench", documents)
    states = KVStates(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), 0)
    for number in range(_WARM):
        store.put(_key(number), states, Wish("ingest", "rooted"))
    facts = Facts(3, 0.1, "rooted", _key(-1), "model")
    rows: list[dict[str, Any]] = []
    for number in range(_WARM, modules):
        row = StateRow(_key(number), "disk", 4096, 0, number, False, math.inf, "model", facts)
        rows.append(row.values(""))
        path = store.disk.path(row.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with database.transaction() as session:
        session.execute(insert(StateTable), rows)
    store.close()
    database.close()


def _key(number: int) -> KVKey:
    return KVKey(hashlib.sha256(str(number).encode()).hexdigest())
