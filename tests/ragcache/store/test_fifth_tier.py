"""A tier that only this file knows works through the store, the ledger and `RagCache`.

A new tier is a file of its own, a `TierSpec` in `ragcache/tiers.py` and an opener in
`ragcache/store/store.py`, and its budget in `OpenConfig`: no other file names tiers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import RagCache, SourceDocument, rag
from ragcache.db import Database
from ragcache.db.jobs import Jobs
from ragcache.errors import ConfigurationError, StoreBudgetExceeded
from ragcache.models import LoadedModel
from ragcache.params import OpenConfig
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store import KVStore, LeaseRequest, tier_status
from ragcache.store.store import OPENERS
from ragcache.store.tiers.base import MemoryTier, check_budget
from ragcache.store.verify import verify
from ragcache.tiers import TIERS, TierSpec, TierTraits
from tests.ragcache.conftest import full_lease, make_key, make_states, same
from tests.ragcache.store.conftest import nothing

ARCHIVE: dict[KVKey, StoredStates] = {}
"""Content of the tier, which outlives a store."""
SPEC = TierSpec("archive", "archive_bytes", TierTraits(persistent=True))


class ArchiveTier(MemoryTier):
    """States in a dict that stands for a medium of its own."""

    name = "archive"
    traits = SPEC.traits

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes, self._states = budget_bytes, ARCHIVE

    @property
    def used_bytes(self) -> int:
        return sum(states.nbytes for states in ARCHIVE.values())

    def size_of(self, states: StoredStates) -> int:
        return states.nbytes

    def put(self, key: KVKey, states: StoredStates) -> int:
        check_budget(self.name, self.budget_bytes, self.used_bytes, states.nbytes)
        ARCHIVE[key] = states
        return states.nbytes


class ArchiveConfig(OpenConfig):
    archive_bytes: int | None = None


def open_archive(config: OpenConfig, device: torch.device) -> ArchiveTier | None:
    assert device.type == "cpu"
    budget = getattr(config, "archive_bytes", None)
    return None if budget is None else ArchiveTier(budget)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "archive", SPEC)
    monkeypatch.setitem(OPENERS, "archive", open_archive)
    monkeypatch.setattr(rag, "OpenConfig", partial(ArchiveConfig, force_modes=True))
    ARCHIVE.clear()


def test_a_fifth_tier_is_written_read_evicted_and_verified(
    tmp_path: Path, database: Database
) -> None:
    keys = [make_key(number) for number in range(4)]
    jobs = Jobs(database, "tests")
    jobs.expect(jobs.begin("collection tests", 0), keys)
    size = make_states(0).nbytes

    def open_store() -> KVStore:
        return KVStore.open(tmp_path, database, 1 << 20, tiers=[ArchiveTier(3 * size)])

    store = open_store()
    for number, key in enumerate(keys):
        store.put_states(key, make_states(number), LeaseRequest("ingest"))
    assert set(ARCHIVE) == store.ledger.keys("archive") == set(keys[1:]), "three fit"
    assert store.ledger.evictions()["archive"] == {"pressure": 1}
    assert [tier.name for tier in tier_status(store)] == ["host", "disk", "archive"]
    store.evict(keys, "disk")
    store.close()

    again = open_store()
    with full_lease(again, keys[1:], nothing) as lease:
        assert set(lease.source.values()) == {"archive"}
        assert lease.moved == {"disk": 0, "archive": 3 * size}
        assert all(map(same, lease.states, map(make_states, (1, 2, 3))))
    assert verify(again).clean
    ARCHIVE.pop(keys[3])
    assert [each.kind for each in verify(again).found] == ["missing"]
    again.close()
    recovered = open_store()
    assert recovered.ledger.keys("archive") == set(keys[1:3]), "a row without states goes"
    recovered.close()


def test_a_full_fifth_tier_names_its_budget(tmp_path: Path, database: Database) -> None:
    archive = ArchiveTier(10)
    with pytest.raises(StoreBudgetExceeded, match=r"archive tier may hold .* Raise archive_bytes"):
        archive.put(make_key(1), make_states(1))


def test_rag_cache_opens_a_fifth_tier_by_its_budget(
    tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    options: Any = {"archive_bytes": 1 << 26, "max_tokens": 4}
    with RagCache.open(tmp_path, tiny_reader, **options) as opened:
        opened.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
        assert ARCHIVE
        expected = opened.ask("Where is the kiln?", collection="notes")
        opened.modules.move("notes", "archive")
        opened.modules.evict("notes", tier="disk")
        answer = opened.ask("Where is the kiln?", collection="notes")
        assert (answer.text, answer.sources[0].tier) == (expected.text, "archive")
        assert "archive" in opened.stats().tiers
    with pytest.raises(ConfigurationError, match="unknown option 'archive_size'"):
        RagCache.open(tmp_path, tiny_reader, archive_size=1)  # type: ignore[call-arg]
