"""A tier that only this file knows works through the store, the ledger and every surface.

A new tier is a file of its own (`archive_tier.py` here), and in `ragcache/tiers.py` its options in
`TierOptions` and its `TierSpec` in `TIERS`: no other file names tiers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragcache.db import Database
from ragcache.db.jobs import Jobs
from ragcache.errors import StoreBudgetExceeded
from ragcache.store import KVStore, LeaseRequest, tier_status
from ragcache.store.verify import verify
from ragcache.tiers import TIERS, TierSpec
from tests.ragcache.conftest import full_lease, make_key, make_states, same
from tests.ragcache.store.archive_tier import ARCHIVE, ArchiveTier
from tests.ragcache.store.conftest import nothing


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TierSpec("archive", "archive_bytes", ArchiveTier.traits, "")
    monkeypatch.setitem(TIERS, "archive", spec)
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


EDITED_REGISTRY = """
import importlib.util, json, sys
from pathlib import Path

folder = Path(sys.argv[1])
package = Path(importlib.util.find_spec("ragcache").origin).parent
text = (package / "tiers.py").read_text()
row, option = '        TierSpec(\\n            "remote",', '    kv_dtype: KVDType = "model"'
assert text.count(row) == text.count(option) == 1
name = "tests.ragcache.store.archive_tier:ArchiveTier"
new = f'TierSpec("archive", "archive_bytes", TierTraits(persistent=True), "{name}"),'
fields = 'archive: str | None = None; archive_bytes: Size = "1MiB"'
edited = folder / "tiers.py"
edited.write_text(text.replace(row, new + row).replace(option, f"    {fields}\\n{option}"))
spec = importlib.util.spec_from_file_location("ragcache.tiers", edited)
sys.modules["ragcache.tiers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["ragcache.tiers"])

from typer.testing import CliRunner
from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError
from ragcache_api.cli.main import app
from ragcache_api.settings import ServiceSettings
from tests.ragcache.store.archive_tier import ARCHIVE

state, asked = folder / "state", "Where is the kiln?"

def shelf(rag):
    tiers = {index.name: index.tier for index in rag.internals.shared.store.persistent.indexes}
    return tiers["archive"].shelf, tiers["archive"].budget_bytes

with RagCache.open(state, embedding="none", archive="attic", archive_bytes="64MiB") as rag:
    rag.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
    assert ARCHIVE and shelf(rag) == ("attic", 64 << 20) and "archive" in rag.stats().tiers
    expected = rag.ask(asked, collection="notes").text
    rag.modules.move("notes", "archive")
    rag.modules.evict("notes", tier="disk")
    answer = rag.ask(asked, collection="notes")
    assert (answer.text, answer.sources[0].tier) == (expected, "archive"), answer
try:
    RagCache.open(state, archive_size=1)
    raise AssertionError("it is no option")
except ConfigurationError as error:
    assert "unknown option 'archive_size'" in str(error) and "archive_bytes" in str(error)

def run(*words):
    done = CliRunner().invoke(app, [*words, "--state", str(state), "--json"])
    assert done.exit_code == 0 or "verify" in words, (done.output, done.exception)
    return json.loads(done.stdout)

answer = run("ask", asked, "-c", "notes", "--embedding", "none")
assert "archive" in answer["reuse"]["bytes_moved"], "the command has opened the tier"
assert run("verify")["clean"]
ARCHIVE.popitem()
found = run("verify", "--repair")["found"]
assert [each["kind"] for each in found] == ["missing"], found
settings = ServiceSettings.read(state=state, archive_bytes="32MiB", embedding="none")
with RagCache.open(settings.state, **settings.open_options()) as rag:
    assert rag.ask(asked, collection="notes").text == answer["text"] == expected
    assert shelf(rag) == ("cellar", 32 << 20), "the variable RAGCACHE_ARCHIVE, and the option"
"""


@pytest.mark.slow
def test_a_fifth_tier_with_options_is_on_every_surface(tmp_path: Path) -> None:
    """The tier's file, and its options and its row in `ragcache/tiers.py`, are all it takes."""
    command = [sys.executable, "-c", EDITED_REGISTRY, str(tmp_path)]
    told = {"RAGCACHE_ARCHIVE": "cellar", "RAGCACHE_FORCE_MODES": "1"}
    environment = os.environ | told | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
