"""How full tiers are, without a look at the ledger."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import event

from ragcache.db import Database
from ragcache.store import KVStore, tier_status
from tests.ragcache.conftest import TOKEN_BYTES, make_key, make_states


def test_tier_status_counts_states_bytes_and_hits(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 1 << 20, disk_bytes=1 << 24)
    for number in range(3):
        store.put_states(make_key(number), make_states(number))
    store.pin([make_key(1)])
    store.fetch([make_key(2)]).release()
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    host, disk = tier_status(store)
    assert statements == []
    assert (host.name, host.states, host.hits, host.persistent) == ("host", 3, 1, False)
    assert (disk.name, disk.states, disk.hits, disk.persistent) == ("disk", 3, 0, True)
    assert (host.budget_bytes, disk.budget_bytes) == (1 << 20, 1 << 24)
    for tier in (host, disk):
        assert TOKEN_BYTES <= tier.pinned_bytes < tier.used_bytes
    store.evict([make_key(1)])
    assert [tier.pinned_bytes for tier in tier_status(store)] == [0, 0]
    store.close()
    database.close()
