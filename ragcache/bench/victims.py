"""How long it takes to choose who leaves a large tier."""

from __future__ import annotations

import hashlib
import random
import statistics
import time

from ragcache.states import KVKey
from ragcache.store.entries import Entries, KVEntry
from ragcache.store.policy import POLICIES, check_policy, choose_victims


def bench_victims(entries: int, share: float = 0.01, runs: int = 15) -> dict[str, float]:
    """Milliseconds by policy at the median, to free a `share` of the bytes of so many entries that
    were all encoded after one root."""
    table = _tier(entries)
    need = int(share * table.used_bytes)
    medians = {}
    for policy in POLICIES:
        checked, times = check_policy(policy), []
        for _ in range(runs):
            begin = time.perf_counter()
            choose_victims(table, need, checked)
            times.append(1000 * (time.perf_counter() - begin))
        medians[policy] = statistics.median(times)
    return medians


def _tier(entries: int) -> Entries:
    rng = random.Random(1)
    keys = [KVKey(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(entries)]
    table = Entries()
    for number, key in enumerate(keys):
        table.add(
            KVEntry(
                key,
                nbytes=rng.randrange(1 << 20, 12 << 20),
                last_use=rng.randrange(entries),
                hits=rng.randrange(50),
                cost=rng.random(),
                root=keys[0] if number else None,
            )
        )
    return table
