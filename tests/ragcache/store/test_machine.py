"""A model of the store beside the store: whatever is done in whatever order, they agree."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ragcache.states import KVKey
from ragcache.store import Lease, store
from ragcache.store.verify import verify
from tests.conftest import scaled
from tests.ragcache.conftest import postgres_schema, same
from tests.ragcache.store.store_fixture import Library, key_of, states_of, texts_of

NAMES = st.sampled_from(("ash", "elm", "fir", "oak"))
VERSIONS = st.integers(0, 5)
PROCESSES = st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """Two processes with one ledger and one disk. `documents` is the model: names and versions."""

    leases = Bundle("leases")
    postgres = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, self.folder)
        self.where: Path | str = self.folder / "ledger.sqlite"
        if self.postgres:
            self.where = self.stack.enter_context(postgres_schema())
        self.documents: dict[str, int] = {}
        self.pinned: set[KVKey] = set()
        self.open: list[Library] = []

    @initialize()
    def begin(self) -> None:
        self.open = [Library(self.folder, self.where) for _ in range(2)]

    @rule(process=PROCESSES, name=NAMES, version=VERSIONS)
    def put(self, process: int, name: str, version: int) -> None:
        self.open[process].put(name, version)
        self.documents[name] = version

    @precondition(lambda self: self.documents)
    @rule(process=PROCESSES, name=NAMES)
    def delete(self, process: int, name: str) -> None:
        self.open[process].delete(name)
        self.documents.pop(name, None)

    @rule(process=PROCESSES, name=NAMES)
    def read(self, process: int, name: str) -> None:
        if name in self.documents:
            sources = self.open[process].read(name)
            assert len(sources) == len(texts_of(name, self.documents[name]))

    @rule(process=PROCESSES, name=NAMES)
    def read_again(self, process: int, name: str) -> None:
        """States that were read twice are here."""
        if name in self.documents:
            for _ in range(2):
                self.open[process].read(name)
            assert "encoded" not in self.open[process].read(name)

    @rule(target=leases, process=PROCESSES, name=NAMES)
    def hold(self, process: int, name: str) -> Any:
        if name not in self.documents:
            return multiple()
        library = self.open[process]
        keys = [key_of(text) for text in texts_of(name, self.documents[name])]
        return library.lease(keys, "question")

    @rule(lease=consumes(leases))
    def let_go(self, lease: Lease) -> None:
        """Check that leased states stayed as they were, whatever happened to their document."""
        for key, states in zip(lease.keys, lease.states, strict=True):
            assert same(states, states_of(key))
        lease.release()

    @rule(process=PROCESSES, name=NAMES, tier=st.sampled_from((None, "host", "disk")))
    def evict(self, process: int, name: str, tier: str | None) -> None:
        if name in self.documents:
            keys = self.open[process].keys(name)
            self.open[process].store.evict(keys, tier)
            self.pinned -= set(keys) if tier != "host" else set()

    @rule(process=PROCESSES, name=NAMES, pinned=st.booleans())
    def pin(self, process: int, name: str, pinned: bool) -> None:
        if name in self.documents:
            store, keys = self.open[process].store, self.open[process].keys(name)
            store.pin(keys, pinned)

    @rule(process=PROCESSES, name=NAMES)
    def expire(self, process: int, name: str) -> None:
        if name in self.documents:
            library = self.open[process]
            library.store.expire(library.keys(name), time.time() - 1)

    @rule(process=PROCESSES)
    def sweep(self, process: int) -> None:
        self.open[process].store.sweep()

    @rule(process=PROCESSES, name=NAMES)
    def prefetch(self, process: int, name: str) -> None:
        if name in self.documents:
            library = self.open[process]
            library.store.read_ahead(library.keys(name))

    @rule(name=NAMES, how=st.sampled_from(("flip", "cut", "unlink", "empty")))
    def break_a_blob(self, name: str, how: str) -> None:
        path = self.open[0].store.disk.path(key_of(f"{name} for ever"))
        if not path.exists() or not path.stat().st_size:
            return
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        kept = {"flip": content, "cut": content[:-9], "empty": b""}
        path.unlink()  # a new file: what is mapped stays as it was
        if how != "unlink":
            path.write_bytes(kept[how])

    @rule(process=PROCESSES)
    def reopen(self, process: int) -> None:
        self.open[process].close()
        self.open[process] = Library(self.folder, self.where)

    @rule()
    def repair(self) -> None:
        store = self.open[0].store
        assert verify(store, repair=True).clean
        assert verify(store).found == ()
        assert set(store.disk.keys()) == store.ledger.keys("disk")

    @invariant()
    def the_catalog_is_the_model(self) -> None:
        if self.open:
            assert self.open[0].versions() == self.documents

    @invariant()
    def budgets_hold(self) -> None:
        for library in self.open:
            host = library.store.host
            assert host.budget_bytes is not None
            assert host.used_bytes <= host.budget_bytes

    def teardown(self) -> None:
        try:
            for library in self.open:
                for name in self.documents:
                    library.read(name)
                library.close()
        finally:
            self.stack.close()


def run(machine: type[StoreMachine], examples: int) -> None:
    chosen = settings(
        max_examples=examples, stateful_step_count=50, database=None,
        derandomize=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "SWEEP_SECONDS", 3600.0)  # upkeep is a rule: `sweep`
        run_state_machine_as_test(machine, settings=chosen)


def on_postgres(request: pytest.FixtureRequest) -> type[StoreMachine]:
    from tests.ragcache.conftest import postgres_url

    postgres_url()
    request.getfixturevalue("socket_enabled")
    return type("PostgresMachine", (StoreMachine,), {"postgres": True})


def test_hundreds_of_operations() -> None:
    run(StoreMachine, scaled(10, quick=0.1))


@pytest.mark.slow
def test_thousands_of_operations() -> None:
    """Ten thousand under the profile `full`."""
    run(StoreMachine, scaled(200, quick=0.03))


@pytest.mark.slow
def test_thousands_of_operations_on_postgresql(request: pytest.FixtureRequest) -> None:
    run(on_postgres(request), scaled(200, quick=0.02))
